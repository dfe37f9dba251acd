"""Where the code of environments runs: in the event loop, in threads, or (`children`) in processes of its own.

A runner makes episodes, runs their calls and closes them. What goes wrong in an environment's code, or to its process,
is an `EnvironmentFault`; `InvalidCall` and `MalformedRequest` pass through.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agentgym_rl.envs.base import InvalidCall
from agentgym_rl.envs.causes import cause_of
from agentgym_rl.envs.episode import Episode, EpisodeCalls, Fields
from agentgym_rl.envs.registry import EnvSpec
from agentgym_rl.envs.wire import MalformedRequest, encode

MAX_THREADS = 256
"""Calls that run at once in an environment that is not ``runs_inline``."""

_SLOW_S = 0.05
_SLOW_CALLS = 3
"""So many calls of an environment that is ``runs_inline``, each slower than that, are no chance, and are warned of."""
_CAUSES = 100
"""Causes of faults whose traceback is logged."""

log = logging.getLogger(__name__)


class EnvironmentFault(Exception):
    """The environment's own code failed, or its process died; its state is unknown until the next reset."""


class Runner(ABC):
    """Used from one event loop. An episode is whatever `create` gave; one call at a time is made on it."""

    async def start(self) -> None:  # noqa: B027 - most runners have nothing to start
        """Called once before any other call."""

    @abstractmethod
    async def create(self, handle: int, fields: Fields) -> tuple[Any, bytes]:
        """A fresh episode, and the JSON that answers ``/create``."""

    @abstractmethod
    async def call(self, episode: Any, name: str, fields: Fields) -> bytes:
        """The JSON that answers a call on the episode."""

    @abstractmethod
    async def close(self, episode: Any) -> None:
        """Close the episode's environment."""

    async def stop(self) -> None:  # noqa: B027
        """Free everything; no call follows."""


def runner_for(spec: EnvSpec, *, max_sessions: int) -> Runner:
    """The runner that the spec asks for."""
    if spec.isolation is not None:
        from agentgym_rl.envs.children import ChildRunner

        return ChildRunner(spec)
    return InlineRunner(spec) if spec.runs_inline else ThreadRunner(spec, min(MAX_THREADS, max_sessions))


def fault(what: str, error: BaseException) -> EnvironmentFault:
    """What callers are told of an exception in an environment's code."""
    return EnvironmentFault(f"{what} failed: {type(error).__name__}: {error}")


def create_episode(spec: EnvSpec, calls: EpisodeCalls, handle: int, fields: Fields) -> tuple[Episode, bytes]:
    """A fresh environment, closed again when its first reset fails."""
    with contextlib.ExitStack() as undo:
        episode = Episode(spec.environment(), handle, calls)
        undo.callback(episode.environment.close)
        content = encode(episode.create(fields))
        undo.pop_all()
    return episode, content


class InlineRunner(Runner):
    """Runs environments whose calls take microseconds in the event loop itself."""

    def __init__(self, spec: EnvSpec) -> None:
        self._spec = spec
        self._calls = EpisodeCalls(spec)
        self._causes: set[str] = set()
        """Of the faults so far."""
        self._slow_calls = 0
        self.took_s = 0.0
        """Seconds of the latest `call_now`."""

    async def create(self, handle: int, fields: Fields) -> tuple[Episode, bytes]:
        return await self._run("create", lambda: create_episode(self._spec, self._calls, handle, fields))

    async def call(self, episode: Episode, name: str, fields: Fields) -> bytes:
        return self.call_now(episode, name, fields)

    def call_now(self, episode: Episode, name: str, fields: Fields) -> bytes:
        """`call` without an event loop in between."""
        started = time.perf_counter()
        try:
            return encode(episode.call(name, fields))
        except (InvalidCall, MalformedRequest):
            raise
        except (Exception, SystemExit) as error:  # broad on purpose: the server outlives a user's environment
            raise self._fault(f"{name} of session {episode.handle}", error) from error
        finally:
            self.took_s = time.perf_counter() - started
            if self.took_s > _SLOW_S:
                self._note_slow(name, self.took_s)

    async def close(self, episode: Episode) -> None:
        await self._run(f"close of session {episode.handle}", episode.environment.close)

    async def _run(self, what: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except (InvalidCall, MalformedRequest):
            raise
        except (Exception, SystemExit) as error:  # broad on purpose, as above
            raise self._fault(what, error) from error

    def _fault(self, what: str, error: BaseException) -> EnvironmentFault:
        """Logged with its traceback the first time that its cause shows, with its message afterwards."""
        told, cause = fault(f"{self._spec.name}: {what}", error), cause_of(error)
        is_new = cause not in self._causes and len(self._causes) < _CAUSES
        if is_new:
            self._causes.add(cause)
        log.error("%s", told, exc_info=error if is_new else None)
        return told

    def _note_slow(self, name: str, took_s: float) -> None:
        self._slow_calls += 1
        if self._slow_calls == _SLOW_CALLS:
            log.warning(
                "%s: %s took %.3g s, and it is not the first call so slow: every other session waited meanwhile; "
                "leave runs_inline out of its EnvSpec",
                self._spec.name,
                name,
                took_s,
            )


class ThreadRunner(InlineRunner):
    """Runs each call in a thread of a pool, so that one that blocks holds up its own session only."""

    def __init__(self, spec: EnvSpec, num_threads: int) -> None:
        super().__init__(spec)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=f"env-{spec.name}")

    async def call(self, episode: Episode, name: str, fields: Fields) -> bytes:
        content: bytes = await self._run(
            f"{name} of session {episode.handle}", lambda: encode(episode.call(name, fields))
        )
        return content

    async def stop(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, what: str, work: Callable[[], Any]) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except (InvalidCall, MalformedRequest):
            raise
        except (Exception, SystemExit) as error:  # broad on purpose, as in `call_now`
            raise self._fault(what, error) from error
