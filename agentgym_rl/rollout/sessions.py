"""Environment clients beside an event loop: one client in one thread, reused from trajectory to trajectory.

A thread per session, rather than a shared executor, lets every live trajectory step at once, keeps a call that never
returns from taking another trajectory's place, and guarantees that a client is used by one thread only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from agentgym_rl.client.base import EnvClient
from agentgym_rl.errors import AgentGymError, EnvError, EnvFull

logger = logging.getLogger(__name__)

_CLOSE_WAIT_S = 10.0
"""Longest wait for the sessions of a rollout to close; what takes longer goes on in its own thread."""
_HANG_WAIT_S = 4.0
"""The same for sessions that are in the middle of a call: a busy machine takes seconds to answer many at once."""
_FULL_PAUSE_S = 1.0
"""Seconds before a full server is asked again: it may have told us at once to come back much later."""
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

    @property
    def client(self) -> EnvClient:
        """The client of a session that is open; raises ValueError while it is not."""
        if self._client is None:
            raise ValueError("this session is not open")
        return self._client

    @property
    def retries(self) -> int:
        """Requests that its client sent again so far; 0 for a client that does not count them."""
        return getattr(self._client, "retries", 0)

    async def opened(self) -> None:
        """Return once the client exists; raises what `call` raises."""
        await self._answer(self._latest)

    async def call(self, function: Callable[[EnvClient], _T]) -> _T:
        """Run ``function`` on the client in the session's thread.

        Raises the client's `EnvError` or other error of this project as it is, and `EnvClientError` for anything else.
        When the caller is cancelled, the call may still run, but its late answer reaches nobody.
        """
        client = self.client
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
        # Broad on purpose: a client may be a user's code, and whatever it raises fails one trajectory.
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


class InlineSession(EnvSession):
    """One client without a thread, for one whose calls take microseconds: they run where they are made.

    A hop to a thread and back takes about 0.1 ms, which is more than such an environment and a small model need.
    """

    def __init__(self, make_client: Callable[[], EnvClient]) -> None:
        self._client = None
        self._make_client = make_client

    @property
    def is_busy(self) -> bool:
        return False

    async def opened(self) -> None:
        self._client = _call(self._make_client)

    async def call(self, function: Callable[[EnvClient], _T]) -> _T:
        client = self.client
        return _call(lambda: function(client))

    def close(self) -> Future[None]:
        closed: Future[None] = Future()
        _run(self._close, closed)
        return closed


def _call(function: Callable[[], _T]) -> _T:
    """The result of a client's code; raises what `EnvSession.call` raises."""
    try:
        return function()
    except (AgentGymError, asyncio.CancelledError):
        raise
    # Broad on purpose: as in `EnvSession`.
    except Exception as error:
        raise EnvClientError(f"{type(error).__name__}: {error}") from error


