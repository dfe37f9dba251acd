"""What the experiments are: per suite a task, and runs as lists of commands, which are the project's own programs.

A suite's runs share a warm-up per seed: data, base model, and supervised training on expert play that stops early.
Every other run of that seed begins with the warm-up's model and is evaluated on the same held-out items, so that runs
of one seed differ by what is compared alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

WARM_UP = "warm-up"
"""The run that all others of a seed start from."""


class Kind(StrEnum):
    """What a command is for; times are told apart by it."""

    PREPARE = "prepare"
    TRAIN = "train"
    EVALUATE = "evaluate"


@dataclass(frozen=True)
class Command:
    """One program of a run. In ``argv``, ``{url}`` is the environment's server."""

    kind: Kind
    argv: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """One training and its evaluation."""

    name: str
    """What it is, without its seed: a row of the tables."""
    seed: int
    folder: Path
    commands: tuple[Command, ...]
    evaluation: Path
    """Where its ``report.json`` on the held-out items is."""
    training: Path | None = None
    """Where its ``metrics.jsonl`` is, for RL."""


@dataclass(frozen=True)
class Suite:
    """A task at the size of the experiment."""

    task: str
    agent: str
    long: int
    """Turns of the longest horizon; evaluations run under it."""
    stages: tuple[int, ...]
    """Horizons of ScalingInter-RL; the first is also the fixed short one."""
    steps: int
    """Training steps of a run of RL."""
    items_per_step: int
    group: int
    """Trajectories of an item in a step."""
    learning_rate: float
    warm_up_steps: int
    samples: int
    """Trajectories of each held-out item in an evaluation."""
    test_freq: int
    """Training steps between validations on the held-out items, with as many samples as `val_samples`."""
    val_samples: int
    max_tokens: int
    prompt_length: int
    response_length: int
    prepare: tuple[tuple[str, ...], ...]
    """Commands that make ``{data}/train.json``, ``{data}/eval``, ``{data}/demonstrations.jsonl`` and ``{base}``."""
    algorithms: tuple[str, ...] = ()
    """Estimators beside GRPO, each trained with the growing horizon."""
    horizons: tuple[str, ...] = ("short", "long")
    """Fixed horizons to compare with the growing one."""
    on_data: bool = True
    """Also DPO, AgentEvol, and supervised training for as long as AgentEvol's."""
    explored: str = "train.json"
    """The training items that DPO and AgentEvol sample, below ``{data}``."""
    pair_length: int = 320
    """Tokens that DPO sees of a trajectory. A failure goes on until its turns are used up, with the same mistake."""
    warm_up_rate: float = 2e-3
    warm_up_batch: int = 16
    timeout: int = 600
    """Seconds that a trajectory may take."""
    frozen: tuple[str, ...] = ()
    """Weights that stay as they are, by name."""
    seeds: tuple[int, ...] = (0, 1, 2)


PYTHON = "python"
MAIN = (PYTHON, "-m")
LOCAL = ("trainer.device=cpu", "trainer.worker_group=local", "trainer.num_threads=1")

TEXTCRAFT = Suite(
    task="textcraft",
    agent="act",
    long=10,
    stages=(3, 6, 10),
    steps=36,
    items_per_step=16,
    group=8,
    learning_rate=5e-4,
    warm_up_steps=320,
    samples=8,
    test_freq=6,
    val_samples=4,
    max_tokens=48,
    prompt_length=1024,
    response_length=1024,
    prepare=(
        (PYTHON, "examples/quickstart/pick_items.py", "--depths", "1", "--worlds", "4", "--out", "{data}"),
        (PYTHON, "examples/quickstart/pick_items.py", "--depths", "1", "2", "--out", "{data}/warm-up"),
        (
            *(PYTHON, "examples/quickstart/make_demonstrations.py", "--train-file", "{data}/warm-up/train.json"),
            *("--out", "{data}/demonstrations.jsonl", "--seed", "{seed}"),
        ),
        (
            *(PYTHON, "examples/quickstart/make_model.py", "--train-file", "{data}/warm-up/train.json"),
            *("--out", "{base}", "--seed", "{seed}"),
        ),
    ),
    algorithms=("gae", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "gigpo"),
)

