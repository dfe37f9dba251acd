"""The ``hf`` engine: a transformers model in the worker's own process, decoding many sequences at once.

Requests join and leave while others decode. The KV cache of a trajectory stays in its slot across its turns, so that a
turn computes only what was appended; a prompt that begins like a cached one starts from a copy of that prefix.
A thread of its own owns the model and the cache. Callers only touch the inbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from agentgym_rl.errors import ConfigError, EngineError
from agentgym_rl.types import FinishReason, Generation, SamplingParams
from verl.workers.rollout.engine import (
    Engine,
    EngineUsage,
    ExpectedWeights,
    TimedWeights,
    UsageMeter,
    WeightUpdateTimes,
    check_request,
)
from verl.workers.rollout.sampling import sample_tokens
from verl.workers.rollout.slot_cache import ATTENTION_NAME, PrefixCopies, SlotBatch, SlotCache
from verl.workers.rollout.slot_table import SlotTable

logger = logging.getLogger(__name__)

PREFILL_TOKEN_BUDGET = 8192
"""Prompt tokens computed before decoding goes on: bounds memory and the pause of sequences that decode."""


@dataclass(eq=False)
class _Request:
    """One turn on its way: what was asked and what is sampled so far."""

    trajectory_id: str
    prompt: np.ndarray
    sampling: SamplingParams
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Generation]
    uniforms: np.ndarray | None = None
    """A random number for each token, once the engine has seen the request."""
    slot: int = -1
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    @property
    def next_uniform(self) -> float:
        """The random number that decides the next token."""
        assert self.uniforms is not None
        return float(self.uniforms[len(self.token_ids)])

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while tokens are still to be sampled."""
        if self.token_ids and self.token_ids[-1] in self.sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) == self.sampling.max_tokens else None

    def answer(self, outcome: Generation | EngineError) -> None:
        """Give the outcome to whoever awaits it; called in its event loop, harmless when nobody does any more."""
        if self.future.done():
            return
        if isinstance(outcome, EngineError):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


