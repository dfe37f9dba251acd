"""What the learner costs, as ratios within one run.

``python scripts/bench/train.py [--only packing sharing logits small outside] [--trl-python PYTHON]``

* ``packing``: long-tailed lengths (median 500, at most 8,000) packed, against rows padded to the longest: tokens per
  second, after checking that the gradients are the same.
* ``sharing``: groups of eight whose prompt is 40% of each trajectory, with what they have in common computed once and
  with whole sequences: tokens per second, after checking that the gradients are the same.
* ``logits``: log-probs of 8,000 tokens over 50,000 words in chunks, against all logits at once: peak memory above what
  the process held before (each in a process of its own), and time.
* ``small``: a whole training step on the letters (`letters`) against a plain PyTorch loop (`plain_loop`), step by step
  in turn, from the same model with the same settings; and how long the policy takes from .4 to .95, from a model of
  each of three seeds. With ``--trl-python``, an interpreter that has TRL and this project, also against TRL's GRPO
  (`trl_letters`), in turn as well though in a process of its own, in CPU time.
* ``outside``: what a step of the quickstart's size spends outside the model (batches, dispatch, packing, advantages,
  logs), as a share of that and the update, medians of several steps; generation, which would make the share smaller,
  is left out.

One thread. Axes: ``B`` sequences, ``T`` tokens, ``S`` loss tokens, ``D`` hidden size.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import bench
import letters
import numpy as np
import torch
from bench import Result
from plain_loop import PlainLoop
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl_loop import StepTimes, TRLLoop, python_with_trl

from agentgym_rl.rollout.log import TrajectoryLog
from agentgym_rl.rollout.statistics import rollout_metrics
from agentgym_rl.types import (
    FinishReason,
    Item,
    Message,
    Role,
    StopReason,
    Trajectory,
    Turn,
)
from verl.agent_trainer.loading import load_config, parse_command_line
from verl.config import ActorConfig, AlgorithmConfig, ModelConfig, OptimConfig, PPOConfig
from verl.models.attention import PACKED_ATTENTION
from verl.models.log_probs import token_log_probs
from verl.models.policy import PolicyModule
from verl.protocol import DataProto
from verl.trainer import ppo
from verl.trainer.core_algos import BatchTotals, compute_advantages
from verl.trainer.metrics import advantage_metrics, group_metrics
from verl.trainer.mini_batches import mini_batch_rows, share_mini_batch
from verl.utils.balancing import balanced_partition
from verl.workers.actor import Actor

HERE = Path(__file__).resolve().parent


# ------------------------------------------------------------------------------------------------------------- packing

MEDIAN, LONGEST, NUM_SEQUENCES = 500, 8000, 16


def packing() -> Iterator[Result]:
    """Packed rows against padded ones."""
    lengths = long_tail(NUM_SEQUENCES)
    batch = random_batch(lengths, vocab_size=260)
    model = small_model(vocab_size=260)
    packed_s, packed = timed(lambda: gradients(PolicyModule(model), lambda module: module(batch)[0].sum()))
    model.set_attn_implementation("sdpa")
    padded_s, padded = timed(lambda: padded_gradients(model, batch))
    assert_same_gradients(packed, padded)
    print(
        f"lengths: {sorted(lengths)}: {batch.num_tokens} tokens, {NUM_SEQUENCES * max(lengths)} padded; same gradients"
    )
    speeds = f"{batch.num_tokens / packed_s:,.0f} against {batch.num_tokens / padded_s:,.0f} tokens/s"
    what = "training on packed rows over padded ones, long-tailed lengths, tokens/s"
    yield Result("packing", what, padded_s / packed_s, "x", 2.5, at_least=True, note=speeds)


def assert_same_gradients(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, gradient in one.items():
        scale = float(other[name].abs().max()) + 1e-6
        assert float((gradient - other[name]).abs().max()) < 1e-3 * scale, name


def long_tail(count: int) -> list[int]:
    """The quantiles of a log-normal distribution, the last of them cut to `LONGEST`."""
    levels = (torch.arange(count - 1) + 0.5) / (count - 1)
    normal = torch.distributions.Normal(0.0, 1.0).icdf(levels)
    return [*(min(int(length), LONGEST) for length in (MEDIAN * normal.exp()).tolist()), LONGEST]


def small_model(*, vocab_size: int, hidden_size: int = 64) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 5 // 2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        attn_implementation=PACKED_ATTENTION,
    )
    return Qwen2ForCausalLM(config).float()


def random_batch(lengths: Sequence[int], *, vocab_size: int) -> DataProto:
    """Sequences of which the last nine tenths are sampled."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]
    return DataProto.from_sequences(ids, [[int(place > length // 10) for place in range(length)] for length in lengths])


def gradients(module: torch.nn.Module, loss: Callable[[torch.nn.Module], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients by name, each divided by the number of loss tokens at most."""
    module.zero_grad()
    loss(module).backward()
    return {
        name.removeprefix("model."): parameter.grad.clone()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def padded_gradients(model: Qwen2ForCausalLM, batch: DataProto) -> dict[str, torch.Tensor]:
    """The same sum of log-probs over rows padded on the right to the longest, four at a time.

    Nothing behind a token is seen by it, so padding on the right needs no mask: the fastest way to pad. The output
    layer runs at the loss tokens only, as it does for packed rows.
    """
    model.zero_grad()
    rows = batch.input_ids_T.split(batch.lengths_B.tolist())
    masks = batch.loss_mask_T.split(batch.lengths_B.tolist())
    width = max(map(len, rows))
    for first in range(0, len(rows), 4):
        ids_BT = torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows[first : first + 4]])
        mask_BT = torch.stack([torch.nn.functional.pad(m, (0, width - len(m))) for m in masks[first : first + 4]])
        hidden_BTD = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
        before_BT = torch.nn.functional.pad(mask_BT[:, 1:], (0, 1))
        log_probs_S, _ = token_log_probs(hidden_BTD[before_BT], model.lm_head.weight, ids_BT[mask_BT])
        log_probs_S.sum().backward()
    return {
        name.removeprefix("model."): parameter.grad.clone()
        for name, parameter in PolicyModule(model).named_parameters()
        if parameter.grad is not None
    }


def timed(function: Callable[[], dict[str, torch.Tensor]]) -> tuple[float, dict[str, torch.Tensor]]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


# ------------------------------------------------------------------------------------------------------------- sharing

SHARED_GROUPS, PROMPT, OWN_TOKENS = 4, 400, (500, 540, 580, 600, 620, 640, 680, 720)


def sharing() -> Iterator[Result]:
    """Groups with a common prompt, which is computed once or for each member."""
    lengths = [PROMPT + own for _ in range(SHARED_GROUPS) for own in OWN_TOKENS]
    batch = random_batch(lengths, vocab_size=260)
    for first in range(0, len(lengths), len(OWN_TOKENS)):
        for member in range(first, first + len(OWN_TOKENS)):
            start, prompt = batch.offsets_B1[member], batch.offsets_B1[first]
            batch.input_ids_T[start : start + PROMPT] = batch.input_ids_T[prompt : prompt + PROMPT]
            batch.group_ids_B[member] = first
    # Attention is not spared, and is most of the work of a model much smaller than this one.
    module = PolicyModule(small_model(vocab_size=260, hidden_size=256))
    runs: dict[bool, list[tuple[float, dict[str, torch.Tensor]]]] = {True: [], False: []}
    for _ in range(3):
        for shares, results in runs.items():
            module.shares_prefixes = shares
            results.append(timed(lambda: gradients(module, lambda module: module(batch)[0].sum())))
    assert_same_gradients(runs[True][0][1], runs[False][0][1])
    shared_s, whole_s = (min(seconds for seconds, _ in results) for results in runs.values())
    what = "training with the prompts of groups computed once over each time, tokens/s"
    speeds = f"{batch.num_tokens / shared_s:,.0f} against {batch.num_tokens / whole_s:,.0f} tokens/s"
    yield Result("sharing", what, whole_s / shared_s, "x", 1.2, at_least=True, note=speeds)


# -------------------------------------------------------------------------------------------------------------- logits

LOGIT_TOKENS, LOGIT_WORDS, LOGIT_SIZE, LOGIT_REPEATS = 8000, 50_000, 128, 3


def logits() -> Iterator[Result]:
    """Log-probs in chunks against all logits at once, each in a process of its own, in turn."""
    runs: dict[str, list[dict[str, float]]] = {"chunks": [], "whole": []}
    for _ in range(LOGIT_REPEATS):
        for way, results in runs.items():
            results.append(json.loads(run_python(sys.executable, HERE / "train.py", "--logits", way)))
    seconds = {way: min(each["seconds"] for each in results) for way, results in runs.items()}
    memory = {way: max(each["mib"] for each in results) for way, results in runs.items()}
    what = f"log-probs of {LOGIT_TOKENS:,} tokens, {LOGIT_WORDS:,} words, in chunks over all at once"
    sizes = f"{memory['chunks']:,.0f} against {memory['whole']:,.0f} MiB"
    yield Result("logits_memory", f"{what}: peak memory", memory["chunks"] / memory["whole"], "x", 1 / 8, note=sizes)
    times = f"{seconds['chunks']:.2f} against {seconds['whole']:.2f} s"
    yield Result("logits_time", "the same: time", seconds["chunks"] / seconds["whole"], "x", 1.1, note=times)


@torch.no_grad()
def measure_logits(way: str) -> dict[str, float]:
    """Seconds, and MiB above what the process held before, of one way."""
    generator = torch.Generator().manual_seed(0)
    hidden_SD = torch.randn(LOGIT_TOKENS, LOGIT_SIZE, generator=generator)
    head_VD = torch.randn(LOGIT_WORDS, LOGIT_SIZE, generator=generator)
    ids_S = torch.randint(0, LOGIT_WORDS, (LOGIT_TOKENS,), generator=generator)
    token_log_probs(hidden_SD[:8], head_VD, ids_S[:8])
    forget_peak()
    before, start = peak_mib(), time.perf_counter()
    if way == "chunks":
        log_probs_S, _ = token_log_probs(hidden_SD, head_VD, ids_S)
    else:
        log_probs_S = (hidden_SD @ head_VD.T).log_softmax(-1).gather(-1, ids_S[:, None])[:, 0]
    seconds = time.perf_counter() - start
    assert torch.isfinite(log_probs_S).all()
    return {"seconds": seconds, "mib": peak_mib() - before}


def peak_mib() -> float:
    """Most memory that this process has held. Linux hands the resource usage of a parent on, but not this."""
    status = Path("/proc/self/status")
    if status.exists():
        [line] = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) / 2**10
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def forget_peak() -> None:
    """From now on `peak_mib` is of what is held from now on, where the system can."""
    if (control := Path("/proc/self/clear_refs")).exists():
        control.write_text("5")


def run_python(python: str, *arguments: object) -> str:
    """What a program prints on its last line."""
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "HF_HUB_OFFLINE": "1"}
    command = [python, *map(str, arguments)]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return run.stdout.strip().splitlines()[-1]


# --------------------------------------------------------------------------------------------------------------- small

ITEMS_PER_STEP, GROUP, SMALL_STEPS, LEARNED = 16, 8, 60, 0.95
LEARNING_RATE, ENTROPY_COEFF = 2e-3, 0.1
"""With a bonus of .01 or .03 one of the seeds that were tried settled on one letter, whatever is shown."""
LEARNING_SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Times:
    """What each of several steps took."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    """Of all threads of the process that made the steps."""

    @contextmanager
    def measure(self) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.add(StepTimes(time.perf_counter() - wall, time.process_time() - cpu))

    def add(self, step: StepTimes) -> None:
        self.wall_s.append(step.wall_s)
        self.cpu_s.append(step.cpu_s)


@dataclass(frozen=True)
class Run:
    """A training run on the letters; lists have an entry per step."""

    ours: Times
    plain: Times
    """Of the plain loop's step before each of ours; empty without."""
    trl: Times
    """Of TRL's step before each of ours; empty without."""
    scores: list[float]
    plain_scores: list[float]

    @property
    def steps_to_learn(self) -> int | None:
        """Steps until the score was `LEARNED` for the first time."""
        return next((step for step, score in enumerate(self.scores, 1) if score >= LEARNED), None)

    def seconds_to_learn(self) -> tuple[float, float]:
        """Training time for these steps, by the wall and of the CPU."""
        steps = self.steps_to_learn
        if steps is None:
            return float("inf"), float("inf")
        return sum(self.ours.wall_s[:steps]), sum(self.ours.cpu_s[:steps])


def small(trl_python: str | None) -> Iterator[Result]:
    """A training step on the letters against the plain loop and TRL, and how fast it learns."""
    letters.register_task()
    runs = []
    with tempfile.TemporaryDirectory() as name:
        for seed in LEARNING_SEEDS:
            model, out = letters.save_model(Path(name) / f"model{seed}", seed=seed), Path(name) / f"out{seed}"
            if seed == LEARNING_SEEDS[0]:
                runs.append(train_beside(model, out, seed=seed, trl_python=trl_python))
            else:
                runs.append(train_letters(model, out, seed=seed))
            print(f"seed {seed}, score every fourth step: {curve(runs[-1].scores)}")
    print(f"the plain loop's with seed {LEARNING_SEEDS[0]}: {curve(runs[0].plain_scores)}")
    ours, plain = runs[0].ours, runs[0].plain
    yield time_ratio("plain", "training step of a 100k-parameter model over a plain loop's", ours, plain, wanted=1.5)
    for seed, run in zip(LEARNING_SEEDS, runs, strict=True):
        wall_s, cpu_s = run.seconds_to_learn()
        what = f"the same model learns from {run.scores[0]:.2f} to {LEARNED}, seed {seed}"
        steps = f"{run.steps_to_learn} steps, {cpu_s:.0f} s of the CPU"
        yield Result(f"learns_{seed}", what, wall_s, "s", 60.0, note=steps)
    if not runs[0].trl.cpu_s:
        print("training step over TRL's: not measured, --trl-python names no interpreter that has TRL")
    else:
        what = "training step of a 100k-parameter model over TRL's GRPO, CPU time"
        yield time_ratio("trl", what, ours, runs[0].trl, wanted=0.5, of_cpu=True)


def train_beside(model: Path, out: Path, *, seed: int, trl_python: str | None) -> Run:
    """`train_letters` with the plain loop and TRL, where there is an interpreter for it."""
    plain = PlainLoop(model, lr=LEARNING_RATE, entropy_coeff=ENTROPY_COEFF)
    with TRLLoop.of(trl_python, model, steps=SMALL_STEPS) if trl_python else nullcontext() as trl:
        return train_letters(model, out, seed=seed, plain=plain, trl=trl)


def train_letters(
    model: Path, out: Path, *, seed: int, plain: PlainLoop | None = None, trl: TRLLoop | None = None
) -> Run:
    """`SMALL_STEPS` steps; before each one of the others, so that all meet the same load."""
    torch.manual_seed(seed)
    run = Run(Times(), Times(), Times(), [], [])

    class Watched(ppo.PPOTrainer):
        def train_step(self, step: int) -> dict[str, float]:
            if plain is not None:
                with run.plain.measure():
                    items = range(step * ITEMS_PER_STEP, (step + 1) * ITEMS_PER_STEP)
                    run.plain_scores.append(plain.step(items, GROUP))
            if trl is not None:
                run.trl.add(trl.step())
            with run.ours.measure():
                metrics = super().train_step(step)
            run.scores.append(metrics["rollout/score_mean"])
            return metrics

    with patch.object(ppo, "PPOTrainer", Watched):
        items = [Item(letters.TASK, index) for index in range(10_000)]
        ppo.run_ppo(small_config(model, out, seed=seed), train_items=items, val_items=[])
    return run


def curve(scores: Sequence[float]) -> str:
    return " ".join(f"{score:.2f}" for score in scores[::4])


def time_ratio(name: str, what: str, ours: Times, theirs: Times, *, wanted: float, of_cpu: bool = False) -> Result:
    """Of the median steps' wall time, or ``of_cpu`` of their CPU time. Both are noted."""
    ours_s, theirs_s = statistics.median(ours.wall_s), statistics.median(theirs.wall_s)
    ours_cpu_s, theirs_cpu_s = statistics.median(ours.cpu_s), statistics.median(theirs.cpu_s)
    times = (
        f"{ours_s * 1e3:.0f} against {theirs_s * 1e3:.0f} ms; "
        f"of the CPU {ours_cpu_s * 1e3:.0f} against {theirs_cpu_s * 1e3:.0f} ms"
    )
    return Result(name, what, ours_cpu_s / theirs_cpu_s if of_cpu else ours_s / theirs_s, "x", wanted, note=times)


def small_config(model: Path, out: Path, *, seed: int) -> PPOConfig:
    branch = "actor_rollout_ref"
    overrides = [
        "data.train_file=unused",
        f"data.train_batch_size={ITEMS_PER_STEP}",
        "data.max_response_length=200",
        f"{branch}.model.path={model}",
        f"{branch}.agentgym.task_name={letters.TASK}",
        f"{branch}.agentgym.env_addr=http://127.0.0.1:9",  # nobody calls it
        f"{branch}.agentgym.agent=act",
        f"{branch}.actor.ppo_mini_batch_size={ITEMS_PER_STEP}",
        f"{branch}.actor.optim.lr={LEARNING_RATE}",
        f"{branch}.actor.entropy_coeff={ENTROPY_COEFF}",
        f"{branch}.rollout.name=hf",
        f"{branch}.rollout.max_tokens=1",
        f"{branch}.rollout.n={GROUP}",
        f"algorithm.rounds_ctrl.rounds={letters.TURNS}",
        "trainer.logger=[jsonl]",
        "trainer.device=cpu",
        "trainer.worker_group=local",
        "trainer.num_threads=1",
        f"trainer.seed={seed}",
        f"data.seed={seed}",
        f"trainer.total_training_steps={SMALL_STEPS}",
        f"trainer.default_local_dir={out}",
    ]
    return load_config(PPOConfig, parse_command_line(overrides, program="bench", config_name="ppo_trainer"))


# ------------------------------------------------------------------------------------------------------------- outside

STEP_TRAJECTORIES, STEP_GROUP, STEP_TURNS, STEP_WORKERS = 192, 8, 6, 2
STEPS = 5
"""Steps that are measured. The median counts: one that the machine held up says nothing about the code."""


def outside() -> Iterator[Result]:
    """The driver's work for a step of the quickstart's size against the update itself."""
    trajectories = [make_trajectory(index) for index in range(STEP_TRAJECTORIES)]
    with tempfile.TemporaryDirectory() as name:
        model = small_model(vocab_size=300)
        model.save_pretrained(Path(name) / "model")
        letters.make_tokenizer().save_pretrained(Path(name) / "model")
        actor = Actor(
            ModelConfig(path=str(Path(name) / "model")),
            ActorConfig(optim=OptimConfig(lr=1e-5)),
            device="cpu",
            temperature=1.0,
            total_updates=100,
            loss_norm_constant=1.0,
        )
        steps = [time_step(actor, trajectories, Path(name) / "log.jsonl") for _ in range(STEPS)]
    outside_s, update_s = (statistics.median(seconds) for seconds in zip(*steps, strict=True))
    yield Result(
        "outside",
        "outside the model, of a step of the quickstart's size without generation",
        100 * outside_s / (outside_s + update_s),
        "%",
        5,
        note=f"{outside_s * 1e3:.0f} ms beside updates of {update_s * 1e3:,.0f} ms",
    )


def time_step(actor: Actor, trajectories: list[Trajectory], log_path: Path) -> tuple[float, float]:
    """Seconds of a step that the driver works, and of the update."""
    start = time.perf_counter()
    with TrajectoryLog(log_path, append=False) as log:
        for trajectory in trajectories:
            log.write(trajectory)
    shares = prepare(pickle.loads(pickle.dumps(trajectories, protocol=5)))
    packs = [actor.packed.micro_batches(share) for share, _ in shares]
    for (share, _), packed in zip(shares, packs, strict=True):
        for indices in packed:
            share.select(indices)
    outside_s = time.perf_counter() - start
    start = time.perf_counter()
    for share, totals in shares:
        actor.update([share], [totals])
    return outside_s, time.perf_counter() - start


def prepare(trajectories: list[Trajectory]) -> list[tuple[DataProto, BatchTotals]]:
    """From trajectories to what the workers update on, metrics included."""
    batch = compute_advantages(DataProto.from_trajectories(trajectories), AlgorithmConfig())
    _ = rollout_metrics(trajectories) | group_metrics(trajectories) | advantage_metrics(batch)
    uids = [trajectory.uid for trajectory in trajectories]
    groups = list(dict.fromkeys(uids))
    rows = mini_batch_rows(uids, groups, groups=len(groups), epochs=1, shuffle=False, seed=0)
    balanced_partition(batch.lengths_B.tolist(), STEP_WORKERS)
    shared = [share_mini_batch(batch.select(mini_batch), STEP_WORKERS) for mini_batch in rows]
    sent = [(share, each.totals) for each in shared for share in each.shares]
    return pickle.loads(pickle.dumps(sent, protocol=5))


def make_trajectory(index: int) -> Trajectory:
    """Six turns of 20 sampled tokens behind observations of 50, after a prompt of 150: the quickstart's size."""
    draw = np.random.default_rng(index)
    length = 150 + STEP_TURNS * 70
    column = np.arange(length) - 150
    mask = ((column >= 0) & (column % 70 < 20)).astype(np.int8)
    score = float(draw.integers(0, 2))
    rewards = np.zeros(length, np.float32)
    rewards[np.flatnonzero(mask)[-1]] = score
    turn = Turn("Action: get 1 oak log", "Got 1 oak log", 0.0, False, FinishReason.STOP, 20, 0.1, 0.01)
    return Trajectory(
        item=Item("bench", index // STEP_GROUP),
        uid=f"step1/bench_{index // STEP_GROUP}",
        sample_index=index % STEP_GROUP,
        attempt=1,
        messages=(Message(Role.USER, "start"), *[Message(Role.ASSISTANT, "Action: get 1 oak log")] * STEP_TURNS),
        turns=(turn,) * STEP_TURNS,
        input_ids=draw.integers(0, 260, length).astype(np.int32),
        loss_mask=mask,
        sequence_ids=np.maximum(column // 70 + 1, 0).astype(np.int32),
        rollout_log_probs=np.where(mask, -draw.random(length), 0).astype(np.float32),
        token_rewards=rewards,
        prompt_length=150,
        score=score,
        success=score > 0,
        stop_reason=StopReason.DONE,
        policy_version=1,
        max_rounds=STEP_TURNS,
        duration_s=1.0,
    )


# ---------------------------------------------------------------------------------------------------------- the program


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Result]]] = {
    "packing": lambda _: packing(),
    "sharing": lambda _: sharing(),
    "logits": lambda _: logits(),
    "small": lambda options: small(options.trl_python),
    "outside": lambda _: outside(),
}


def measure(options: argparse.Namespace) -> Iterator[Result]:
    torch.set_num_threads(1)
    for name in options.only:
        yield from PARTS[name](options)


def main(arguments: Sequence[str] | None = None) -> int:
    if arguments is None and sys.argv[1:2] == ["--logits"]:
        torch.set_num_threads(1)
        print(json.dumps(measure_logits(sys.argv[2])))
        return 0
    parser = argparse.ArgumentParser(description="Ratios of the learner's cost")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--trl-python", type=python_with_trl, help="an interpreter that has TRL and this project")
    return bench.run("train", measure, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