BABYAI = Suite(
    task="babyai",
    agent="act",
    long=12,
    stages=(4, 8, 12),
    steps=30,
    items_per_step=8,
    group=8,
    learning_rate=3e-4,
    warm_up_steps=300,
    samples=4,
    test_freq=10,
    val_samples=1,
    max_tokens=24,
    prompt_length=1024,
    response_length=3072,
    prepare=(
        (PYTHON, "scripts/experiments/babyai_items.py", "--out", "{data}"),
        (
            *("agentgym-rl", "demonstrate", "babyai", "--items", "{data}/train.json"),
            *("--out", "{data}/demonstrations.jsonl", "--agent", "act"),
        ),
        (
            *(PYTHON, "examples/quickstart/make_model.py", "--task", "babyai", "--train-file", "{data}/train.json"),
            *("--out", "{base}", "--seed", "{seed}"),
        ),
    ),
    algorithms=("gae",),
    explored="explore.json",
    pair_length=1536,
)

SMOLLM2 = Suite(
    task="textcraft",
    agent="act",
    long=8,
    stages=(3, 5, 8),
    steps=24,
    items_per_step=4,
    group=8,
    learning_rate=5e-5,
    warm_up_steps=24,
    samples=4,
    test_freq=8,
    val_samples=1,
    max_tokens=32,
    prompt_length=1024,
    response_length=1024,
    prepare=(
        (PYTHON, "examples/quickstart/pick_items.py", "--depths", "1", "--out", "{data}"),
        (
            *("agentgym-rl", "demonstrate", "textcraft", "--items", "{data}/train.json"),
            *("--out", "{data}/demonstrations.jsonl", "--agent", "act"),
        ),
        (PYTHON, "scripts/smollm2.py", "--out", "{base}"),
    ),
    horizons=(),
    on_data=False,
    timeout=3600,
    warm_up_rate=1e-4,
    warm_up_batch=8,
    # The upper third learns; through the rest no gradient has to pass.
    frozen=("model.embed_tokens.*", "model.layers.?.*", "model.layers.1?.*"),
    seeds=(0,),
)

SUITES = {"textcraft": TEXTCRAFT, "babyai": BABYAI, "smollm2": SMOLLM2}
"""By the name of their results."""


def runs(suite: Suite, out: Path, seeds: Sequence[int]) -> list[Run]:
    """All runs of a suite, those that others need first."""
    return [warm_up(suite, out, seed) for seed in seeds] + [
        run for seed in seeds for run in (*_on_rollouts(suite, out, seed), *_on_data(suite, out, seed))
    ]


def warm_up(suite: Suite, out: Path, seed: int) -> Run:
    """Data, base model and supervised training of a seed."""
    folder = _folder(out, seed, WARM_UP)
    places = {"data": str(folder / "data"), "base": str(folder / "base"), "seed": str(seed)}
    prepare = [Command(Kind.PREPARE, tuple(_filled(part, places) for part in argv)) for argv in suite.prepare]
    return Run(
        WARM_UP,
        seed,
        folder,
        (
            *prepare,
            _sft(suite, folder, folder / "base", suite.warm_up_steps, suite.warm_up_rate, folder, seed),
            _evaluate(suite, folder, seed),
        ),
        folder / "eval",
    )


def _on_rollouts(suite: Suite, out: Path, seed: int) -> list[Run]:
    staged = ("scaling_inter_stepwise", f"[{','.join(map(str, suite.stages))}]")
    fixed = {"short": ("fixed", str(suite.stages[0])), "long": ("fixed", str(suite.long))}
    return [
        _rl(suite, out, seed, "grpo", "grpo", *staged),
        *(_rl(suite, out, seed, f"grpo, {name} horizon", "grpo", *fixed[name]) for name in suite.horizons),
        *(_rl(suite, out, seed, estimator, estimator, *staged) for estimator in suite.algorithms),
    ]