class HFEngine(Engine):
    """Continuous batching over a transformers causal language model; the reference for numerics."""

    def __init__(self, model: PreTrainedModel, *, max_num_seqs: int = 256, seed: int = 0) -> None:
        """Takes ``model`` over: it must not be shared with training. ``max_num_seqs`` bounds the sequences cached and
        decoded at once; ``seed`` is for requests that bring none. Raises `ConfigError` for a model with other than full
        attention layers."""
        _require_full_attention(model)
        model.set_attn_implementation(ATTENTION_NAME)
        self._model = model.eval().requires_grad_(False)
        self._device = next(model.parameters()).device
        self._random = np.random.default_rng(seed)
        self._meter = UsageMeter()
        self._cache = SlotCache()
        self._slots = SlotTable(max_num_seqs)
        self._active: list[_Request] = []
        self._step_lock = threading.Lock()  # guards model, cache, slots and active; held for a whole step

        self._inbox = threading.Condition()  # guards what follows; never held while computing
        self._pending: deque[_Request] = deque()
        self._released: list[str] = []
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="hf-engine", daemon=True)
        self._thread.start()

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, trajectory_id: str) -> Generation:
        check_request(prompt_ids, sampling, trajectory_id)
        loop = asyncio.get_running_loop()
        prompt, future = np.asarray(prompt_ids, dtype=np.int64), loop.create_future()
        with self._inbox:
            self.raise_if_down()
            self._pending.append(_Request(trajectory_id, prompt, sampling, loop, future))
        # Woken when the callbacks that are ready now have run: turns asked for together are computed together.
        loop.call_soon(self._wake_up)
        self._meter.begin_turn()
        num_tokens = 0
        try:
            generation = await future
            num_tokens = len(generation.token_ids)
        finally:
            self._meter.end_turn(num_tokens)
        return generation

    def release(self, trajectory_id: str) -> None:
        with self._inbox:
            self._released.append(trajectory_id)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdateTimes:
        """See `Engine.load_weights`. Raises `EngineError` when names or shapes are not the model's."""
        timed = TimedWeights(weights)
        with self._step_lock:
            self.raise_if_down()
            self._drop_everything(EngineError(f"aborted: weights of version {version} arrived"))
            start = time.perf_counter()
            _copy_weights(self._model, timed)
            self.policy_version = version
        # One process and one device: copying is both the way to the engine and the load.
        return WeightUpdateTimes(timed.seconds, 0.0, time.perf_counter() - start - timed.seconds)

    def sleep(self) -> None:
        with self._step_lock:
            self._drop_everything(EngineError("aborted: the engine was put to sleep"))
            self._cache.free()

    def wake(self) -> None:
        """Nothing to do: the cache grows again with use."""

    def raise_if_down(self) -> None:
        if self._error is not None:
            raise EngineError(f"the engine broke: {type(self._error).__name__}: {self._error}") from self._error
        if self._closed:
            raise EngineError("the engine is closed")

    def usage(self) -> EngineUsage:
        return self._meter.read()

    def close(self) -> None:
        with self._inbox:
            self._closed = True
            self._inbox.notify()
        self._thread.join()
        self.sleep()

    def _wake_up(self) -> None:
        with self._inbox:
            self._inbox.notify()

    def _drop_everything(self, error: EngineError) -> None:
        with self._inbox:
            dropped = [*self._active, *self._pending]
            self._active, self._slots = [], SlotTable(self._slots.capacity)
            self._pending.clear()
            self._released.clear()
        _resolve([(request, error) for request in dropped])

    # ------------------------------------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._wait_for_work():
                    with self._step_lock:
                        self._step()
        # Broad on purpose: whatever broke, every waiting trajectory must learn of it; here alone is its traceback.
        except Exception as error:
            logger.exception("the engine broke")
            self._error = error
            self._drop_everything(EngineError(f"the engine broke: {type(error).__name__}: {error}"))

    def _wait_for_work(self) -> bool:
        with self._inbox:
            self._inbox.wait_for(lambda: self._closed or self._pending or self._active)
            return not self._closed

    def _step(self) -> None:
        """Compute the prompts that wait, then one token of every active sequence."""
        self._drop_cancelled()
        budget = PREFILL_TOKEN_BUDGET
        # Again for the members of groups that start from a prompt just computed: what they sample is then in step.
        while admitted := self._admit(budget):
            counts = [len(r.prompt) - self._slots.length(r.slot) for r in admitted]
            budget -= sum(counts)
            for requests in _alike(admitted, counts):
                self._forward(requests, [r.prompt[self._slots.length(r.slot) :] for r in requests])
        self._retire()
        if self._active:
            self._forward(self._active, [np.array(r.token_ids[-1:]) for r in self._active])
            self._retire()

    def _drop_cancelled(self) -> None:
        """Spend nothing on turns whose trajectory was given up."""
        for request in self._active:
            if request.future.cancelled():
                self._slots.set_idle(request.slot)
        self._active = [request for request in self._active if not request.future.cancelled()]

    def _admit(self, budget: int) -> list[_Request]:
        """Take waiting requests within a budget of tokens to compute, each with a slot that holds what is cached of its
        prompt."""
        with self._inbox:
            waiting, self._pending = self._pending, deque()
            released, self._released = self._released, []
        for trajectory_id in released:
            self._slots.release(trajectory_id)
        admitted: list[_Request] = []
        postponed: list[_Request] = []
        prompts_on_their_way: set[bytes] = set()
        copies = PrefixCopies(self._cache)
        self._draw_uniforms(waiting)
        for request in waiting:
            if request.future.cancelled():
                continue
            # Members of a group start from one prompt: the first computes it, the others copy it afterwards.
            key = b"" if self._slots.owns(request.trajectory_id) else request.prompt.tobytes()
            if budget <= 0 or key in prompts_on_their_way or not self._take_slot(request, copies):
                postponed.append(request)
                continue
            if key and len(request.prompt) - self._slots.length(request.slot) > 1:
                prompts_on_their_way.add(key)
            budget -= len(request.prompt) - self._slots.length(request.slot)
            admitted.append(request)
        copies.flush()
        self._active += admitted
        with self._inbox:
            self._pending.extendleft(reversed(postponed))
        return admitted

    def _draw_uniforms(self, requests: Iterable[_Request]) -> None:
        """Draw all random numbers of each new request from its own seed: what runs beside it cannot matter.

        Here and not where a request is made, since the same few instructions for many in a row take half the time.
        """
        for request in requests:
            if request.uniforms is None:
                seed = request.sampling.seed
                random = self._random if seed is None else np.random.default_rng(seed)
                request.uniforms = random.random(request.sampling.max_tokens)

    def _take_slot(self, request: _Request, copies: PrefixCopies) -> bool:
        place = self._slots.acquire(request.trajectory_id, request.prompt)
        if place is None:
            return False
        request.slot, source, shared = place
        if shared and source != request.slot:
            copies.add(source, request.slot, shared)
        return True

    def _forward(self, requests: list[_Request], new_tokens: list[np.ndarray]) -> None:
        """Run the new tokens of each request's sequence through the model and sample the next token of each."""
        slots = [request.slot for request in requests]
        starts, counts = [self._slots.length(slot) for slot in slots], [len(tokens) for tokens in new_tokens]
        batch = SlotBatch.build(self._cache, slots, starts, counts, self._device)
        logits_RV = self._model(
            input_ids=torch.from_numpy(np.concatenate(new_tokens)).to(self._device)[None],
            position_ids=batch.token_position_T[None],
            use_cache=False,
            logits_to_keep=torch.tensor(counts, device=self._device).cumsum(0) - 1,
            slot_batch=batch,
        ).logits[0]
        for slot, tokens in zip(slots, new_tokens, strict=True):
            self._slots.extend(slot, tokens)
        uniforms_R = torch.tensor([r.next_uniform for r in requests], dtype=torch.float64, device=self._device)
        ids_R, log_probs_R = sample_tokens(logits_RV, [r.sampling for r in requests], uniforms_R)
        for request, token_id, log_prob in zip(requests, ids_R.tolist(), log_probs_R.tolist(), strict=True):
            request.token_ids.append(token_id)
            request.log_probs.append(log_prob)

    def _retire(self) -> None:
        """Answer the requests that are complete."""
        remaining: list[_Request] = []
        answered: list[tuple[_Request, Generation]] = []
        for request in self._active:
            reason = request.finish_reason
            if reason is None:
                remaining.append(request)
                continue
            self._slots.set_idle(request.slot)
            ids, log_probs = tuple(request.token_ids), tuple(request.log_probs)
            answered.append((request, Generation(ids, log_probs, reason, self.policy_version)))
        self._active = remaining
        _resolve(answered)


