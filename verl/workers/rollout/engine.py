"""Engine: the inference side of the policy, as workers see it; and the meters that every engine carries."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from agentgym_rl.errors import EngineError
from agentgym_rl.types import Generation, SamplingParams

if TYPE_CHECKING:  # The driver reads records of this module, and transformers takes seconds to import.
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """What an engine did since its start; the difference of two readings is what it did between them."""

    num_tokens: int = 0
    """Sampled tokens of finished turns."""
    busy_s: float = 0.0
    """Seconds in which at least one turn was asked for and not yet answered."""

    def __sub__(self, earlier: EngineUsage) -> EngineUsage:
        return EngineUsage(self.num_tokens - earlier.num_tokens, self.busy_s - earlier.busy_s)


@dataclass(frozen=True, slots=True)
class WeightUpdateTimes:
    """Seconds of one weight update, by what they went into."""

    gather_s: float
    """Collecting full tensors from the actor's ranks."""
    transfer_s: float
    """Bringing them to where the engine computes."""
    load_s: float
    """The engine's own work: from tensors under Hugging Face names to its parameters."""


def check_request(prompt_ids: Sequence[int], sampling: SamplingParams, trajectory_id: str) -> None:
    """Raise `EngineError` for a turn that has nothing to go on from, or that may sample nothing."""
    if not len(prompt_ids) or sampling.max_tokens < 1:
        raise EngineError(
            f"{trajectory_id}: {len(prompt_ids)} prompt tokens and max_tokens={sampling.max_tokens}: need 1 or more"
        )


class Engine(ABC):
    """Samples turns with the weights it was last given. Satisfies `agentgym_rl.types.TokenGenerator`.

    Methods other than `generate` block; call them from any thread, but not from the event loop that turns wait in.
    """

    policy_version: int = 0

    @abstractmethod
    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, trajectory_id: str) -> Generation:
        """Sample one turn after ``prompt_ids``, the whole sequence so far; see `TokenGenerator.generate`."""

    @abstractmethod
    def release(self, trajectory_id: str) -> None:
        """Free what is kept for this trajectory; unknown ids are ignored."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdateTimes:
        """Take new weights (full tensors under the Hugging Face names) and drop every cache made with the old ones.

        Turns in flight fail with `EngineError`.
        """

    @abstractmethod
    def sleep(self) -> None:
        """Free cache memory while the actor trains; turns in flight fail with `EngineError`."""

    @abstractmethod
    def wake(self) -> None:
        """Get ready to generate again."""

    @abstractmethod
    def raise_if_down(self) -> None:
        """Raise `EngineError`, with the cause, when no turn can succeed any more; may be called from any thread."""

    @abstractmethod
    def usage(self) -> EngineUsage:
        """What the engine did so far; may be called at any time, from any thread."""

    @abstractmethod
    def close(self) -> None:
        """End the engine; turns in flight fail with `EngineError`."""


class UsageMeter:
    """Counts an engine's turns and tokens; safe in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_turns = 0
        self._num_tokens = 0
        self._busy_s = 0.0
        self._busy_since = 0.0

    def begin_turn(self) -> None:
        with self._lock:
            if self._num_turns == 0:
                self._busy_since = time.perf_counter()
            self._num_turns += 1

    def end_turn(self, num_tokens: int) -> None:
        """A turn is over, with so many tokens for the caller: 0 when it failed or nobody waits for it any more."""
        with self._lock:
            self._num_turns -= 1
            self._num_tokens += num_tokens
            if self._num_turns == 0:
                self._busy_s += time.perf_counter() - self._busy_since

    def read(self) -> EngineUsage:
        with self._lock:
            running_s = time.perf_counter() - self._busy_since if self._num_turns else 0.0
            return EngineUsage(self._num_tokens, self._busy_s + running_s)


class TimedWeights:
    """Passes weights on and adds up the seconds that it took to get them."""

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._weights = iter(weights)
        self.seconds = 0.0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        start = time.perf_counter()
        try:
            return next(self._weights)
        finally:
            self.seconds += time.perf_counter() - start


class ExpectedWeights:
    """The weights that a model takes, by name and shape."""

    def __init__(self, model: PreTrainedModel) -> None:
        """``model`` may be on the ``meta`` device."""
        self.shapes: Mapping[str, torch.Size] = {
            name: tensor.shape
            for tensors in (model.named_parameters(remove_duplicate=False), model.named_buffers())
            for name, tensor in tensors
        }
        self._required = frozenset(model.state_dict()) - frozenset(model._tied_weights_keys or ())

    def check(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass weights on; raise `EngineError` for one that does not fit and, at the end, for those that lack."""
        missing = set(self._required)
        for name, tensor in weights:
            shape = self.shapes.get(name)
            if shape != tensor.shape:
                have = f"shape {tuple(shape)}" if shape is not None else "no such parameter"
                raise EngineError(
                    f"weight {name!r} of shape {tuple(tensor.shape)} does not fit the engine's model: {have}"
                )
            missing.discard(name)
            yield name, tensor
        if missing:
            raise EngineError(f"the new weights lack {len(missing)} of the engine's parameters, first {min(missing)!r}")