def _rl(suite: Suite, out: Path, seed: int, name: str, estimator: str, schedule: str, rounds: str) -> Run:
    folder, start = _folder(out, seed, name), _folder(out, seed, WARM_UP)
    keys = [
        f"algorithm.adv_estimator={estimator}",
        f"algorithm.rounds_ctrl.type={schedule}",
        f"algorithm.rounds_ctrl.rounds={rounds}",
        f"algorithm.rounds_ctrl.steps_scaling_inter={suite.steps // len(suite.stages)}",
        f"algorithm.rounds_ctrl.val_rounds={suite.long}",
        f"data.train_file={start / 'data' / 'train.json'}",
        f"data.val_file={start / 'data' / 'eval'}",
        f"data.train_batch_size={suite.items_per_step}",
        f"data.seed={seed}",
        *_lengths(suite),
        f"actor_rollout_ref.agentgym.task_name={suite.task}",
        "actor_rollout_ref.agentgym.env_addr={url}",
        f"actor_rollout_ref.agentgym.agent={suite.agent}",
        f"actor_rollout_ref.agentgym.timeout={suite.timeout}",
        f"actor_rollout_ref.model.path={start / 'sft' / 'huggingface'}",
        f"actor_rollout_ref.rollout.n={suite.group}",
        f"actor_rollout_ref.rollout.max_tokens={suite.max_tokens}",
        f"actor_rollout_ref.rollout.max_model_len={suite.prompt_length + suite.response_length}",
        f"actor_rollout_ref.rollout.val_kwargs.n={suite.val_samples}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={suite.items_per_step}",
        f"actor_rollout_ref.actor.optim.lr={suite.learning_rate}",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
        f"trainer.total_training_steps={suite.steps}",
        f"trainer.test_freq={suite.test_freq}",
        "trainer.val_before_train=True",
        f"trainer.seed={seed}",
        f"trainer.default_local_dir={folder / 'rl'}",
        "trainer.token_values=none",
        "trainer.logger=[jsonl]",
        *(("critic.optim.lr=1e-3",) if estimator == "gae" else ()),
        *_frozen(suite, "actor_rollout_ref.model"),
    ]
    model = folder / "rl" / f"global_step_{suite.steps}" / "actor" / "huggingface"
    train = Command(Kind.TRAIN, (*MAIN, "verl.agent_trainer.main_ppo", *keys, *LOCAL))
    return Run(name, seed, folder, (train, _evaluate(suite, folder, seed, model)), folder / "eval", folder / "rl")


def _on_data(suite: Suite, out: Path, seed: int) -> list[Run]:
    if not suite.on_data:
        return []
    return [_dpo(suite, out, seed), _agentevol(suite, out, seed), _more_sft(suite, out, seed)]


def _dpo(suite: Suite, out: Path, seed: int) -> Run:
    """Pairs of what the warm-up's model itself sampled on the training items."""
    folder, start = _folder(out, seed, "dpo"), _folder(out, seed, WARM_UP)
    sampled = _generate(
        suite, start / "sft" / "huggingface", start / "data" / suite.explored, folder / "samples", seed, n=4
    )
    pairs = (
        "agentgym-rl",
        "make-pairs",
        str(folder / "samples"),
        "--per-item",
        "4",
        "--out",
        str(folder / "pairs.jsonl"),
    )
    train = (
        *(*MAIN, "verl.agent_trainer.main_dpo", f"model.path={start / 'sft' / 'huggingface'}"),
        *(f"data.train_file={folder / 'pairs.jsonl'}", "data.train_batch_size=32", f"data.seed={seed}"),
        *(
            f"data.max_length={suite.pair_length}",
            "data.truncation=right",
            "algorithm.loss_type=hinge",
            "algorithm.beta=0.5",
        ),
        *("optim.lr=3e-5", "trainer.total_training_steps=30", f"trainer.default_local_dir={folder / 'dpo'}"),
        *(f"trainer.seed={seed}", *LOCAL),
    )
    commands = (Command(Kind.TRAIN, sampled), Command(Kind.TRAIN, pairs), Command(Kind.TRAIN, train))
    return Run(
        "dpo",
        seed,
        folder,
        (*commands, _evaluate(suite, folder, seed, folder / "dpo" / "huggingface")),
        folder / "eval",
    )


EVOL_ITERATIONS, EVOL_STEPS, EVOL_BASE_ROWS = 2, 70, 1000