def _resolve(outcomes: Sequence[tuple[_Request, Generation | EngineError]]) -> None:
    """Hand outcomes to those who await them, each event loop woken once: for short turns, waking is the larger part."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Request, Generation | EngineError]]] = {}
    for request, outcome in outcomes:
        by_loop.setdefault(request.loop, []).append((request, outcome))
    for loop, own in by_loop.items():
        # A closed event loop has nobody who waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_answer, own)


def _answer(outcomes: Sequence[tuple[_Request, Generation | EngineError]]) -> None:
    for request, outcome in outcomes:
        request.answer(outcome)


def _alike(requests: list[_Request], counts: list[int]) -> list[list[_Request]]:
    """Group requests whose numbers of new tokens differ by less than about four times: attention pads within one."""
    groups: dict[int, list[_Request]] = {}
    for request, count in zip(requests, counts, strict=True):
        groups.setdefault(count.bit_length() // 2, []).append(request)
    return list(groups.values())


def _require_full_attention(model: PreTrainedModel) -> None:
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ConfigError(
            f"model {model.config.name_or_path!r} has layers of type {', '.join(sorted(kinds))}: "
            "the hf engine takes full_attention only"
        )


def _copy_weights(model: PreTrainedModel, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for name, tensor in ExpectedWeights(model).check(weights):
        own[name].copy_(tensor)
