"""Environments in child processes that are started ahead, killed when they hang, and replaced when they die."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from agentgym_rl.envs.base import InvalidCall
from agentgym_rl.envs.episode import Fields
from agentgym_rl.envs.link import Link, LinkBroken
from agentgym_rl.envs.registry import EnvSpec
from agentgym_rl.envs.runners import EnvironmentFault, Runner, log
from agentgym_rl.envs.wire import MalformedRequest

_GOODBYE_S = 8.0
"""Seconds that a child gets to close its environments before it is killed."""
_FREE_TRIES = 2
"""Failed starts in a row after which the next one waits."""
_FIRST_REST_S = 1.0
"""How long it waits then; twice as long after every further one."""
_LONGEST_REST_S = 60.0


class Starts:
    """Whether children start: after several failures in a row no other one is started for a while."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._failed_at = self._rests_until = -math.inf
        self._reason = ""

    def now(self) -> float:
        return self._clock()

    def failed(self, begun: float, reason: str) -> None:
        """A child that was begun at that time never answered a call; those begun side by side count once."""
        if begun <= self._failed_at:
            return
        self._failures += 1
        self._failed_at, self._reason = self._clock(), reason
        if self._failures > _FREE_TRIES:
            rest_s = _FIRST_REST_S * 2.0 ** min(self._failures - _FREE_TRIES - 1, 16)
            self._rests_until = self._failed_at + min(rest_s, _LONGEST_REST_S)

    def succeeded(self) -> None:
        self._failures, self._rests_until = 0, -math.inf

    def rest_s(self) -> float:
        """Seconds until the next start may be made; 0 when it may be made now."""
        return max(0.0, self._rests_until - self._clock())

    def refusal(self) -> str:
        """Why no child is started now."""
        return f"{self._reason}; so it was {self._failures} times in a row, and is tried again in {self.rest_s():.0f} s"


@dataclass(eq=False)
class ChildProcess:
    """One child: its process and the connection to it."""

    process: subprocess.Popen[bytes]
    link: Link
    begun: float
    """Clock time of its start."""
    has_served: bool = False
    """True once it answered a call of a session."""
    sessions: int = 0
    """Places taken, those of sessions that are being made included."""
    dismissed: bool = False
    """True once it has been told to end."""
    watch: asyncio.Task[None] | None = None
    """Ends when nothing is left of the child."""

    @property
    def alive(self) -> bool:
        return not self.link.broken and self.process.poll() is None

    def kill(self) -> None:
        """End the child and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


@dataclass(eq=False, slots=True)
class PlacedEpisode:
    """Which child has the session's environment."""

    handle: int
    child: ChildProcess | None
    """None once that child has died."""
    fields: Fields = field(default_factory=dict)
    """Body of ``/create``."""


