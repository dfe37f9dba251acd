"""How fast a training step was, for its tokens, its devices and what they could do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verl.protocol import DataProto
from verl.single_controller.base import WorkerGroup
from verl.utils.families import find_families
from verl.utils.flops import ModelSize, peak_flops


@dataclass(frozen=True)
class Passes:
    """How often a phase of a step takes each token through a model."""

    forward: float = 0.0
    training: float = 0.0
    """Forward and backward."""


@dataclass(frozen=True)
class Performance:
    """What a run's speed is measured against; its critic and its reference are taken to be as large as its policy."""

    size: ModelSize
    num_devices: int
    peak_flops: float | None
    """Of one device, per second; None where it is not known: there is no utilisation then."""
    shares_prefixes: bool = False
    """What trajectories of one group begin with goes through a model once for all of them."""

    @classmethod
    def of(cls, workers: WorkerGroup, *, peak_tflops: float | None, shares_prefixes: bool) -> Performance:
        """Of `HybridWorker`s; ``peak_tflops`` goes before what is known of their devices."""
        [size, *_] = workers.call_all("model_size")
        [device_name, *_] = workers.call_all("device_name")
        peak = peak_flops(device_name) if peak_tflops is None else peak_tflops * 1e12
        return cls(size, workers.world_size, peak, shares_prefixes)

    def metrics(
        self, batch: DataProto, timing: Mapping[str, float], *, passes: Mapping[str, Passes]
    ) -> dict[str, float]:
        """Metrics ``perf/...`` of a step on ``batch``.

        ``timing`` holds its seconds under ``timing_s/<phase>``, all of it under ``timing_s/step``; ``passes`` what the
        phases compute, as far as they take place.
        """
        step_s = timing["timing_s/step"]
        tokens_per_s = batch.num_tokens / step_s
        return {
            "perf/tokens_per_s": tokens_per_s,
            "perf/tokens_per_s_per_device": tokens_per_s / self.num_devices,
            **{
                name.replace("timing_s/", "perf/share_"): seconds / step_s
                for name, seconds in timing.items()
                if name != "timing_s/step"
            },
            **self._flops_metrics(self._flops(batch, timing, passes), timing),
        }

    def _flops(self, batch: DataProto, timing: Mapping[str, float], passes: Mapping[str, Passes]) -> dict[str, float]:
        """Operations by phase, of the phases that there were."""
        lengths, num_sampled = batch.lengths_B.tolist(), batch.num_sampled_tokens
        forward = self.size.forward_flops(lengths, num_sampled)
        training = self.size.training_flops(lengths, num_sampled)
        for family in find_families(batch, range(len(batch))) if self.shares_prefixes else ():
            num_spared = len(family.members) - 1
            forward -= num_spared * self.size.forward_flops([family.prefix], 0)
            training -= num_spared * self.size.training_flops([family.prefix], 0)
        return {
            phase: each.forward * forward + each.training * training
            for phase, each in passes.items()
            if f"timing_s/{phase}" in timing
        }

    def _flops_metrics(self, flops: Mapping[str, float], timing: Mapping[str, float]) -> dict[str, float]:
        def per_device(count: float, phase: str) -> float:
            return count / timing[f"timing_s/{phase}"] / self.num_devices

        whole = per_device(sum(flops.values()), "step")
        metrics = {"perf/tflops_per_device": whole / 1e12}
        if self.peak_flops is not None:
            metrics["perf/mfu"] = whole / self.peak_flops
            for phase, count in flops.items():
                metrics[f"perf/mfu_{phase}"] = per_device(count, phase) / self.peak_flops
        return metrics


def largest(by_worker: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each number, that of the worker where it is largest."""
    return {name: max(numbers[name] for numbers in by_worker) for name in by_worker[0]}
