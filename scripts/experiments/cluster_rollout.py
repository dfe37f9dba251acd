"""One rollout as discrete events: workers that take trajectories, environments that answer, engines that batch turns.

Who gets which trajectory is decided by the framework's own `HandOut`. An engine goes from one change of its batch to
the next in one event, so that the cost follows turns, not tokens.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch.distributed as dist
from cluster_model import Design, EngineCost, NoRoom

from agentgym_rl.rollout.collector import RolloutRequest
from verl.workers.rollout.hand_out import HandOut


@dataclass(frozen=True, slots=True)
class TurnScript:
    """What happens in a turn."""

    sampled: int
    """Tokens that the engine samples, at least 1."""
    observed: int
    """Tokens that follow before the next turn; those after the last turn are never shown."""
    env_s: float
    """Of the environment's step."""


@dataclass(frozen=True, slots=True)
class TrajectoryScript:
    """What will happen in a trajectory, whatever machine it runs on."""

    uid: str
    """Of its group."""
    prompt: int
    """Tokens before the first sampled one; the same ones in all of a group."""
    reset_s: float
    """Of the environment, to begin."""
    turns: tuple[TurnScript, ...]
    shared: int
    """First tokens that training finds to be the same in all of its group; 0 where there are none."""

    @property
    def num_tokens(self) -> int:
        return self.prompt + self.num_sampled + sum(turn.observed for turn in self.turns[:-1])

    @property
    def num_sampled(self) -> int:
        return sum(turn.sampled for turn in self.turns)

    @property
    def env_s(self) -> float:
        return self.reset_s + sum(turn.env_s for turn in self.turns)


@dataclass(frozen=True)
class EnvServers:
    """Where sessions live; each session stays on one server."""

    num_servers: int = 1
    slots: int = 256
    """Calls that a server works on at the same time; others wait in turn."""


@dataclass(frozen=True)
class EngineRules:
    """How an engine batches."""

    max_num_seqs: int = 256
    token_budget: int = 8192
    """Tokens of one iteration."""
    mixes: bool = True
    """Prompts are computed beside decoding, in chunks (``vllm``); otherwise in a pass of their own (``hf``)."""
    shares_interpreter: bool = False
    """The collector's work holds the engine up: they share a Python process (``hf``)."""


@dataclass(frozen=True)
class RolloutResult:
    """What a rollout took."""

    duration_s: float
    busy_s: tuple[float, ...]
    """Of each engine, with at least one turn in it that it works on."""
    finished_s: tuple[float, ...]
    """When each trajectory ended, in their order."""
    passes: int
    """Through the engines' models."""
    rows: int
    """Sequences that were sampled in, over all passes."""
    flops: float
    """Of all passes."""
    prefilled: int
    """Prompt tokens that engines computed."""
    decoded: int
    env_wait_s: float
    """Calls to environments spent so long waiting for a slot, all together."""
    evictions: int
    """Trajectories whose cache had to go while they waited for their environment."""


@dataclass(eq=False, slots=True)
class _Turn:
    """A turn in an engine."""

    trajectory: int
    uid: str
    prompt: int
    context: int
    """Tokens before it, prompt included."""
    sampled: int
    on_done: Callable[[], None]
    new: int = 0
    """Of the context, tokens that are still to be computed."""


