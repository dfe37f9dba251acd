"""The process in which an isolated environment lives: ``python -m agentgym_rl.envs.child FD SPEC``.

The server writes frames (`link`) to the socket FD; each is a call on one of this process's environments. When the
socket ends, the server is gone or has no more use for this process: it closes its environments and ends, together
with all processes that they started, which share its process group.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

from agentgym_rl.envs.base import Environment, InvalidCall
from agentgym_rl.envs.episode import Episode, EpisodeCalls
from agentgym_rl.envs.link import frame_length, pack, unpack
from agentgym_rl.envs.registry import ENTRY_POINT_GROUP, EnvSpec, Isolation, get_spec, load_spec
from agentgym_rl.envs.wire import MalformedRequest, encode
from agentgym_rl.errors import ConfigError

_GOODBYE_S = 5.0
"""Seconds that environments get to close before the process group is killed."""
_EXIT_S = 2.0
"""Seconds after that for what they registered with `atexit`: what they share, such as a browser."""

_log = logging.getLogger(__name__)


def load_configured_spec(name: str, isolation: Isolation | None, settings: Any) -> EnvSpec:
    """The spec that the server serves, found and configured again in this process."""
    if isolation is not None and isolation.source:
        spec = load_spec(EntryPoint(name, isolation.source, ENTRY_POINT_GROUP), name)
    else:
        spec = get_spec(name)
    return replace(spec if settings is None else spec.with_settings(settings), isolation=isolation)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes] | None:
    """Header and payload of the next frame; None at the connection's end."""
    prefix = _read(connection, 4)
    body = None if prefix is None else _read(connection, frame_length(prefix))
    return None if body is None else unpack(body)


def _read(connection: socket.socket, count: int) -> bytes | None:
    """``count`` bytes; None at the connection's end."""
    parts = []
    while count:
        try:
            part = connection.recv(min(count, 2**20))
        except OSError:
            return None
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


class Seat:
    """A place for one session: its environment, all of whose calls come from one thread."""

    def __init__(self, spec: EnvSpec, calls: EpisodeCalls, thread: ThreadPoolExecutor) -> None:
        assert spec.isolation is not None
        self._spec, self._isolation, self._calls = spec, spec.isolation, calls
        self.thread = thread
        self._environment: Environment | None = None
        self._episode: Episode | None = None

    @property
    def ready(self) -> bool:
        """True when the next session need not wait for an environment to be constructed."""
        return self._environment is not None

    def prepare(self) -> bytes:
        """Construct an environment ahead."""
        if self._environment is None:
            self._environment = self._spec.environment()
        return b""

    def create(self, handle: int, call_fields: dict[str, Any]) -> bytes:
        self.prepare()
        assert self._environment is not None
        self._episode = Episode(self._environment, handle, self._calls)
        try:
            return encode(self._episode.create(call_fields))
        except (InvalidCall, MalformedRequest):
            raise
        except BaseException:
            self.discard()
            raise

    def call(self, name: str, call_fields: dict[str, Any]) -> bytes:
        assert self._episode is not None
        return encode(self._episode.call(name, call_fields))

    def close(self) -> bytes:
        self._episode = None
        if not self._isolation.reuse:
            self.discard()
        return b""

    def discard(self) -> None:
        """Close the environment, if there is one."""
        environment, self._environment = self._environment, None
        if environment is not None:
            environment.close()


class Child:
    """Answers the calls of a server on the environments of one process."""

    def __init__(self, spec: EnvSpec, connection: socket.socket) -> None:
        assert spec.isolation is not None
        self._name = spec.name
        self._connection = connection
        self._sending = threading.Lock()
        shared = None if spec.isolation.parallel else ThreadPoolExecutor(1)
        calls, places = EpisodeCalls(spec), spec.isolation.sessions_per_child
        self._free = [Seat(spec, calls, shared or ThreadPoolExecutor(1)) for _ in range(places)]
        self._all = list(self._free)
        self._taken: dict[int, Seat] = {}

    def serve(self, number: int) -> None:
        """Construct the first environment, which answers call ``number``; then answer calls until the server ends."""
        self._submit(self._free[0], {"n": number, "call": "prepare"}, self._free[0].prepare)
        while (frame := receive(self._connection)) is not None:
            self._dispatch(*frame)

    def close(self) -> None:
        """Close all environments, as far as they do in time."""
        closing = [seat.thread.submit(seat.discard) for seat in self._all]
        wait(closing, timeout=_GOODBYE_S)

    def _dispatch(self, header: dict[str, Any], payload: bytes) -> None:
        handle, name = header["handle"], header["call"]
        call_fields = json.loads(payload) if payload else {}
        if name == "create":
            seat = self._taken[handle] = self._take_seat()
            self._submit(seat, header, lambda: seat.create(handle, call_fields))
        elif name == "close":
            seat = self._taken.pop(handle)
            self._free.append(seat)
            self._submit(seat, header, seat.close)
            if len(self._all) == 1:
                # Not answered to anybody: the next session finds its environment ready.
                self._submit(seat, {"call": "prepare"}, seat.prepare)
        else:
            seat = self._taken[handle]
            self._submit(seat, header, lambda: seat.call(name, call_fields))

    def _take_seat(self) -> Seat:
        """A free place, one with its environment ready before others; the server sends no more than there are."""
        seat = next((seat for seat in self._free if seat.ready), self._free[0])
        self._free.remove(seat)
        return seat

    def _submit(self, seat: Seat, header: dict[str, Any], work: Callable[[], bytes]) -> None:
        seat.thread.submit(self._answer, header, work)

    def _answer(self, header: dict[str, Any], work: Callable[[], bytes]) -> None:
        """Run the work and send what came of it; a header without number wants no answer."""
        kind, payload = "ok", b""
        try:
            payload = work()
        except InvalidCall as error:
            kind, payload = "invalid", str(error).encode(errors="replace")
        except MalformedRequest as error:
            kind, payload = "malformed", str(error).encode(errors="replace")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's code; the server tells its client
            _log.exception("%s: %s failed", self._name, header["call"])
            kind, payload = "fault", f"{type(error).__name__}: {error}".encode(errors="replace")
        if "n" in header:
            with self._sending, contextlib.suppress(OSError):  # a server that is gone wants no answer either
                self._connection.sendall(pack({"n": header["n"], "kind": kind}, payload))


def main() -> None:
    """Serve the environment that the first frame names, on the socket that the argument names."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    # Ctrl-C in the server's terminal shall not end a call that the server still waits for.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection, child = socket.socket(fileno=int(sys.argv[1])), None
    try:
        if (frame := receive(connection)) is not None:
            header, choices = frame
            try:
                child = Child(load_configured_spec(header["name"], *pickle.loads(choices)), connection)
            except ConfigError as error:
                connection.sendall(pack({"n": header["n"], "kind": "fault"}, str(error).encode()))
            else:
                child.serve(header["n"])
    finally:
        if child is not None:
            child.close()
        _run_exit_functions()
        # A simulator or browser that the environment left behind, and threads that hang, end here.
        os.killpg(0, signal.SIGKILL)


def _run_exit_functions() -> None:
    """The process is killed, not ended, so that nothing can hold it up; Python would not run these then."""
    running = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
    running.start()
    running.join(_EXIT_S)


if __name__ == "__main__":
    main()
