"""Holds the simulator to real runs on a CPU: calibrates its machine on some of their steps and predicts others.

    python scripts/experiments/cluster_validate.py --calibrate saves/m/*/24x8-4 saves/m/*/6x8-4 --predict saves/m/*/*
    python scripts/experiments/cluster_validate.py --clock wall --calibrate saves/run@1:12 --predict saves/run@13:36

``FOLDER@FIRST:LAST`` takes some steps of a run, ``NAME=FOLDER`` calls it something else. Given are the trajectories of
each step: turns, tokens, and how long the environment took; predicted is how long engine and learner take. With
``--clock cpu`` (runs of `cluster_measure`) the rollout's figure is the time in which the engine has work, with ``wall``
(any run) the whole phase.
Calibrated are three numbers of the engine (seconds per pass and per row, operations per second) and four of the learner
(the same, and operations of attention per second). The collector's time per turn is the simulator's own.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from cluster_model import FLOAT32, NO_WORK, Assumptions, Design, EngineCost, Links, TrainingCost, model_size
from cluster_rollout import EngineRules, EnvServers, Rollout, RolloutResult
from cluster_step import Passes
from cluster_workload import MeasuredStep, read_run

from verl.models.shapes import ModelShape, shape_of

_ROUNDS = 6
"""How often engine numbers are fitted anew: which turns meet in a pass follows from them."""
_MAX_TOKENS = 16384
"""Of a micro-batch, ``actor.ppo_max_token_len_per_gpu``'s default."""
_ENGINE = EngineRules(max_num_seqs=256, token_budget=8192, mixes=False, shares_interpreter=True)
"""The ``hf`` engine."""


@dataclass(frozen=True)
class Machine:
    """A CPU worker, as calibrated."""

    engine_pass_s: float
    engine_row_s: float
    engine_flops: float
    learner_pass_s: float
    learner_sequence_s: float
    learner_flops: float
    learner_attention_flops: float

    def engine(self, shape: ModelShape) -> EngineCost:
        """Small models lie in the CPU's caches: no memory bound."""
        size = model_size(shape)
        return EngineCost(
            fixed_s=self.engine_pass_s,
            row_s=self.engine_row_s,
            token_flops=2.0 * size.num_body_weights,
            pair_flops=4.0 * size.num_layers * size.attention_width,
            head_flops=2.0 * size.num_head_weights,
            flops=self.engine_flops,
            weight_bytes=float(FLOAT32 * (size.num_body_weights + size.num_head_weights)),
            cache_bytes=2.0 * shape.num_layers * shape.kv_width * FLOAT32,
            bandwidth=math.inf,
            communication_s=0.0,
            communication_token_s=0.0,
            cache_tokens=math.inf,
        )

    def learner(self, shape: ModelShape, num_workers: int) -> TrainingCost:
        """Communication between workers on one machine is left out."""
        assumed = Assumptions(pass_s=self.learner_pass_s, sequence_s=self.learner_sequence_s, update_s=0.0)
        links = Links(num_workers, math.inf, 0.0, 0.0)
        rates = self.learner_flops, self.learner_attention_flops
        return TrainingCost(
            shape, model_size(shape), links, Links(1, math.inf, 0.0, 0.0), *rates, math.inf, assumed, recomputes=False
        )


@dataclass(frozen=True)
class Prediction:
    """Steps of a run of one horizon: medians of what was measured and what was predicted for each."""

    run: str
    horizon: int
    steps: int
    trajectories: int
    gen_s: tuple[float, float]
    update_s: tuple[float, float]

    @property
    def step_s(self) -> tuple[float, float]:
        """Rollout and update together."""
        return self.gen_s[0] + self.update_s[0], self.gen_s[1] + self.update_s[1]


