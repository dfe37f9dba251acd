"""The collector: every trajectory is its own asyncio task, so nobody waits for the slowest of a round.

A task opens or reuses an environment session, resets it, then generates, steps and appends until a stop reason. What is
asked and shown on the way is the agent's matter, `agentgym_rl.agent.strategies`: it may take turns that ask nothing of
the environment, and, after a failed trial, another one at the same item.
A failed rollout is data: what the environment (its client's code included), the engine or the clock does wrong is tried
once more on a fresh session and then kept as a masked trajectory. Every other exception - a wrong configuration, a
programming error - travels up and ends the run.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.agent.formats import TaskView
from agentgym_rl.agent.strategies import MOST_TRIALS, Agent, AgentChoice, Outcome, Reply, Text
from agentgym_rl.client.base import EnvClient
from agentgym_rl.errors import ConfigError, ContextFullError, EngineError, EnvError, TooManyFailures
from agentgym_rl.rollout.handler import RewardRule, RolloutHandler, RolloutRequest, TokenLimits, unstarted_trajectory
from agentgym_rl.rollout.sessions import EnvClientError, EnvSession, SessionUsage, TaskSessions
from agentgym_rl.types import (
    Item,
    Message,
    PartKind,
    Role,
    SamplingParams,
    StepOutput,
    StopReason,
    TokenGenerator,
    Trajectory,
    encodable,
)

__all__ = [
    "RolloutRequest",
    "RolloutSettings",
    "TokenLimits",
    "by_sample",
    "check_failures",
    "collect",
    "report_faults",
]

_ATTEMPTS = 2
_SWITCH_INTERVAL_S = 0.05
_SEEDS_PER_TRIAL = 65536 // MOST_TRIALS
_HOPELESS = 8
"""So many failed trajectories end a rollout early when the part that fails has never worked."""


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """What all trajectories of one rollout share."""

    max_rounds: int
    """Turns per trajectory; what an agent writes beside them, such as a plan, is not counted."""
    limits: TokenLimits
    sampling: SamplingParams
    """``max_tokens``, ``stop_token_ids`` and ``seed`` are set per turn."""
    timeout_s: float = 600.0
    """Seconds one attempt at a trajectory may take."""
    max_concurrency: int = 256
    """Trajectories in flight, and so sessions and threads."""
    agent: AgentChoice = field(default_factory=AgentChoice)
    training_step: int = 0
    runs_inline: bool | frozenset[str] = False
    """`EnvClient.runs_inline` of the clients; of several tasks, the names of those where it is true."""

    def __post_init__(self) -> None:
        for name in ("max_rounds", "max_concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be at least 1")
        if self.timeout_s <= 0:
            raise ConfigError(f"agentgym.timeout={self.timeout_s!r}: must be above 0 seconds")


async def collect(
    requests: Sequence[RolloutRequest],
    engine: TokenGenerator,
    *,
    make_client: Callable[[], EnvClient] | Mapping[str, Callable[[], EnvClient]],
    chat: ChatTemplate,
    settings: RolloutSettings,
    picks: Iterable[int] | None = None,
    only_faults: bool = False,
    on_finished: Callable[[Trajectory], None] | None = None,
    on_closed: Callable[[SessionUsage], None] | None = None,
) -> list[Trajectory]:
    """Make the trajectories of all requests and return them in the requests' order.

    Each request gives one, or, under an agent that tries again, one for each trial, in order: `by_sample` takes them
    apart.
    ``picks``: indices of the requests to take up, by default all in turn. The next one is asked for whenever there is
    room for another trajectory, so that several collectors may share requests by picking from one supply.
    ``only_faults``: return only masked trajectories, where ``on_finished`` puts all away and there may be many.
    ``make_client`` is called in a thread of the new session, if it has one; making a client creates its session on the
    server. Where the requests are of several tasks, it is a mapping from each task's name to what makes its clients.
    ``on_finished`` is called with each trajectory, masked ones included, when its sample ends; ``on_closed`` at last,
    with what the sessions did.
    All sessions are closed when this returns or raises. Raises `TooManyFailures` early when the environment, or the
    engine, has never answered while several trajectories have failed on it; `check_failures` judges the whole.
    """
    sessions = TaskSessions(make_client, inline=settings.runs_inline)
    collection = _Collection(engine, sessions, chat, settings, on_finished, only_faults=only_faults)
    try:
        with _patient_threads():
            return await collection.run(requests, range(len(requests)) if picks is None else picks)
    finally:
        await sessions.close()
        if on_closed is not None:
            on_closed(sessions.usage)


@contextmanager
def _patient_threads() -> Iterator[None]:
    """Let threads that wait for the interpreter look less often whether it is free.

    By default each does so 200 times a second, which with 512 sessions is a quarter of all CPU time. They lose nothing:
    who holds the interpreter gives it away of its own accord at every call to a server and every tensor operation.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(max(before, _SWITCH_INTERVAL_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def by_sample(trajectories: Iterable[Trajectory]) -> list[list[Trajectory]]:
    """The trials of each sample, of trajectories that stand sample by sample as `collect` returns them."""
    samples: list[list[Trajectory]] = []
    for trajectory in trajectories:
        if trajectory.trial == 1:
            samples.append([])
        samples[-1].append(trajectory)
    return samples


def check_failures(trajectories: Sequence[Trajectory], max_failed_fraction: float, *, total: int | None = None) -> None:
    """Raise `TooManyFailures`, with first cause and counts by type, when too many or all trajectories are masked.

    ``total``: number of trajectories where not all are given, but all masked ones.
    """
    total = len(trajectories) if total is None else total
    failed = [trajectory for trajectory in trajectories if trajectory.masked]
    if failed and (len(failed) > max_failed_fraction * total or len(failed) == total):
        raise TooManyFailures(_describe_failures(failed, total))


def count_errors(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    """Masked trajectories by error type, the most frequent first."""
    return dict(Counter(t.error.partition(":")[0] for t in trajectories if t.masked).most_common())


def report_faults(trajectories: Sequence[Trajectory], where: str) -> None:
    """Tell the user of masked trajectories, if there are any, in a line with the first cause."""
    failed = [trajectory for trajectory in trajectories if trajectory.masked]
    if failed:
        cause = " ".join(failed[0].error.split())
        print(
            f"warning: {where}: {len(failed)} of {len(trajectories)} trajectories masked, the first: {cause}",
            flush=True,
        )


def _describe_failures(failed: Sequence[Trajectory], total: int) -> str:
    counts = ", ".join(f"{kind} {count}" for kind, count in count_errors(failed).items())
    return f"{len(failed)} of {total} trajectories failed twice ({counts}); the first: {failed[0].error}"


class _Collection:
    """One call of `collect`: its tasks, sessions and failures."""

    def __init__(
        self,
        engine: TokenGenerator,
        sessions: TaskSessions,
        chat: ChatTemplate,
        settings: RolloutSettings,
        on_finished: Callable[[Trajectory], None] | None,
        *,
        only_faults: bool,
    ) -> None:
        self.engine, self.sessions, self.chat, self.settings = engine, sessions, chat, settings
        self.worked: set[_Part] = set()
        """What has answered at least once."""
        self._on_finished, self._only_faults = on_finished, only_faults
        self._failed: list[Trajectory] = []

    async def run(self, requests: Sequence[RolloutRequest], picks: Iterable[int]) -> list[Trajectory]:
        self._num_requests = len(requests)
        self._items = {request.item for request in requests}
        made: dict[int, list[Trajectory]] = {}
        supply = iter(picks)
        num_lanes = min(self.settings.max_concurrency, len(requests))
        lanes = [asyncio.create_task(self._lane(requests, supply, made)) for _ in range(num_lanes)]
        try:
            if lanes:
                done, _ = await asyncio.wait(lanes, return_when=asyncio.FIRST_EXCEPTION)
                for lane in done:
                    lane.result()
            return [trajectory for index in sorted(made) for trajectory in made[index]]
        finally:
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)

    async def _lane(
        self, requests: Sequence[RolloutRequest], supply: Iterator[int], made: dict[int, list[Trajectory]]
    ) -> None:
        """One sample after another, as long as there is supply, which all lanes draw from."""
        for index in supply:
            trials = await self._sample(requests[index])
            made[index] = [trial for trial in trials if trial.masked or not self._only_faults]

    async def _sample(self, request: RolloutRequest) -> list[Trajectory]:
        """All trials of one sample: another one as long as the agent has learned something for it."""
        trials: list[Trajectory] = []
        lessons: list[str] = []
        while len(trials) == len(lessons) < self.settings.agent.trials:
            attempt = await self._trial(request, tuple(lessons))
            trials.append(attempt.trajectory)
            lessons += [] if attempt.lesson is None else [attempt.lesson]
        trials = _linked(trials)
        if self._on_finished is not None:
            for trial in trials:
                self._on_finished(trial)
        return trials

    async def _trial(self, request: RolloutRequest, lessons: tuple[str, ...]) -> _Result:
        """Try, and try once more on a fresh session after a fault."""
        for number in range(1, _ATTEMPTS + 1):
            attempt = _Attempt(self, request, number, lessons)
            trajectory = await attempt.run()
            if not trajectory.masked:
                return _Result(trajectory, attempt.lesson)
        self._note_failure(trajectory)
        return _Result(trajectory, None)

    def _note_failure(self, trajectory: Trajectory) -> None:
        """Give up when several items failed on a part that has never worked: the rest would only fail as well."""
        self._failed.append(trajectory)
        part = _part_behind(trajectory.stop_reason, trajectory.item)
        causes = [t for t in self._failed if _part_behind(t.stop_reason, t.item) == part]
        is_deadline = trajectory.stop_reason == StopReason.DEADLINE
        if is_deadline or part in self.worked or len(causes) < min(_HOPELESS, self._num_requests):
            return
        items = [item for item in self._items if _part_behind(trajectory.stop_reason, item) == part]
        if len({t.item for t in causes}) >= min(_HOPELESS, len(items)):
            raise TooManyFailures(_describe_failures(causes, self._num_requests))


_Part = tuple[StopReason, str]
"""A part of the system that may fail: the kind of fault that it gives, and the task whose environment it is."""


def _part_behind(stop_reason: StopReason, item: Item) -> _Part:
    """What failed: each task has an environment of its own, and all share the engine."""
    return (stop_reason, item.task if stop_reason == StopReason.ENV_ERROR else "")


@dataclass(frozen=True, slots=True)
class _Result:
    """What came of one trial."""

    trajectory: Trajectory
    lesson: str | None
    """What the agent wrote for its next trial; None when it makes none."""


def _linked(trials: Sequence[Trajectory]) -> list[Trajectory]:
    """The trials of one sample, each told how many there are and what its reflection was worth."""
    if len(trials) == 1:
        return list(trials)
    rewards = [None if following.masked else following.score for following in trials[1:]]
    return [
        replace(trial, num_trials=len(trials), reflection_reward=reward)
        for trial, reward in zip(trials, [*rewards, None], strict=True)
    ]


class _Attempt:
    """One attempt at one trajectory, on one session."""

    def __init__(
        self, collection: _Collection, request: RolloutRequest, attempt: int, lessons: tuple[str, ...] = ()
    ) -> None:
        self._collection, self._request, self._attempt = collection, request, attempt
        self._settings, self._engine = collection.settings, collection.engine
        self._lessons, self._trial, self._chat = lessons, len(lessons) + 1, collection.chat
        self.lesson: str | None = None
        """What the agent wrote after a failure, once it has."""
        self._unseen: str | None = None
        """What the environment said last, until the agent is shown it."""
        self._reward = 0.0
        self._sessions = collection.sessions.of(request.item.task)
        self._session: EnvSession | None = None
        self._handler: RolloutHandler | None = None
        self._address = ""
        self._started_at = time.monotonic()
        step = self._settings.training_step
        self._id = f"{step}/{request.uid}/{request.item.item_id}/{request.sample_index}/{self._trial}/{attempt}"

    async def run(self) -> Trajectory:
        """Play the episode; faults come back as a masked trajectory."""
        is_session_sound = False
        try:
            async with asyncio.timeout(self._settings.timeout_s) as deadline:
                trajectory = await self._play()
            is_session_sound = not trajectory.masked
            return trajectory
        except TimeoutError:
            if not deadline.expired():
                raise
            return self._fault(
                StopReason.DEADLINE, "DeadlineExceeded", f"not finished after {self._settings.timeout_s} s"
            )
        finally:
            self._engine.release(self._id)
            pool = self._sessions
            if self._session is not None:
                (pool.put_back if is_session_sound else pool.discard)(self._session)

    async def _play(self) -> Trajectory:
        try:
            self._session = await self._sessions.acquire(fresh=self._attempt > 1)
            handler, agent = await self._start(self._session)
            stop_reason = await self._turns(handler, agent, self._session)
            await self._reflect(handler, agent, stop_reason)
            return handler.finish(stop_reason)
        except EnvClientError as error:
            return self._fault(StopReason.ENV_ERROR, type(error.__cause__).__name__, str(error.__cause__))
        except EnvError as error:
            return self._fault(StopReason.ENV_ERROR, type(error).__name__, str(error))
        except EngineError as error:
            return self._fault(StopReason.ENGINE_ERROR, type(error).__name__, str(error))

    async def _start(self, session: EnvSession) -> tuple[RolloutHandler, Agent]:
        """Reset the session to the item, and begin the record with the opening prompt."""
        client = session.client
        self._address = str(getattr(client, "env_server_base", ""))
        observation, state = await session.call(lambda client: _reset(client, self._request.item.reset_key))
        self._collection.worked.add(_part_behind(StopReason.ENV_ERROR, self._request.item))
        task, choice = TaskView.of(client), self._settings.agent
        self._chat = self._collection.chat.with_tools(choice.tools(task))
        agent = choice.make(task, lessons=self._lessons, are_tools_shown=self._chat.declares_tools)
        opening = agent.opening(observation)
        self._handler = RolloutHandler(
            self._request,
            tuple(Message(role, text.content) for role, text in opening),
            self._chat,
            self._settings.limits,
            max_rounds=self._settings.max_rounds,
            attempt=self._attempt,
            trial=self._trial,
            parts=[text.parts for _, text in opening],
            rewards=RewardRule(client.reward_is_cumulative, client.succeeds_from(), client.reward_scale),
            started_at=self._started_at,
        )
        self._handler.viewer_states.append(state)
        return self._handler, agent

    async def _turns(self, handler: RolloutHandler, agent: Agent, session: EnvSession) -> StopReason:
        while handler.turn_budget() > 0:
            text = await self._generate(handler)
            if text is None:
                break
            reply = agent.read(text)
            handler.note_parts(reply.parts)
            if reply.aside is not None:
                handler.append_aside(reply.aside)
                answer, role = reply.answer or Text(""), Role.USER
            else:
                output = await self._step(handler, session, reply)
                if output.done:
                    return StopReason.DONE
                if len(handler.turns) >= self._settings.max_rounds:
                    return StopReason.MAX_ROUNDS
                answer = reply.answer or agent.observe(output.state)
                role = self._chat.answer_role if _acts(reply) else Role.USER
            self._unseen = None
            if not handler.append_observation(answer.content, answer.parts, role):
                return StopReason.LENGTH
        return StopReason.LENGTH

    async def _generate(self, handler: RolloutHandler) -> str | None:
        """What the model writes next; None, and a record without room, when its context is full."""
        settings = self._settings.sampling
        sampling = replace(
            settings,
            temperature=0.0 if self._request.greedy else settings.temperature,
            max_tokens=handler.turn_budget(),
            stop_token_ids=self._chat.stop_token_ids,
            seed=_turn_seed(self._request.seed, self._trial, handler.num_generations),
        )
        start = time.monotonic()
        try:
            generation = await self._engine.generate(handler.input_ids.tolist(), sampling, trajectory_id=self._id)
        except ContextFullError as error:
            self._check_began(handler, error)
            handler.close()
            return None
        text = handler.append_generation(generation, time.monotonic() - start)
        self._collection.worked.add(_part_behind(StopReason.ENGINE_ERROR, self._request.item))
        return text

    def _check_began(self, handler: RolloutHandler, error: ContextFullError) -> None:
        """Raise `ConfigError` where the prompt alone is too long; one with lessons of earlier trials may be."""
        if self._trial == 1 and handler.num_generations == 0:
            raise ConfigError(
                f"item {self._request.item.item_id}: its prompt leaves the model no room for an answer: {error}"
            ) from error

    async def _step(self, handler: RolloutHandler, session: EnvSession, reply: Reply) -> StepOutput:
        """Execute a turn; one that asks for nothing the environment could do is answered by the agent itself."""
        text = reply.for_environment
        if text is None:
            # A score so far stays as it is; a reward of this step is none.
            reward = self._reward if session.client.reward_is_cumulative else 0.0
            output = StepOutput(reply.answer.content if reply.answer else "", reward, False)
            state, env_s = handler.viewer_states[-1], 0.0
        else:
            start = time.monotonic()
            output, state = await session.call(lambda client: _step(client, text))
            env_s = time.monotonic() - start
        handler.append_step(output, env_s)
        handler.viewer_states.append(state)
        self._reward, self._unseen = output.reward, output.state
        return output

    async def _reflect(self, handler: RolloutHandler, agent: Agent, stop_reason: StopReason) -> None:
        """After a failure, let the agent write what its next trial shall know, if it tries again and there is room."""
        if handler.succeeded or self._trial >= self._settings.agent.trials:
            return
        request = agent.reflection_request(Outcome(handler.score, stop_reason, self._unseen))
        if request is None or not handler.append_observation(request.content, request.parts):
            return
        if handler.turn_budget() == 0:
            return
        text = await self._generate(handler)
        if text is None:
            return
        lesson = agent.lesson(text)
        handler.note_parts(lesson.parts)
        handler.append_aside(PartKind.REFLECTION)
        self.lesson = lesson.content

    def _fault(self, stop_reason: StopReason, kind: str, message: str) -> Trajectory:
        """The masked trajectory of what was recorded until the fault."""
        error = f"{kind}: {message if self._request.item.item_id in message else f'{self._where()}: {message}'}"
        if self._handler is not None:
            return self._handler.finish(stop_reason, error)
        return unstarted_trajectory(
            self._request,
            stop_reason,
            error,
            attempt=self._attempt,
            max_rounds=self._settings.max_rounds,
            duration_s=time.monotonic() - self._started_at,
            trial=self._trial,
        )

    def _where(self) -> str:
        """Item, turn and server of what is being tried."""
        turn = f" turn {len(self._handler.turns) + 1}" if self._handler is not None else " reset"
        return f"{self._request.item.item_id}{turn}" + (f" at {self._address}" if self._address else "")


def _reset(client: EnvClient, key: Any) -> tuple[str, Any]:
    """The first observation, and what a viewer may show beyond it."""
    client.reset(key)
    return encodable(client.observe()), getattr(client, "viewer_state", None)


def _step(client: EnvClient, text: str) -> tuple[StepOutput, Any]:
    """What a turn did, and what a viewer may show beyond it."""
    output = client.step(text)
    state = encodable(output.state)
    return output if state == output.state else replace(output, state=state), getattr(client, "viewer_state", None)


def _acts(reply: Reply) -> bool:
    """True when the turn holds an action, be it one that fits nothing."""
    return any(part.kind == PartKind.ACTION for part in reply.parts)


def _turn_seed(seed: int | None, trial: int, generation: int) -> int | None:
    """A seed of each generation's own; the same in both attempts, so that a fault does not change what is sampled."""
    return None if seed is None else (seed * 65536 + (trial - 1) * _SEEDS_PER_TRIAL + generation) % 2**63
