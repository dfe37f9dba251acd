"""The sessions of one environment server: handles, lifetimes, capacity. No HTTP here."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agentgym_rl.envs.base import InvalidCall

MAX_HANDLE = 2**53 - 1
"""The largest integer that every JSON reader keeps exact."""
_KEPT_ANSWERS = 8
"""Answers a session remembers by request id. A client has one call in flight, so a few are plenty."""


class AtCapacity(Exception):
    """No further session fits."""


class NoSession(InvalidCall):
    """The handle names no live session."""


@dataclass(eq=False, slots=True)
class Session:
    """One client's environment."""

    handle: int
    episode: Any
    """What the server's runner made for it."""
    last_used: float
    """Clock time of the latest request, in seconds."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the environment works: requests for one handle run one after the other."""
    users: int = 0
    """Requests that run or wait for the lock; such a session never expires."""
    answers: dict[str, Any] = field(default_factory=dict)
    """Latest answers by request id, oldest first, so that a repeated request runs nothing twice."""

    def remember(self, request_id: str, answer: Any) -> None:
        self.answers[request_id] = answer
        if len(self.answers) > _KEPT_ANSWERS:
            del self.answers[next(iter(self.answers))]


class SessionStore:
    """Live sessions by handle. Used from one event loop."""

    def __init__(
        self, *, max_sessions: int, ttl_s: float, clock: Callable[[], float], worker: int = 0, num_workers: int = 1
    ) -> None:
        """``worker`` of ``num_workers`` processes: ``handle % num_workers`` of its sessions is ``worker``."""
        self.max_sessions = max_sessions
        self.ttl_s = ttl_s
        self._clock = clock
        self._worker, self._num_workers = worker, num_workers
        self._sessions: dict[int, Session] = {}
        self._reserved: set[int] = set()

    def __len__(self) -> int:
        return len(self._sessions)

    def reserve(self) -> int:
        """Take a place for a session that is being made, under a fresh handle that nobody can guess.

        `add` or `cancel` gives it back. Raises `AtCapacity`.
        """
        if len(self._sessions) + len(self._reserved) >= self.max_sessions:
            raise AtCapacity(f"{len(self._sessions)} sessions are alive, the most this server holds (--max-sessions)")
        handle = self._fresh_handle()
        while handle in self._sessions or handle in self._reserved:
            handle = self._fresh_handle()
        self._reserved.add(handle)
        return handle

    def _fresh_handle(self) -> int:
        return (secrets.randbelow(MAX_HANDLE // self._num_workers - 1) + 1) * self._num_workers + self._worker

    def cancel(self, handle: int) -> None:
        """Give back a reserved place whose session could not be made."""
        self._reserved.discard(handle)

    def add(self, handle: int, episode: Any) -> Session:
        """Turn a reserved place into a session."""
        self._reserved.remove(handle)
        session = self._sessions[handle] = Session(handle, episode, self._clock())
        return session

    def find(self, handle: int) -> Session:
        """The session of ``handle``, its lifetime renewed; raises `NoSession`."""
        session = self._sessions.get(handle)
        if session is None:
            raise NoSession(
                f"no session {handle}: never created, closed, or expired after {self.ttl_s:g} s without a request"
            )
        session.last_used = self._clock()
        return session

    def remove(self, handle: int) -> Session | None:
        """Take the session out, so that its place is free; None when it is not there."""
        return self._sessions.pop(handle, None)

    def remove_expired(self) -> list[Session]:
        """Take out the sessions that no request touched for ``ttl_s`` seconds."""
        oldest = self._clock() - self.ttl_s
        expired = [s for s in self._sessions.values() if s.users == 0 and s.last_used <= oldest]
        return [self._sessions.pop(session.handle) for session in expired]

    def remove_all(self) -> list[Session]:
        sessions = list(self._sessions.values())
        self._sessions.clear()
        return sessions
