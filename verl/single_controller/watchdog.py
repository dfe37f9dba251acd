"""Ends the processes that a driver started when the driver dies, however it dies.

Ray's own processes end with a driver that exits, but after SIGKILL some stay for a minute or longer. This program
holds the reading end of a pipe whose writing end only the driver holds: end of file means that the driver is gone.
It is run as a file, by a bare interpreter, so it uses the standard library alone (Linux: it reads /proc).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_LOOK_INTERVAL_S = 0.5
_GRACE_S = 2.0


class Process(NamedTuple):
    """A process beyond doubt: ids are used again, id and start time together are not."""

    pid: int
    start: int
    """Clock ticks after boot."""


class Stat(NamedTuple):
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
            self._process.wait()


def is_supported() -> bool:
    """True where processes can be read from /proc."""
    return Path("/proc/self/stat").exists()


def watch(read_end: int, driver: int) -> None:
    """Remember the driver's descendants until it is gone, then end those that are left."""
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
    for process in processes:
        stat = _stat(process.pid)
        if stat is not None and stat.start == process.start:
            yield process


def _descendants(roots: set[int]) -> set[Process]:
    """All living descendants of ``roots``, this process left out."""
    children: dict[int, list[Process]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        if (stat := _stat(int(entry))) is not None:
            children.setdefault(stat.parent, []).append(Process(int(entry), stat.start))
    found: set[Process] = set()
    queue = list(roots)
    while queue:
        for child in children.get(queue.pop(), []):
            if child not in found:
                found.add(child)
                queue.append(child.pid)
    return found


def _stat(pid: int) -> Stat | None:
    """Parent and start time of a living process; None for one that is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name may contain spaces and brackets; after its last bracket come state, parent, ..., start time (field 22).
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else Stat(int(fields[1]), int(fields[19]))


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]))
