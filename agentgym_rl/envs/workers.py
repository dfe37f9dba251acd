"""A server of several worker processes: starts them, replaces one that dies, ends them all.

Each worker listens on its own socket of the same port; the kernel shares connections out among them. This process
holds all sockets open, so that connections to a worker that is being replaced wait for its successor.
"""

from __future__ import annotations

import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentgym_rl.envs.child import load_configured_spec, receive
from agentgym_rl.envs.link import pack
from agentgym_rl.envs.peers import WorkerPeers
from agentgym_rl.envs.registry import EnvSpec, Isolation
from agentgym_rl.envs.server import EnvApp
from agentgym_rl.envs.serving import Server, bind, set_up_logging
from agentgym_rl.envs.sessions import SessionStore
from agentgym_rl.errors import AgentGymError, ConfigError

_READY = b"ready"
_GOODBYE_S = 15.0
"""Seconds that workers get to close their sessions before they are killed."""
_SHORT_LIFE_S = 5.0
"""A worker that dies sooner is replaced only after a pause, so that one that cannot live does not busy the machine."""
_PAUSE_S = 1.0


@dataclass(frozen=True)
class WorkerOptions:
    """All that a worker process is told."""

    worker: int
    num_workers: int
    task: str
    isolation: Isolation | None
    settings: Any
    max_sessions: int
    """Of this worker."""
    session_ttl_s: float
    log_level: str
    folder: str
    """Where the workers' own sockets lie."""


@dataclass
class _Worker:
    options: WorkerOptions
    listener: socket.socket
    process: subprocess.Popen[bytes]
    control: socket.socket
    """Says that the worker is ready; its end tells the worker to end, and this process that the worker has died."""
    started: float = field(default_factory=time.monotonic)


class Supervisor:
    """Runs ``num_workers`` workers of a server; for the main thread of a process of its own."""

    def __init__(
        self,
        spec: EnvSpec,
        *,
        num_workers: int,
        host: str,
        port: int,
        max_sessions: int,
        session_ttl_s: float,
        log_level: str,
        on_ready: Callable[[socket.socket], None],
    ) -> None:
        """``on_ready`` gets the socket once all workers listen. Raises `ConfigError` when the address is taken."""
        if max_sessions < num_workers:
            raise ConfigError(f"--max-sessions {max_sessions}: must be at least --workers {num_workers}")
        self._spec = spec
        self._num_workers = num_workers
        self._shares = [len(range(worker, max_sessions, num_workers)) for worker in range(num_workers)]
        self._session_ttl_s = session_ttl_s
        self._log_level = log_level
        self._on_ready = on_ready
        self._listeners = bind_shared(host, port, num_workers)
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._signal: int | None = None

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises `AgentGymError` when a worker cannot start."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note_signal)
        self._selector.register(self._woken, selectors.EVENT_READ)
        with tempfile.TemporaryDirectory(prefix="agentgym-") as folder:
            workers: list[_Worker] = []
            try:
                workers += [self._start(worker, folder) for worker in range(self._num_workers)]
                self._wait_until_ready(workers)
                if self._signal is None:
                    self._on_ready(self._listeners[0])
                self._replace_the_dead(workers)
            finally:
                _end(workers)
                for listener in self._listeners:
                    listener.close()
        if self._signal is not None:
            # End as a process does that did not catch the signal: whoever sent it sees that it worked.
            signal.signal(self._signal, signal.SIG_DFL)
            os.kill(os.getpid(), self._signal)

    def _note_signal(self, number: int, frame: Any) -> None:
        self._signal = number
        self._wake.send(b"!")

    def _start(self, worker: int, folder: str) -> _Worker:
        options = WorkerOptions(
            worker=worker,
            num_workers=self._num_workers,
            task=self._spec.name,
            isolation=self._spec.isolation,
            settings=self._spec.settings,
            max_sessions=self._shares[worker],
            session_ttl_s=self._session_ttl_s,
            log_level=self._log_level,
            folder=folder,
        )
        return self._launch(options, self._listeners[worker])

    def _launch(self, options: WorkerOptions, listener: socket.socket) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "agentgym_rl.envs.workers", str(theirs.fileno()), str(listener.fileno())]
            # A session of its own: Ctrl-C reaches this process only, which then ends the workers in order.
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno(), listener.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        ours.sendall(pack({}, pickle.dumps(options)))
        self._selector.register(ours, selectors.EVENT_READ)
        return _Worker(options, listener, process, ours)

    def _wait_until_ready(self, workers: list[_Worker]) -> None:
        waiting = {worker.control: worker for worker in workers}
        while waiting and self._signal is None:
            for key, _ in self._selector.select():
                worker = waiting.pop(key.fileobj, None)  # type: ignore[call-overload]
                if worker is not None and worker.control.recv(len(_READY)) != _READY:
                    status = worker.process.wait()
                    raise AgentGymError(f"worker {worker.options.worker} ended with status {status}; see above")

    def _replace_the_dead(self, workers: list[_Worker]) -> None:
        while self._signal is None:
            for key, _ in self._selector.select():
                dead = next((worker for worker in workers if worker.control is key.fileobj), None)
                if dead is not None and self._signal is None and not _says_ready(dead.control):
                    workers[dead.options.worker] = self._replacement(dead)

    def _replacement(self, dead: _Worker) -> _Worker:
        self._selector.unregister(dead.control)
        dead.control.close()
        what = f"worker {dead.options.worker} ended with status {dead.process.wait()}"
        print(f"agentgym-rl: {what}; it is replaced, its sessions are lost", file=sys.stderr, flush=True)
        if time.monotonic() - dead.started < _SHORT_LIFE_S:
            time.sleep(_PAUSE_S)
        return self._launch(dead.options, dead.listener)