class Clock:
    """Events in the order of their times; those of one time in the order of their priority, then as they came."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time: float, action: Callable[[], None], *, priority: int = 0) -> None:
        heapq.heappush(self._heap, (time, priority, next(self._numbers), action))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._heap:
            self.now, _, _, action = heapq.heappop(self._heap)
            action()


class _Cache:
    """Keys and values in an engine's memory, by trajectory, a group's prompt apart."""

    def __init__(self, capacity: float) -> None:
        self._capacity, self._used = capacity, 0
        self._own: OrderedDict[int, int] = OrderedDict()
        """The one that was used least recently first."""
        self._uids: dict[int, str] = {}
        self._busy: set[int] = set()
        self.prompts: dict[str, int] = {}
        self.evictions = 0

    def cached(self, trajectory: int) -> int:
        return self._own.get(trajectory, 0)

    def take(self, trajectory: int, uid: str, own: int, prompt: int) -> bool:
        """Make room for so many tokens of a trajectory's own and for its prompt, at the cost of those that rest; False
        where there is none."""
        more = own - self.cached(trajectory) + (0 if uid in self.prompts else prompt)
        if self._used + more > self._capacity:
            self._evict(more, keep=trajectory, uid=uid)
        if self._used + more > self._capacity:
            return False
        self._used += more
        self._own[trajectory], self._uids[trajectory] = own, uid
        self._own.move_to_end(trajectory)
        self._busy.add(trajectory)
        self.prompts.setdefault(uid, prompt)
        return True

    def _evict(self, more: int, *, keep: int, uid: str) -> None:
        """Let go of what rests until there is room for ``more`` tokens, and of prompts whose whole group has gone."""
        self._forget_prompts(uid)
        for other in list(self._own):
            if self._used + more <= self._capacity:
                return
            if other not in self._busy and other != keep:
                self.drop(other)
                self.evictions += 1
                self._forget_prompts(uid)

    def _forget_prompts(self, keep: str) -> None:
        for uid in self.prompts.keys() - set(self._uids.values()) - {keep}:
            self._used -= self.prompts.pop(uid)

    def rest(self, trajectory: int) -> None:
        self._busy.discard(trajectory)

    def drop(self, trajectory: int) -> None:
        self._busy.discard(trajectory)
        self._uids.pop(trajectory, None)
        self._used -= self._own.pop(trajectory, 0)


class Engine:
    """Continuous batching: turns join and leave between iterations."""

    def __init__(self, clock: Clock, cost: EngineCost, rules: EngineRules, design: Design) -> None:
        self._clock, self._cost, self._rules, self._reuses = clock, cost, rules, design.prefix_reuse
        self.cache = _Cache(cost.cache_tokens)
        self.busy_s = 0.0
        self.prefilled = self.decoded = self.passes = self.rows = 0
        self.flops = 0.0
        self._waiting: deque[_Turn] = deque()
        self._prefilling: deque[_Turn] = deque()
        self._ends: list[tuple[int, int, _Turn]] = []
        """Heap of turns that decode, by the iteration after which they are done."""
        self._context = 0
        """Cached tokens of the sequences that decode."""
        self._iteration = 0
        self._numbers = itertools.count()
        self._prompts_on_their_way: set[str] = set()
        self._is_woken = self._is_working = self._owes_decode = False
        self._began = 0.0
        self._plan: np.ndarray | None = None
        """Ends of the iterations of a stretch of decoding, in the clock's time."""
        self._plan_number = 0
        self._debt_s = 0.0

    def submit(self, turn: _Turn) -> None:
        self._waiting.append(turn)
        if not self._is_working:
            self._wake()
        elif self._plan is not None and len(self._ends) + len(self._prefilling) < self._rules.max_num_seqs:
            self._cut_plan()

    def delay(self, seconds: float) -> None:
        """The collector holds the interpreter for so long."""
        if self._rules.shares_interpreter:
            self._debt_s += seconds

    def release(self, trajectory: int) -> None:
        self.cache.drop(trajectory)

    def _wake(self) -> None:
        """Begin once all that happens now has happened: turns asked for together are computed together."""
        if not self._is_woken:
            self._is_woken = True
            self._clock.at(self._clock.now, self._begin, priority=1)

    def _begin(self) -> None:
        self._is_woken = False
        if not (self._owes_decode and self._ends):
            self._admit()
        if self._prefilling:
            self._prefill()
        elif self._ends:
            self._decode(1 if self._owes_decode and self._waiting else self._ends[0][0] - self._iteration)
        elif self._waiting:
            first = self._waiting[0]
            raise NoRoom(f"a turn of {first.context + first.sampled} tokens does not fit the engine's cache")

    def _admit(self) -> None:
        """Take waiting turns in order, as far as sequences, tokens of an iteration and cache allow."""
        budget = self._rules.token_budget - len(self._ends) - sum(turn.new for turn in self._prefilling)
        postponed: list[_Turn] = []
        while self._waiting and budget > 0 and self._num_admitted < self._rules.max_num_seqs:
            turn = self._waiting.popleft()
            if self._awaits_prompt(turn):
                postponed.append(turn)
            elif self._take(turn):
                budget -= turn.new
            else:
                postponed.append(turn)
                break
        self._waiting.extendleft(reversed(postponed))

    @property
    def _num_admitted(self) -> int:
        return len(self._ends) + len(self._prefilling)

    def _awaits_prompt(self, turn: _Turn) -> bool:
        """Another of its group is computing the prompt just now."""
        return self._reuses and turn.uid in self._prompts_on_their_way

    def _take(self, turn: _Turn) -> bool:
        prompt = turn.prompt if self._reuses else 0
        own, cached = turn.context - prompt, self.cache.cached(turn.trajectory)
        is_first = prompt > 0 and turn.uid not in self.cache.prompts
        if not self.cache.take(turn.trajectory, turn.uid, own + turn.sampled, prompt):
            return False
        # The last token that was sampled has been passed through no layer yet.
        turn.new = own - cached + (1 if cached else 0)
        if is_first:
            turn.new += prompt
            self._prompts_on_their_way.add(turn.uid)
        # The next token follows from the last one, which is computed in any case.
        turn.new = max(turn.new, 1)
        self._prefilling.append(turn)
        return True

    def _prefill(self) -> None:
        """An iteration with prompts in it: beside it sequences decode, or, in a pass of their own, they do not."""
        mixes = self._rules.mixes
        tokens, pairs, context, done = 0, 0.0, 0.0, []
        room = max(self._rules.token_budget - (len(self._ends) if mixes else 0), 1)
        kinds = set()
        while self._prefilling and room > 0:
            turn = self._prefilling[0]
            chunk = min(turn.new, room) if mixes else turn.new
            seen = turn.context - turn.new
            tokens, room = tokens + chunk, room - chunk
            pairs += chunk * seen + chunk * (chunk + 1) / 2
            context += seen
            kinds.add(chunk.bit_length() // 2)
            turn.new -= chunk
            if turn.new:
                break
            done.append(self._prefilling.popleft())
        self.prefilled += tokens
        rows = len(done) + (len(self._ends) if mixes else 0)
        if mixes:
            tokens, pairs, context = tokens + len(self._ends), pairs + self._context, context + self._context
        seconds = self._cost.iteration_s(tokens, rows, pairs, context)
        # The hf engine passes prompts of very different lengths one kind after the other.
        num_passes = 1 if mixes else len(kinds)
        seconds += (num_passes - 1) * self._cost.fixed_s
        self._count(num_passes, rows, self._cost.operations(tokens, rows, pairs))
        self._work(seconds, lambda: self._prefilled(done, decodes=mixes))

    def _prefilled(self, done: list[_Turn], *, decodes: bool) -> None:
        if decodes:
            self._advance(1)
        for turn in done:
            self._prompts_on_their_way.discard(turn.uid)
            self.decoded += 1
            self._context += turn.context + 1
            heapq.heappush(self._ends, (self._iteration + turn.sampled - 1, next(self._numbers), turn))
        self._owes_decode = not decodes
        self._retire()
        self._go_on()

    def _decode(self, steps: int) -> None:
        """The next ``steps`` iterations, fewer if a turn arrives before their end."""
        ends = self._cost.decode_ends(len(self._ends), self._context, steps)
        self._plan = self._clock.now + self._debt_s + ends
        self._plan_number += 1
        self._schedule_plan(steps, float(self._plan[-1]))

    def _cut_plan(self) -> None:
        """Let the stretch of decoding end with the iteration that is on."""
        assert self._plan is not None
        steps = int(np.searchsorted(self._plan, self._clock.now)) + 1
        if steps < len(self._plan):
            self._plan = self._plan[:steps]
            self._plan_number += 1
            self._schedule_plan(steps, float(self._plan[-1]), again=True)

    def _schedule_plan(self, steps: int, end: float, *, again: bool = False) -> None:
        if not again:
            self._is_working, self._began, self._debt_s = True, self._clock.now, 0.0
        self._clock.at(end, lambda number=self._plan_number: self._decoded(steps, number))  # type: ignore[misc]

    def _decoded(self, steps: int, number: int) -> None:
        if number != self._plan_number:
            return
        self._plan = None
        self.busy_s += self._clock.now - self._began
        self._is_working = self._owes_decode = False
        tokens = steps * len(self._ends)
        pairs = steps * self._context + len(self._ends) * steps * (steps - 1) / 2
        self._count(steps, tokens, self._cost.operations(tokens, tokens, pairs))
        self._advance(steps)
        self._retire()
        self._go_on()

    def _work(self, seconds: float, then: Callable[[], None]) -> None:
        seconds += self._debt_s
        self._is_working, self._debt_s = True, 0.0
        self.busy_s += seconds

        def finish() -> None:
            self._is_working = False
            then()

        self._clock.at(self._clock.now + seconds, finish)

    def _count(self, passes: int, rows: int, flops: float) -> None:
        self.passes += passes
        self.rows += rows
        self.flops += flops

    def _advance(self, steps: int) -> None:
        self._iteration += steps
        self._context += steps * len(self._ends)
        self.decoded += steps * len(self._ends)

    def _retire(self) -> None:
        while self._ends and self._ends[0][0] <= self._iteration:
            turn = heapq.heappop(self._ends)[2]
            self._context -= turn.context + turn.sampled
            if self._reuses:
                self.cache.rest(turn.trajectory)
            else:
                self.cache.drop(turn.trajectory)
            turn.on_done()

    def _go_on(self) -> None:
        if self._waiting or self._prefilling or self._ends:
            self._wake()
        else:
            self._owes_decode = False


class _Servers:
    """Environments' slots: a call takes the first that is free on its session's server."""

    def __init__(self, clock: Clock, servers: EnvServers) -> None:
        self._clock = clock
        self._free_at = [[0.0] * servers.slots for _ in range(servers.num_servers)]
        self.wait_s = 0.0

    def call(self, session: int, seconds: float, then: Callable[[], None]) -> None:
        slots = self._free_at[session % len(self._free_at)]
        start = max(self._clock.now, heapq.heappop(slots))
        heapq.heappush(slots, start + seconds)
        self.wait_s += start - self._clock.now
        self._clock.at(start + seconds, then)


@dataclass(eq=False)
class _Worker:
    """A collector and its engine."""

    engine: Engine
    supply: Iterator[int]
    lanes: int
    turn_s: float
    free_at: float = 0.0
    """When its interpreter has time for another turn."""


@dataclass
class Rollout:
    """All trajectories of a step on all workers."""

    scripts: Sequence[TrajectoryScript]
    cost: EngineCost
    num_engines: int
    design: Design = field(default_factory=Design)
    servers: EnvServers = field(default_factory=EnvServers)
    rules: EngineRules = field(default_factory=EngineRules)
    max_concurrency: int = 256
    """Trajectories in flight on one worker, as ``agentgym.max_concurrency``."""
    turn_s: float = 0.0
    """Time of a collector per turn, and per beginning of a trajectory."""

    def run(self) -> RolloutResult:
        """Raises `NoRoom` where one turn alone does not fit an engine's cache."""
        self._clock = Clock()
        self._servers = _Servers(self._clock, self.servers)
        self._finished = [0.0] * len(self.scripts)
        fair_share = max(1, -(-len(self.scripts) // self.num_engines))
        lanes = min(self.max_concurrency, fair_share)
        workers = [
            _Worker(Engine(self._clock, self.cost, self.rules, self.design), supply, lanes, self.turn_s)
            for supply in self._supplies()
        ]
        for worker in workers:
            for _ in range(worker.lanes):
                self._next_trajectory(worker)
        self._clock.run()
        return RolloutResult(
            duration_s=max(self._finished, default=0.0),
            busy_s=tuple(worker.engine.busy_s for worker in workers),
            finished_s=tuple(self._finished),
            passes=sum(worker.engine.passes for worker in workers),
            rows=sum(worker.engine.rows for worker in workers),
            flops=sum(worker.engine.flops for worker in workers),
            prefilled=sum(worker.engine.prefilled for worker in workers),
            decoded=sum(worker.engine.decoded for worker in workers),
            env_wait_s=self._servers.wait_s,
            evictions=sum(worker.engine.cache.evictions for worker in workers),
        )

    def _supplies(self) -> list[Iterator[int]]:
        """What each worker may take."""
        if not self.design.one_by_one:
            parts = np.array_split(np.arange(len(self.scripts)), self.num_engines)
            return [iter(part.tolist()) for part in parts]
        store = dist.HashStore()
        requests = cast(Sequence[RolloutRequest], self.scripts)  # The hand-out looks at uids alone.
        return [iter(HandOut(requests, store, name="rollout")) for _ in range(self.num_engines)]

    def _next_trajectory(self, worker: _Worker) -> None:
        index = next(worker.supply, None)
        if index is not None:
            self._servers.call(index, self.scripts[index].reset_s, lambda: self._turn(worker, index, 0))

    def _turn(self, worker: _Worker, index: int, number: int) -> None:
        """Give a turn to the engine, after what the collector has to do for it."""
        script = self.scripts[index]
        context = script.prompt + sum(turn.sampled + turn.observed for turn in script.turns[:number])
        turn = _Turn(
            trajectory=index,
            uid=script.uid,
            prompt=script.prompt,
            context=context,
            sampled=script.turns[number].sampled,
            on_done=lambda: self._step(worker, index, number),
        )
        worker.free_at = max(worker.free_at, self._clock.now) + worker.turn_s
        worker.engine.delay(worker.turn_s)
        if self.rules.shares_interpreter:
            worker.engine.submit(turn)
        else:
            self._clock.at(worker.free_at, lambda: worker.engine.submit(turn))

    def _step(self, worker: _Worker, index: int, number: int) -> None:
        """Let the environment answer a turn."""
        script = self.scripts[index]
        is_last = number + 1 == len(script.turns)
        follow = (lambda: self._end(worker, index)) if is_last else (lambda: self._turn(worker, index, number + 1))
        self._servers.call(index, script.turns[number].env_s, follow)

    def _end(self, worker: _Worker, index: int) -> None:
        self._finished[index] = self._clock.now
        worker.engine.release(index)
        self._next_trajectory(worker)