@dataclass(frozen=True)
class Validator:
    """Predicts steps of runs of one model."""

    shape: ModelShape
    clock: str
    num_workers: int = 1

    def rollout(self, step: MeasuredStep, machine: Machine) -> RolloutResult:
        return Rollout(
            step.scripts,
            machine.engine(self.shape),
            self.num_workers,
            servers=EnvServers(1, len(step.scripts)),  # How long a call waited is in what was measured of it.
            rules=_ENGINE,
            turn_s=Assumptions().collector_turn_s,
        ).run()

    def gen_s(self, result: RolloutResult) -> float:
        return max(result.busy_s) if self.clock == "cpu" else result.duration_s

    def update_s(self, step: MeasuredStep, machine: Machine) -> float:
        return self._passes(machine).run(step.scripts, trains=True).seconds

    def _passes(self, machine: Machine) -> Passes:
        return Passes(machine.learner(self.shape, self.num_workers), self.num_workers, Design(), _MAX_TOKENS)

    def calibrated(self, steps: Sequence[MeasuredStep]) -> Machine:
        """The machine that fits these steps best, by relative error."""
        machine = self._with_learner(Machine(2e-3, 1e-4, 1e10, 1e-2, 1e-3, 1e10, 1e10), steps)
        for _ in range(_ROUNDS):
            machine = self._with_engine(machine, steps)
        return machine

    def _with_engine(self, machine: Machine, steps: Sequence[MeasuredStep]) -> Machine:
        """With the engine's numbers fitted to the passes that were made with those before."""
        rows, targets = [], []
        for step in steps:
            result = self.rollout(step, machine)
            features = [result.passes, result.rows, result.flops]
            known = sum(f * n for f, n in zip(features, self._engine_numbers(machine), strict=True))
            # What the engine does not explain (collector, environments) stays as it was simulated.
            rows.append(features)
            targets.append(step.gen_s - (self.gen_s(result) * self.num_workers - known) / self.num_workers)
        scale = [step.gen_s for step in steps]
        pass_s, row_s, flop_s = fit(np.array(rows) / self.num_workers, np.array(targets), np.array(scale))
        return replace(machine, engine_pass_s=pass_s, engine_row_s=row_s, engine_flops=1 / flop_s)

    @staticmethod
    def _engine_numbers(machine: Machine) -> tuple[float, float, float]:
        return machine.engine_pass_s, machine.engine_row_s, 1 / machine.engine_flops

    def _with_learner(self, machine: Machine, steps: Sequence[MeasuredStep]) -> Machine:
        rows = []
        for step in steps:
            passes = self._passes(machine)
            works = [work for rank in passes.micro_batches(step.scripts) for work in rank]
            times, work = passes.cost.times(trains=True), sum(works, NO_WORK)
            flops = times * work.flops, times * work.attention_flops
            rows.append([2.0 * len(works), 2.0 * work.num_sequences, *flops])
        measured = np.array([step.update_s for step in steps])
        pass_s, sequence_s, *flop_s = fit(np.array(rows) / self.num_workers, measured, measured)
        return replace(
            machine,
            learner_pass_s=pass_s,
            learner_sequence_s=sequence_s,
            learner_flops=1 / flop_s[0],
            learner_attention_flops=1 / flop_s[1],
        )

    def predictions(self, run: str, steps: Iterable[MeasuredStep], machine: Machine) -> list[Prediction]:
        """By horizon."""
        by_horizon: dict[int, list[MeasuredStep]] = {}
        for step in steps:
            by_horizon.setdefault(step.horizon, []).append(step)
        return [self._prediction(run, horizon, found, machine) for horizon, found in sorted(by_horizon.items())]

    def _prediction(self, run: str, horizon: int, steps: Sequence[MeasuredStep], machine: Machine) -> Prediction:
        gen = [self.gen_s(self.rollout(step, machine)) for step in steps]
        update = [self.update_s(step, machine) for step in steps]
        return Prediction(
            run,
            horizon,
            len(steps),
            len(steps[0].scripts),
            (statistics.median(step.gen_s for step in steps), statistics.median(gen)),
            (statistics.median(step.update_s for step in steps), statistics.median(update)),
        )


