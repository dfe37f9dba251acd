"""Ends the processes that a driver started when the driver dies, however it dies.

Ray's own processes end with a driver that exits, but after SIGKILL some stay for a minute or longer. This program
holds the reading end of a pipe whose writing end only the driver holds: end of file means that the driver is gone.
It is run as a file, by a bare interpreter, so it uses the standard library alone (Linux: it reads /proc).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_LOOK_INTERVAL_S = 0.5
_GRACE_S = 2.0
# Twice the grace, and room for a machine under load.
_CLOSE_LIMIT_S = 15.0


class Process(NamedTuple):
    """A process beyond doubt: ids are used again, id and start time together are not."""

    pid: int
    start: int
    """Clock ticks after boot."""


class Stat(NamedTuple):
    name: str
    """Of the program, cut to 15 characters."""
    parent: int
    start: int


class DeathWatch:
    """The driver's side: while it is open, a small process watches over this one."""

    def __init__(self) -> None:
        read_end, self._write_end = os.pipe()
        try:
            # A session of its own: Ctrl-C in the terminal must not end it before its work.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(read_end), str(os.getpid())],
                pass_fds=(read_end,),
                start_new_session=True,
            )
        finally:
            os.close(read_end)

    def close(self) -> None:
        """End what this process started and has not ended itself; harmless when repeated."""
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_CLOSE_LIMIT_S)


def is_supported() -> bool:
    """True where processes can be read from /proc."""
    return Path("/proc/self/stat").exists()


def children_named(names: Container[str]) -> dict[str, Process]:
    """This process's living children whose program has one of ``names``, by name."""
    children = {}
    for pid in _all_pids():
        stat = _stat(pid)
        if stat is not None and stat.parent == os.getpid() and stat.name in names:
            children[stat.name] = Process(pid, stat.start)
    return children


def is_alive(process: Process) -> bool:
    """False for a zombie too."""
    stat = _stat(process.pid)
    return stat is not None and stat.start == process.start


def watch(read_end: int, driver: int) -> None:
    """Remember the driver's descendants until it is gone, then end those that are left."""
    # Whoever ends the driver's whole family at once must not end its cleaner first.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    seen: set[Process] = set()
    while not select.select([read_end], [], [], _LOOK_INTERVAL_S)[0]:
        seen |= _descendants({driver} | {process.pid for process in _alive(seen)})
    seen |= _descendants({driver} | {process.pid for process in _alive(seen)})
    for number in (signal.SIGTERM, signal.SIGKILL):
        if _wait_until_gone(seen):
            return
        _send(number, _alive(seen))


def _wait_until_gone(processes: set[Process]) -> bool:
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline:
        if not any(_alive(processes)):
            return True
        time.sleep(0.05)
    return False


def _send(number: signal.Signals, processes: Iterable[Process]) -> None:
    for process in processes:
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            continue


def _alive(processes: set[Process]) -> Iterator[Process]:
    return filter(is_alive, processes)


def _descendants(roots: set[int]) -> set[Process]:
    """All living descendants of ``roots``, this process left out."""
    children: dict[int, list[Process]] = {}
    for pid in _all_pids():
        if pid != os.getpid() and (stat := _stat(pid)) is not None:
            children.setdefault(stat.parent, []).append(Process(pid, stat.start))
    found: set[Process] = set()
    queue = list(roots)
    while queue:
        for child in children.get(queue.pop(), []):
            if child not in found:
                found.add(child)
                queue.append(child.pid)
    return found


def _all_pids() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def _stat(pid: int) -> Stat | None:
    """What is known of a living process; None for one that is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name may contain spaces and brackets; after its last bracket come state, parent, ..., start time (field 22).
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return None if fields[0] == "Z" else Stat(head.partition("(")[2], int(fields[1]), int(fields[19]))


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]))