def _agentevol(suite: Suite, out: Path, seed: int) -> Run:
    """Two rounds of exploring the training items and training on what succeeded, merged with demonstrations."""
    folder, start = _folder(out, seed, "agentevol"), _folder(out, seed, WARM_UP)
    train = (
        *(*MAIN, "verl.agent_trainer.main_agentevol", f"model.path={start / 'sft' / 'huggingface'}"),
        *(
            f"algorithm.first_policy={start / 'sft' / 'huggingface'}",
            "algorithm.train_from=last",
            "algorithm.explored=all",
        ),
        *(f"algorithm.iterations={EVOL_ITERATIONS}", f"data.base_file={start / 'data' / 'demonstrations.jsonl'}"),
        *(f"data.train_file={start / 'data' / suite.explored}", "data.train_batch_size=16", f"data.seed={seed}"),
        *(f"data.val_file={start / 'data' / 'eval'}", "rollout.val_kwargs.n=1"),
        *("optim.lr=5e-4", "rollout.n=4", f"trainer.total_training_steps={EVOL_STEPS}"),
        *(f"trainer.default_local_dir={folder / 'agentevol'}", f"trainer.seed={seed}", *_play(suite), *LOCAL),
    )
    model = folder / "agentevol" / f"iteration_{EVOL_ITERATIONS}" / "sft" / "huggingface"
    commands = (Command(Kind.TRAIN, train), _evaluate(suite, folder, seed, model))
    return Run("agentevol", seed, folder, commands, folder / "eval")


def _more_sft(suite: Suite, out: Path, seed: int) -> Run:
    """As many further steps on demonstrations alone as AgentEvol makes, at its learning rate: its control."""
    folder, start = _folder(out, seed, "more sft"), _folder(out, seed, WARM_UP)
    train = _sft(suite, folder, start / "sft" / "huggingface", EVOL_ITERATIONS * EVOL_STEPS, 5e-4, start, seed)
    return Run("more sft", seed, folder, (train, _evaluate(suite, folder, seed)), folder / "eval")


def _sft(suite: Suite, folder: Path, model: Path, steps: int, learning_rate: float, start: Path, seed: int) -> Command:
    return Command(
        Kind.TRAIN,
        (
            *(*MAIN, "verl.agent_trainer.main_sft", f"model.path={model}"),
            *(
                f"data.train_file={start / 'data' / 'demonstrations.jsonl'}",
                f"data.train_batch_size={suite.warm_up_batch}",
            ),
            *(f"data.seed={seed}", f"optim.lr={learning_rate}", f"optim.lr_warmup_steps={min(30, steps // 4)}"),
            *(f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={folder / 'sft'}"),
            *(f"trainer.seed={seed}", "trainer.log_freq=50", *_frozen(suite, "model"), *LOCAL),
        ),
    )


def _evaluate(suite: Suite, folder: Path, seed: int, model: Path | None = None) -> Command:
    items = _folder(folder.parents[1], seed, WARM_UP) / "data" / "eval"
    argv = _generate(suite, model or folder / "sft" / "huggingface", items, folder / "eval", seed, n=suite.samples)
    return Command(Kind.EVALUATE, argv)


def _generate(suite: Suite, model: Path, items: Path, out: Path, seed: int, *, n: int) -> tuple[str, ...]:
    return (
        *(*MAIN, "verl.agent_trainer.main_generation", f"model.path={model}", f"data.path={items}"),
        *(f"data.n_samples={n}", "data.batch_size=64", f"data.seed={seed}", f"rollout.rollout_log_dir={out}"),
        *("rollout.temperature=1", *_play(suite), *LOCAL),
    )


def _play(suite: Suite) -> tuple[str, ...]:
    return (
        *(f"agentgym.task_name={suite.task}", "agentgym.env_addr={url}", f"agentgym.agent={suite.agent}"),
        *(
            f"agentgym.max_rounds={suite.long}",
            f"agentgym.timeout={suite.timeout}",
            *_lengths(suite),
            f"rollout.max_tokens={suite.max_tokens}",
        ),
        f"rollout.max_model_len={suite.prompt_length + suite.response_length}",
    )


def _frozen(suite: Suite, model: str) -> tuple[str, ...]:
    return (f"{model}.freeze=[{','.join(suite.frozen)}]",) if suite.frozen else ()


def _lengths(suite: Suite) -> tuple[str, ...]:
    return f"data.max_prompt_length={suite.prompt_length}", f"data.max_response_length={suite.response_length}"


def _folder(out: Path, seed: int, name: str) -> Path:
    return out / f"seed{seed}" / name.replace(", ", "-").replace(" ", "-")


def _filled(text: str, places: dict[str, str]) -> str:
    """``text`` with the places put in that it names; ``{url}`` stays for the runner."""
    for name, value in places.items():
        text = text.replace("{" + name + "}", value)
    return text