def _run(function: Callable[[], Any], future: Future[Any]) -> None:
    """Hand a call's outcome to its future, as an executor does."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except StopIteration as error:  # the one exception that no coroutine can be given
        future.set_exception(RuntimeError(f"StopIteration: {error}"))
    except BaseException as error:  # noqa: BLE001 - carried to whoever waits for the call, not handled here
        future.set_exception(error)
    else:
        future.set_result(result)


@dataclass(frozen=True, slots=True)
class SessionUsage:
    """What the sessions of one rollout did."""

    peak: int = 0
    """Most sessions at once, those that were being opened included."""
    retries: int = 0
    """Requests to the server that its clients sent again."""


class SessionPool:
    """Sessions of one rollout: sound ones are handed on, faulty ones are closed, all are closed in the end.

    On a full server a new session waits for a place, and the places may be held by sessions of this very pool. So who
    waits is served, in turn, by whatever comes first: a session that is put back or one that has opened. That the
    server stays full is a fault only of a pool that has no session.
    """

    def __init__(self, make_client: Callable[[], EnvClient], *, inline: bool = False) -> None:
        """``inline``: calls to the clients take microseconds and never wait, so that they need no threads."""
        self._make_client = make_client
        self._session_class = InlineSession if inline else EnvSession
        self._idle: list[EnvSession] = []
        self._waiting: deque[asyncio.Future[EnvSession]] = deque()
        self._opening: dict[EnvSession, asyncio.Task[None]] = {}
        """Sessions being opened, the oldest first, and who sees to them; never fewer than are waited for."""
        self._fresh_waiting = 0
        self._closing: list[Future[None]] = []
        self._hanging: list[Future[None]] = []
        self._num_open = self._peak = self._retries = 0

    @property
    def usage(self) -> SessionUsage:
        """What the sessions did so far; retries are counted when a session ends."""
        return SessionUsage(self._peak, self._retries)

    async def acquire(self, *, fresh: bool = False) -> EnvSession:
        """An open session, with ``fresh`` always a new one; raises what `EnvSession.opened` raises."""
        if fresh:
            return await self._open_fresh()
        if self._idle:
            return self._idle.pop()
        waiting: asyncio.Future[EnvSession] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        if len(self._opening) < len(self._waiting):
            self._open_another()
        try:
            return await waiting
        except asyncio.CancelledError:
            self._give_up(waiting)
            raise

    def put_back(self, session: EnvSession) -> None:
        """Hand on a session whose episode ended in order, or keep it for `acquire`."""
        if self._fresh_waiting:
            self.discard(session)  # a fresh one may be waiting for just this place
        elif (waiting := self._next_waiting()) is not None:
            waiting.set_result(session)
        else:
            self._idle.append(session)

    def discard(self, session: EnvSession) -> None:
        """Close a session that must not be used again; one that hangs in a call closes when that returns."""
        hangs = session.is_busy
        self._num_open -= 1
        self._retries += session.retries
        closed = session.close()
        (self._hanging if hangs else self._closing).append(closed)

    async def close(self) -> None:
        """Close every session and wait for it; for those that are in a call only a moment."""
        while self._opening:
            self._abandon_oldest_opening()
        while self._idle:
            self.discard(self._idle.pop())
        if self._hanging:
            # Most calls are just being answered. Beside the loop, whose futures would take back a close that waits.
            await asyncio.to_thread(wait, self._hanging, timeout=_HANG_WAIT_S)
            self._hanging.clear()
        closing = [asyncio.wrap_future(future) for future in self._closing if not future.done()]
        late = (await asyncio.wait(closing, timeout=_CLOSE_WAIT_S))[1] if closing else ()
        closed = [future for future in self._closing if future.done() and not future.cancelled()]
        failed = [future for future in closed if future.exception() is not None]
        if late or failed:
            logger.warning("%d environment sessions failed to close, %d are still closing", len(failed), len(late))
        for future in late:
            future.cancel()  # stops waiting; the thread goes on
        self._closing.clear()

    def _new_session(self) -> EnvSession:
        self._num_open += 1
        self._peak = max(self._peak, self._num_open)
        return self._session_class(self._make_client)

    def _open_another(self) -> None:
        session = self._new_session()
        self._opening[session] = asyncio.create_task(self._hand_on_once_open(session))

    def _num_in_use(self) -> int:
        """Sessions that are open: those of trajectories and idle ones."""
        return self._num_open - len(self._opening) - self._fresh_waiting

    async def _hand_on_once_open(self, session: EnvSession) -> None:
        try:
            await session.opened()
        except AgentGymError as error:
            if is_full := isinstance(error, EnvFull):
                await asyncio.sleep(_FULL_PAUSE_S)
            del self._opening[session]
            self.discard(session)
            if len(self._opening) >= len(self._waiting):
                return
            if is_full and self._num_in_use() > 0:
                self._open_another()  # No fault: who waits will get one of those, if not a place of its own.
            elif (waiting := self._next_waiting()) is not None:
                waiting.set_exception(error)
        else:
            del self._opening[session]
            # Whoever waits was counted on this session, so it goes to no other, not even to make room for a fresh one.
            if (waiting := self._next_waiting()) is not None:
                waiting.set_result(session)
            else:
                self.put_back(session)

    async def _open_fresh(self) -> EnvSession:
        if self._idle:
            self.discard(self._idle.pop())  # keeps the number of sessions within the number of live trajectories
        session = self._new_session()
        self._fresh_waiting += 1
        try:
            await session.opened()
        except (AgentGymError, asyncio.CancelledError):
            self.discard(session)
            raise
        finally:
            self._fresh_waiting -= 1
        return session

    def _next_waiting(self) -> asyncio.Future[EnvSession] | None:
        """Who waits longest, taken off the queue; those that have been cancelled are passed over."""
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                return waiting
        return None

    def _give_up(self, waiting: asyncio.Future[EnvSession]) -> None:
        """Undo a wait that was cancelled: nobody else shall depend on a session that hangs while it opens."""
        if waiting in self._waiting:
            self._waiting.remove(waiting)
        if not waiting.cancelled():  # served in the very moment
            if waiting.exception() is None:
                self.put_back(waiting.result())
        elif len(self._opening) > len(self._waiting):
            self._abandon_oldest_opening()

    def _abandon_oldest_opening(self) -> None:
        session = next(iter(self._opening))
        self._opening.pop(session).cancel()
        self.discard(session)


class TaskSessions:
    """The sessions of one rollout: a pool for each task."""

    def __init__(
        self,
        make_client: Callable[[], EnvClient] | Mapping[str, Callable[[], EnvClient]],
        *,
        inline: bool | Collection[str] = False,
    ) -> None:
        """``make_client``: of every task, or of each by its name. ``inline``: as for `SessionPool`, or the names of the
        tasks of which it is true."""
        if callable(make_client):
            self._pools = {"": SessionPool(make_client, inline=inline is True)}
            return
        self._pools = {
            task: SessionPool(make, inline=inline if isinstance(inline, bool) else task in inline)
            for task, make in make_client.items()
        }

    def of(self, task: str) -> SessionPool:
        """The pool of a task."""
        return self._pools[""] if "" in self._pools else self._pools[task]

    @property
    def usage(self) -> SessionUsage:
        """Of all pools; the peak is the sum of theirs."""
        usages = [pool.usage for pool in self._pools.values()]
        return SessionUsage(sum(usage.peak for usage in usages), sum(usage.retries for usage in usages))

    async def close(self) -> None:
        """Close every pool, side by side; all are closed when this raises what one of them raised."""
        closed = await asyncio.gather(*(pool.close() for pool in self._pools.values()), return_exceptions=True)
        for result in closed:
            if isinstance(result, BaseException):
                raise result