class ChildRunner(Runner):
    """Runs the episodes of a spec that asks for isolation."""

    def __init__(self, spec: EnvSpec) -> None:
        assert spec.isolation is not None
        self._spec, self._isolation = spec, spec.isolation
        self._children: list[ChildProcess] = []
        self._starting: set[asyncio.Task[ChildProcess]] = set()
        self._stopping: set[asyncio.Task[None]] = set()
        self._stopped = False
        self._starts = Starts()
        self._later: asyncio.TimerHandle | None = None
        """The next try to start children ahead, while that rests."""

    async def start(self) -> None:
        self._start_ahead()

    async def stop(self) -> None:
        self._stopped = True
        if self._later is not None:
            self._later.cancel()
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(self._end(child) for child in list(self._children)), *self._stopping)

    # --------------------------------------------------------------------------------------------------------- calls

    async def create(self, handle: int, fields: Fields) -> tuple[PlacedEpisode, bytes]:
        episode = PlacedEpisode(handle, None, fields)
        return episode, await self._place(episode)

    async def call(self, episode: PlacedEpisode, name: str, fields: Fields) -> bytes:
        if episode.child is None or not episode.child.alive:
            await self._replace(episode, name)
        content = await self._ask(episode, name, fields, self._isolation.call_timeout_s)
        if episode.child is not None and not episode.child.has_served:
            episode.child.has_served = True
            self._starts.succeeded()
        return content

    async def close(self, episode: PlacedEpisode) -> None:
        child = episode.child
        if child is None:
            return
        try:
            await self._ask(episode, "close", {}, self._isolation.call_timeout_s)
        finally:
            self._leave(episode)

    async def _place(self, episode: PlacedEpisode) -> bytes:
        """Begin the session on a child that has room; returns what answers ``/create``."""
        episode.child = await self._take_place()
        try:
            return await self._ask(episode, "create", episode.fields, self._isolation.start_timeout_s)
        except BaseException:
            await self._forget(episode)
            raise

    async def _forget(self, episode: PlacedEpisode) -> None:
        """Take a session whose start failed off its child."""
        if episode.child is not None and episode.child.alive:
            with contextlib.suppress(EnvironmentFault):
                await self._ask(episode, "close", {}, self._isolation.call_timeout_s)
        self._leave(episode)

    async def _replace(self, episode: PlacedEpisode, name: str) -> None:
        """Begin again on a fresh child; nothing but a reset can go on there."""
        self._leave(episode)
        if name != "reset":
            raise EnvironmentFault(
                f"{self._spec.name}: the process of session {episode.handle} has died, and its episode with it; "
                "reset begins a new one"
            )
        await self._place(episode)

    async def _ask(self, episode: PlacedEpisode, name: str, fields: Fields, timeout_s: float) -> bytes:
        child = episode.child
        assert child is not None
        what = f"{self._spec.name}: {name} of session {episode.handle}"
        header = {"handle": episode.handle, "call": name}
        try:
            answer, payload = await asyncio.wait_for(child.link.call(header, json.dumps(fields).encode()), timeout_s)
        except TimeoutError:
            child.kill()
            raise EnvironmentFault(f"{what}: no answer within {timeout_s:g} s; its process was killed") from None
        except LinkBroken:
            raise EnvironmentFault(f"{what}: its process died") from None
        return _content(what, answer["kind"], payload)

    # ------------------------------------------------------------------------------------------------------ children

    async def _take_place(self) -> ChildProcess:
        """A child with a place, which is taken; one that others use before an unused one."""
        self._children = [child for child in self._children if child.alive]
        room = [child for child in self._children if child.sessions < self._isolation.sessions_per_child]
        if room:
            child = max(room, key=lambda child: child.sessions)
            child.sessions += 1
            self._start_ahead()
            return child
        if not self._starting and self._starts.rest_s():
            raise EnvironmentFault(self._starts.refusal())
        task = next(iter(self._starting), None) or self._launch()
        self._starting.discard(task)  # it is spoken for
        self._start_ahead()
        child = await task
        child.sessions += 1
        self._children.append(child)
        return child

    def _leave(self, episode: PlacedEpisode) -> None:
        """Free the session's place, and end a child that is one too many."""
        child, episode.child = episode.child, None
        if child is None:
            return
        child.sessions -= 1
        if child.alive and child.sessions == 0 and len(self._unused()) > max(1, self._isolation.started_ahead):
            self._children.remove(child)
            task = asyncio.create_task(self._end(child))
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)

    def _unused(self) -> list[ChildProcess]:
        return [child for child in self._children if child.sessions == 0 and child.alive]

    def _start_ahead(self) -> None:
        """Start as many children as are missing among those without sessions, now or after the rest."""
        if rest_s := self._starts.rest_s():
            if self._later is None and not self._stopped:
                self._later = asyncio.get_running_loop().call_later(rest_s, self._start_again)
            return
        missing = self._isolation.started_ahead - len(self._unused()) - len(self._starting)
        for _ in range(0 if self._stopped else missing):
            self._launch()

    def _start_again(self) -> None:
        self._later = None
        self._start_ahead()

    def _launch(self) -> asyncio.Task[ChildProcess]:
        task = asyncio.create_task(self._start_child())
        self._starting.add(task)
        task.add_done_callback(self._started)
        return task

    def _started(self, task: asyncio.Task[ChildProcess]) -> None:
        """Keep a child that nobody waits for; who does takes it without others coming between."""
        unclaimed = task in self._starting
        self._starting.discard(task)
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            log.error("%s", error)
            self._start_ahead()
        elif unclaimed:
            self._children.append(task.result())

    async def _start_child(self) -> ChildProcess:
        """A child whose first environment stands."""
        begun = self._starts.now()
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.to_thread(_spawn, theirs.fileno())
        reader, writer = await asyncio.open_connection(sock=ours)
        child = ChildProcess(process, Link(reader, writer), begun)
        child.watch = asyncio.create_task(self._watch(child))
        try:
            await self._wait_until_ready(child)
        except BaseException as error:
            if isinstance(error, EnvironmentFault):
                self._starts.failed(begun, str(error))
            child.kill()
            await child.watch
            raise
        return child

    async def _wait_until_ready(self, child: ChildProcess) -> None:
        what, limit_s = f"{self._spec.name}: start of a process", self._isolation.start_timeout_s
        choices = pickle.dumps((self._isolation, self._spec.settings))
        try:
            answer, payload = await asyncio.wait_for(child.link.call({"name": self._spec.name}, choices), limit_s)
        except TimeoutError:
            raise EnvironmentFault(f"{what}: not ready within {limit_s:g} s; it was killed") from None
        except LinkBroken:
            raise EnvironmentFault(f"{what}: it ended; see the server's output") from None
        _content(what, answer["kind"], payload)

    async def _watch(self, child: ChildProcess) -> None:
        """Wait for the child's end, see to it that nothing of it is left, and replace it."""
        await child.link.ended()
        if not child.dismissed:
            child.kill()  # and a simulator or browser that outlived it
        try:
            await asyncio.to_thread(child.process.wait, _GOODBYE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            await asyncio.to_thread(child.process.wait)
        if not child.has_served and not child.dismissed:
            self._starts.failed(child.begun, f"{self._spec.name}: a process ended before it answered a call")
        if child in self._children:
            self._children.remove(child)
            self._start_ahead()

    async def _end(self, child: ChildProcess) -> None:
        """Let the child close its environments and end."""
        child.dismissed = True
        child.link.close()
        assert child.watch is not None
        await child.watch


def _content(what: str, kind: str, payload: bytes) -> bytes:
    if kind == "ok":
        return payload
    text = payload.decode()
    if kind == "invalid":
        raise InvalidCall(text)
    if kind == "malformed":
        raise MalformedRequest(text)
    raise EnvironmentFault(f"{what} failed: {text}")


def _spawn(connection: int) -> subprocess.Popen[bytes]:
    # What simulators print is no business of the server's output. A group of its own, so that it ends as a whole.
    return subprocess.Popen(
        [sys.executable, "-m", "agentgym_rl.envs.child", str(connection)],
        pass_fds=[connection],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
