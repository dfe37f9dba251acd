"""Environment clients beside an event loop: one client in one thread, reused from trajectory to trajectory.

A thread per session, rather than a shared executor, lets every live trajectory step at once, keeps a call that never
returns from taking another trajectory's place, and guarantees that a client is used by one thread only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from agentgym_rl.client.base import EnvClient
from agentgym_rl.errors import AgentGymError, EnvError

logger = logging.getLogger(__name__)

_CLOSE_WAIT_S = 10.0
"""Longest wait for the sessions of a rollout to close; what takes longer goes on in its own thread."""
_T = TypeVar("_T")


class EnvClientError(EnvError):
    """The code of an environment client raised something that is no `EnvError`; `__cause__` is what it raised."""


class EnvSession:
    """One client in a thread of its own. Its calls run one after the other, in the order in which they were made."""

    def __init__(self, make_client: Callable[[], EnvClient]) -> None:
        """Start the thread, in which ``make_client`` begins at once; `opened` says when it is through."""
        self._client: EnvClient | None = None
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._latest: Future[Any] = self._submit(lambda: self._open(make_client))
        # A daemon, because a client that never returns must not keep the process from ending.
        Thread(target=self._serve, name="env-session", daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """True while a call is running or waiting."""
        return not self._latest.done()

    async def opened(self) -> EnvClient:
        """The client, once it exists; raises what `call` raises."""
        await self._answer(self._latest)
        assert self._client is not None
        return self._client

    async def call(self, function: Callable[[EnvClient], _T]) -> _T:
        """Run ``function`` on the client in the session's thread.

        Raises the client's `EnvError` or other error of this project as it is, and `EnvClientError` for anything else.
        When the caller is cancelled, the call may still run, but its late answer reaches nobody.
        """
        client = self._client
        if client is None:
            raise ValueError("this session is not open")
        self._latest = self._submit(lambda: function(client))
        result: _T = await self._answer(self._latest)
        return result

    def close(self) -> Future[None]:
        """Close the client after the calls made so far and end the thread; returns without waiting."""
        closed: Future[None] = self._submit(self._close)
        self._calls.put(None)
        return closed

    async def _answer(self, future: Future[Any]) -> Any:
        try:
            return await asyncio.wrap_future(future)
        except (AgentGymError, asyncio.CancelledError):
            raise
        # The project's one broad except: a client may be a user's code, and whatever it raises fails one trajectory.
        except Exception as error:
            raise EnvClientError(f"{type(error).__name__}: {error}") from error

    def _submit(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((function, future))
        return future

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            _run(*call)

    def _open(self, make_client: Callable[[], EnvClient]) -> None:
        self._client = make_client()

    def _close(self) -> None:
        if self._client is not None:
            self._client.close()


def _run(function: Callable[[], Any], future: Future[Any]) -> None:
    """Hand a call's outcome to its future, as an executor does."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:  # noqa: BLE001 - carried to whoever waits for the call, not handled here
        future.set_exception(error)
    else:
        future.set_result(result)


class SessionPool:
    """Sessions of one rollout: idle ones are handed out again, faulty ones are closed, all are closed in the end."""

    def __init__(self, make_client: Callable[[], EnvClient]) -> None:
        self._make_client = make_client
        self._idle: list[EnvSession] = []
        self._closing: list[Future[None]] = []

    def acquire(self, *, fresh: bool = False) -> EnvSession:
        """An idle session, or a new one that is still opening; with ``fresh`` always a new one."""
        if not self._idle:
            return EnvSession(self._make_client)
        if fresh:
            self.discard(self._idle.pop())  # keeps the number of sessions within the number of live trajectories
            return EnvSession(self._make_client)
        return self._idle.pop()

    def put_back(self, session: EnvSession) -> None:
        """Keep a session whose episode ended in order, for `acquire`."""
        self._idle.append(session)

    def discard(self, session: EnvSession) -> None:
        """Close a session that must not be used again; one that hangs in a call closes when that returns."""
        hangs = session.is_busy
        closed = session.close()
        if not hangs:
            self._closing.append(closed)

    async def close(self) -> None:
        """Close every session and wait for it, except for those that hang in a call."""
        while self._idle:
            self.discard(self._idle.pop())
        if not self._closing:
            return
        closing = [asyncio.wrap_future(future) for future in self._closing]
        done, late = await asyncio.wait(closing, timeout=_CLOSE_WAIT_S)
        failed = [future for future in done if not future.cancelled() and future.exception() is not None]
        if late or failed:
            logger.warning("%d environment sessions failed to close, %d are still closing", len(failed), len(late))
        for future in late:
            future.cancel()  # stops waiting; the thread goes on
        self._closing.clear()
