"""A hosted model as the collector's engine: pacing, repeated requests, and a line for every answer paid for."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from agentgym_rl.errors import ContextFullError, EngineError
from agentgym_rl.evaluation.usage import UsageLog
from agentgym_rl.hosted.characters import END_ID, messages_of
from agentgym_rl.hosted.endpoint import Answer, Endpoint, HostedModel, Refusal
from agentgym_rl.types import FinishReason, Generation, SamplingParams

_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0


class Pace:
    """When the next request may be sent. For one event loop."""

    def __init__(
        self,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """None: no limit of ours; the server's own is still obeyed."""
        self._interval_s = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._token_s = 60.0 / tokens_per_minute if tokens_per_minute else 0.0
        self._clock = clock
        self._next_at = self._held_until = clock()

    def reserve(self) -> float:
        """Take the next free time for a request; returns the seconds until then."""
        now = self._clock()
        at = max(now, self._next_at)
        self._next_at = at + self._interval_s
        return at - now

    def held_s(self) -> float:
        """Seconds for which nothing at all may be sent."""
        return max(0.0, self._held_until - self._clock())

    def hold(self, seconds: float) -> None:
        """Send nothing for so long: the server has asked for it."""
        self._held_until = max(self._held_until, self._clock() + seconds)

    def spend(self, tokens: int) -> None:
        """Tokens of an answer put off the requests to come."""
        self._next_at = max(self._next_at, self._clock()) + tokens * self._token_s

    async def turn(self) -> None:
        """Return when a request may be sent."""
        await asyncio.sleep(self.reserve())
        while (wait_s := self.held_s()) > 0:
            await asyncio.sleep(wait_s)


class HostedEngine:
    """Satisfies `agentgym_rl.types.TokenGenerator` with the ids of `agentgym_rl.hosted.characters`.

    Log-probabilities are 0: nobody tells them. A request is repeated where that may help, after the time that the
    server names, else after 1, 2, 4, ... seconds, up to a minute, each drawn from the upper half so that requests that
    failed together do not come back together.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        usage: UsageLog,
        *,
        max_in_flight: int,
        max_retries: int = 6,
        pace: Pace | None = None,
        first_wait_s: float = _FIRST_WAIT_S,
    ) -> None:
        self._endpoint, self._usage, self._pace = endpoint, usage, pace or Pace()
        self._max_retries, self._first_wait_s = max_retries, first_wait_s
        self._threads = ThreadPoolExecutor(max_in_flight, thread_name_prefix="hosted-model")

    @property
    def model(self) -> HostedModel:
        return self._endpoint.model

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, trajectory_id: str) -> Generation:
        """The model's next message.

        Raises `EngineError` when it stays without an answer, as `ContextFullError` where the conversation is too long.
        """
        body = self.model.request(messages_of(prompt_ids), sampling.seed)
        began = time.monotonic()
        tries = 0
        while True:
            tries += 1
            await self._pace.turn()
            outcome = await asyncio.get_running_loop().run_in_executor(self._threads, self._endpoint.ask, body)
            if isinstance(outcome, Answer):
                break
            if not outcome.may_pass or tries > self._max_retries:
                failure = ContextFullError if outcome.is_context_full else EngineError
                raise failure(f"{outcome.message} (tries: {tries})")
            await self._wait(outcome, tries)
        self._usage.write(trajectory_id, outcome, tries=tries, seconds=time.monotonic() - began)
        self._pace.spend(outcome.prompt_tokens + outcome.completion_tokens)
        return _generation(outcome)

    def release(self, trajectory_id: str) -> None:
        """Nothing is kept of a trajectory."""

    def close(self) -> None:
        """End all connections; answers that are still on their way reach nobody."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._endpoint.close()

    async def _wait(self, refusal: Refusal, tries: int) -> None:
        if refusal.wait_s is not None:
            self._pace.hold(refusal.wait_s)  # for all requests: one more would be refused as well
            return
        longest = min(_LONGEST_WAIT_S, self._first_wait_s * 2 ** (tries - 1))
        await asyncio.sleep(longest * random.uniform(0.5, 1.0))


def _generation(answer: Answer) -> Generation:
    ids = list(map(ord, answer.text))
    if answer.finish_reason == FinishReason.STOP:
        ids.append(END_ID)
    return Generation(tuple(ids), (0.0,) * len(ids), answer.finish_reason, policy_version=0)