def fit(features: np.ndarray, targets: np.ndarray, scale: np.ndarray) -> list[float]:
    """Weights, none below a trifle, of the columns of ``features [N, K]`` whose sum is closest to ``targets [N]``, each
    error over ``scale [N]``: least squares, without the columns that come out negative."""
    used = list(range(features.shape[1]))
    scaled = features / scale[:, None]
    while True:
        size = np.linalg.norm(scaled[:, used], axis=0)
        weights = np.linalg.lstsq(scaled[:, used] / size, targets / scale, rcond=None)[0] / size
        if (weights >= 0).all() or len(used) == 1:
            break
        used.pop(int(np.argmin(weights * size)))
    found = dict(zip(used, weights.tolist(), strict=True))
    return [max(found.get(column, 0.0), 1e-15) for column in range(features.shape[1])]


def error(measured_and_predicted: tuple[float, float]) -> float:
    """Relative."""
    measured, predicted = measured_and_predicted
    return predicted / measured - 1


def as_markdown(predictions: Sequence[tuple[Prediction, bool]]) -> str:
    """A table; True marks what was calibrated on."""
    columns = ["run", "horizon", "trajectories", "steps", "rollout s: measured", "predicted", "error"]
    columns += ["update s: measured", "predicted", "error", "both: error", "used to calibrate"]
    lines = [columns, ["---"] * len(columns)]
    for each, is_known in predictions:
        cells = [each.run, str(each.horizon), str(each.trajectories), str(each.steps)]
        for pair in (each.gen_s, each.update_s):
            cells += [f"{pair[0]:.2f}", f"{pair[1]:.2f}", f"{100 * error(pair):+.0f}%"]
        lines.append([*cells, f"{100 * error(each.step_s):+.0f}%", "yes" if is_known else ""])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def gathered(sources: Sequence[str], *, skip: int) -> dict[str, list[MeasuredStep]]:
    """Steps by the name of their run, which repeats of it share: ``[NAME=]FOLDER[@FIRST[:LAST]]``, by default the name
    of the folder and all steps but the first ``skip``."""
    found: dict[str, list[MeasuredStep]] = {}
    for source in sources:
        place, _, span = source.partition("@")
        name, _, folder = place.rpartition("=")
        first, _, last = span.partition(":")
        steps = read_run(Path(folder), first=int(first) if first else skip + 1, last=int(last) if last else None)
        found.setdefault(name or Path(folder).name, []).extend(steps)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model that the runs trained")
    source = "[NAME=]FOLDER[@FIRST:LAST]"
    parser.add_argument("--calibrate", nargs="+", required=True, metavar=source)
    parser.add_argument("--predict", nargs="+", required=True, metavar=source)
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu", help="what timing_s/... in the runs is")
    parser.add_argument("--calibrate-workers", type=int, default=1, help="of the runs that are calibrated on")
    parser.add_argument("--workers", type=int, default=1, help="of the runs that are predicted")
    parser.add_argument("--skip", type=int, default=1, help="first steps of each run, which warm everything up")
    parser.add_argument("--out", type=Path, help="file for the numbers")
    args = parser.parse_args()
    shape = shape_of(args.model)
    if shape is None:
        parser.error(f"--model {args.model}: no known architecture")
    known = gathered(args.calibrate, skip=args.skip)
    calibrating = Validator(shape, args.clock, args.calibrate_workers)
    machine = calibrating.calibrated([step for steps in known.values() for step in steps])
    predicting = Validator(shape, args.clock, args.workers)
    found = [
        (prediction, name in known and (name, prediction.horizon) in {(n, s.horizon) for n in known for s in known[n]})
        for name, steps in gathered(args.predict, skip=args.skip).items()
        for prediction in predicting.predictions(name, steps, machine)
    ]
    print(as_markdown(found))
    print("\n" + ", ".join(f"{name} {value:.3g}" for name, value in asdict(machine).items()))
    if args.out:
        numbers = {"machine": asdict(machine), "predictions": [asdict(each) | {"known": k} for each, k in found]}
        args.out.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
