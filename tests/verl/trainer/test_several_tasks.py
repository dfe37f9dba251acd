"""Several tasks in one training and one evaluation: shares of a batch, a server for each, figures of each."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from support.environments import Script
from support.parity import TASK, ParityClient, parity_spec
from support.servers import serve

from agentgym_rl.envs.registry import register
from agentgym_rl.envs.server import build_app
from agentgym_rl.errors import ConfigError, TooManyFailures
from agentgym_rl.types import Item
from verl.agent_trainer.checks import check_generation_inputs, check_ppo_inputs
from verl.agent_trainer.loading import load_config, parse_command_line
from verl.config import GenerationConfig, PPOConfig
from verl.trainer.generation import run_generation
from verl.trainer.item_order import TaskMixture
from verl.trainer.ppo import run_ppo
from verl.utils.tracking import read_metrics

OTHER = "second"
ITEMS = {task: [Item(task, index) for index in range(count)] for task, count in (("a", 10), ("b", 3), ("c", 6))}


def mixture(*, batch_size: int = 4, seed: int = 0, **weights: float) -> TaskMixture:
    return TaskMixture({task: ITEMS[task] for task in weights}, weights, batch_size=batch_size, seed=seed)


def test_every_batch_has_each_tasks_share_and_over_time_exactly_that() -> None:
    halves = mixture(a=1, b=1)
    assert all(Counter(item.task for item in halves.batch(step)) == {"a": 2, "b": 2} for step in range(1, 20))
    uneven = mixture(a=5, b=2, c=3)
    counts: Counter[str] = Counter()
    for step in range(1, 26):
        counts.update(item.task for item in uneven.batch(step))
        for task, share in (("a", 0.5), ("b", 0.2), ("c", 0.3)):
            assert abs(counts[task] - share * 4 * step) < 1.01
    assert counts == {"a": 50, "b": 20, "c": 30}


def test_no_batch_has_an_item_twice_and_each_task_goes_through_its_own_items_in_turn() -> None:
    order = mixture(a=1, b=1)
    batches = [order.batch(step) for step in range(1, 31)]
    assert all(len(set(batch)) == 4 for batch in batches)
    of_b = [item.index for batch in batches for item in batch if item.task == "b"]
    epochs = [sorted(of_b[start : start + 3]) for start in range(0, 60, 3)]
    assert epochs == [[0, 1, 2]] * 20
    assert len({tuple(of_b[start : start + 3]) for start in range(0, 60, 3)}) > 1  # shuffled anew


def test_a_batch_follows_from_seed_and_step_alone() -> None:
    ahead = [mixture(a=2, c=1).batch(step) for step in (1, 7, 30)]
    order = mixture(a=2, c=1)
    assert [order.batch(step) for step in (30, 7, 1)] == ahead[::-1]
    assert mixture(a=2, c=1, seed=1).batch(7) != ahead[1]
    assert (order.batches_per_epoch, order.epoch_of(4), order.epoch_of(5)) == (4, 0, 1)


def test_further_items_of_a_step_have_the_shares_too_and_come_from_outside_the_batch_first() -> None:
    order = mixture(a=1, c=1)
    others = list(islice(order.others(3), 8))
    assert Counter(item.task for item in others) == {"a": 4, "c": 4}
    assert len(set(others)) == 8 and set(others).isdisjoint(order.batch(3))


def test_a_task_with_fewer_items_than_its_share_is_refused() -> None:
    mixture(a=1, b=3)  # 3 of 4, and it has 3
    with pytest.raises(
        ConfigError, match=r"data\.task_weights gives b up to 6 of data\.train_batch_size=8 items, .* has 3"
    ):
        mixture(batch_size=8, a=1, b=3)


# ------------------------------------------------------------------------------------------------------- whole runs


class SecondClient(ParityClient):
    task = OTHER


@pytest.fixture
def scripts() -> dict[str, Script]:
    return {TASK: Script(turns=2), OTHER: Script(turns=3)}


@pytest.fixture
def servers(scripts: dict[str, Script]) -> Iterator[str]:
    """Two servers, one for each task; as ``env_addr``."""
    first = parity_spec(scripts[TASK])
    second = replace(parity_spec(scripts[OTHER]), name=OTHER, client=SecondClient)
    for spec in (first, second):
        register(spec)
    with serve(build_app(first)) as one, serve(build_app(second)) as two:
        yield f"[{one},{two}]"


def item_file(folder: Path, task: str, indices: range) -> str:
    path = folder / f"{task}.json"
    path.write_text(json.dumps([f"{task}_{index}" for index in indices]))
    return str(path)


def ppo_config(model: Path, servers: str, folder: Path, *overrides: str) -> PPOConfig:
    first, second = (item_file(folder, task, range(6)) for task in (TASK, OTHER))
    branch = "actor_rollout_ref"
    argv = [
        *(f"data.train_file=[{first},{second}]", f"data.val_file=[{first},{second}]", "data.train_batch_size=4"),
        *("data.task_weights=[3,1]", f"{branch}.agentgym.task_name=[{TASK},{OTHER}]"),
        *(f"{branch}.agentgym.env_addr={servers}", f"{branch}.model.path={model}", f"{branch}.rollout.n=2"),
        *(f"{branch}.rollout.max_tokens=8", f"{branch}.actor.ppo_mini_batch_size=4", f"{branch}.actor.optim.lr=1e-3"),
        *("algorithm.rounds_ctrl.rounds=3", "trainer.logger=[jsonl]", "trainer.total_training_steps=2"),
        *("trainer.test_freq=2", "trainer.device=cpu", "trainer.worker_group=local"),
        f"trainer.default_local_dir={folder / 'run'}",
        *overrides,
    ]
    return load_config(PPOConfig, parse_command_line(argv, program="test", config_name="ppo_trainer"))


@pytest.mark.server
def test_two_tasks_train_in_one_run_each_on_its_own_server(
    model: Path, servers: str, scripts: dict[str, Script], tmp_path: Path
) -> None:
    config = ppo_config(model, servers, tmp_path)
    items = check_ppo_inputs(config)
    run_ppo(config, train_items=items.train, val_items=items.val)
    rows: list[dict[str, Any]] = read_metrics(tmp_path / "run" / "metrics.jsonl")
    for row in rows:
        assert (row[f"rollout/{TASK}/trajectories"], row[f"rollout/{OTHER}/trajectories"]) == (6, 2)
    assert (rows[-1][f"val/{TASK}/trajectories"], rows[-1][f"val/{OTHER}/trajectories"]) == (6, 6)
    assert (rows[-1][f"val/{TASK}/turns_mean"], rows[-1][f"val/{OTHER}/turns_mean"]) == (2, 3)
    assert all(row["training/updates"] == 1 and row["rollout/masked"] == 0 for row in rows)
    assert all(script.executed and script.open == 0 for script in scripts.values())


@pytest.mark.server
def test_an_evaluation_of_two_tasks_tells_them_apart_and_a_broken_server_of_one_ends_it(
    model: Path, servers: str, scripts: dict[str, Script], tmp_path: Path
) -> None:
    def config(folder: str) -> GenerationConfig:
        files = ",".join(item_file(tmp_path, task, range(9)) for task in (TASK, OTHER))
        argv = [
            *(f"data.path=[{files}]", f"agentgym.task_name=[{TASK},{OTHER}]", f"agentgym.env_addr={servers}"),
            *(f"model.path={model}", "rollout.max_tokens=4", "agentgym.max_rounds=4"),
            *(f"rollout.rollout_log_dir={tmp_path / folder}", "trainer.device=cpu", "trainer.worker_group=local"),
        ]
        return load_config(GenerationConfig, parse_command_line(argv, program="test", config_name="generation"))

    report = run_generation(config("sound"), check_generation_inputs(config("sound")))
    assert [(scores.name, scores.num_items, scores.turns_mean) for scores in report.tasks] == [
        *((TASK, 9, 2), (OTHER, 9, 3)),
    ]
    # All of one task's environments fail and the other's work: that is found out before all items are through.
    scripts[OTHER].fails_at = dict.fromkeys(range(9), 0)
    with pytest.raises(TooManyFailures, match=f"{OTHER}_"):
        run_generation(config("broken"), check_generation_inputs(config("broken")))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.task_weights=[1]", r"data\.task_weights=\[1\.0\]: must have a weight for each of the 2 tasks"),
        ("data.task_weights=[1,0]", "data.task_weights=0.0: must be above 0"),
        ("actor_rollout_ref.agentgym.env_addr=http://a:1", "must be a list with an entry for each of the tasks"),
        ("actor_rollout_ref.agentgym.task_name=[parity,parity]", "parity stands twice"),
        ("actor_rollout_ref.agentgym.task_name=[]", "must be a name, or a list of names"),
    ],
)
def test_tasks_that_do_not_fit_together_are_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ppo_config(tmp_path, "[http://a:1,http://b:1]", tmp_path, override)