def bind_shared(host: str, port: int, count: int) -> list[socket.socket]:
    """``count`` sockets of one address; raises `ConfigError` when the address cannot be had."""
    # Sockets that share a port would share it with another server's, too: first see that it is free.
    with bind(host, port) as probe:
        port = probe.getsockname()[1]
    return [bind(host, port, shared=True) for _ in range(count)]


def _says_ready(control: socket.socket) -> bool:
    """False when the worker has died; reads what it said."""
    try:
        return control.recv(len(_READY)) == _READY
    except OSError:
        return False


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.control.close()
    end = time.monotonic() + _GOODBYE_S
    for worker in workers:
        try:
            worker.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()


# ---------------------------------------------------------------------------------------------------- a worker process


def main() -> None:
    """Run one worker: the arguments are its control socket and its listening socket."""
    control, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    frame = receive(control)
    if frame is None:
        return
    options: WorkerOptions = pickle.loads(frame[1])
    set_up_logging(options.log_level)
    app = build_worker_app(options)
    server = Server(app, on_ready=lambda: control.sendall(_READY))
    threading.Thread(target=_end_with_the_supervisor, args=(control, server), daemon=True).start()
    server.run(sockets=[listener])


def build_worker_app(options: WorkerOptions) -> EnvApp:
    """The application of one worker, which knows the others."""
    store = SessionStore(
        max_sessions=options.max_sessions,
        ttl_s=options.session_ttl_s,
        clock=time.monotonic,
        worker=options.worker,
        num_workers=options.num_workers,
    )
    app = EnvApp(load_configured_spec(options.task, options.isolation, options.settings), store)
    app.peers = WorkerPeers(app, options.worker, options.num_workers, Path(options.folder))
    return app


def _end_with_the_supervisor(control: socket.socket, server: Server) -> None:
    """The supervisor closes the control socket when the server shall end, or has been killed."""
    control.recv(1)
    server.should_exit = True


if __name__ == "__main__":
    main()
