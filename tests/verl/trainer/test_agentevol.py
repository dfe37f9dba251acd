"""AgentEvol in this process: what is explored, kept, merged and trained on, and how a stopped run goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from support.environments import Script
from support.parity import TASK, parity_spec
from support.rollouts import make_trajectory
from support.servers import serve

from agentgym_rl.data.conversations import Conversation, read_conversations, write_conversations
from agentgym_rl.envs.registry import register
from agentgym_rl.envs.server import build_app
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Item, Message, Role, StopReason
from verl.agent_trainer.loading import load_config, parse_command_line
from verl.config import AgentEvolConfig
from verl.trainer import agentevol
from verl.trainer.agentevol import Summary, choose, iteration_table, run_agentevol

TRAIN = [Item(TASK, index) for index in range(6)]
HELD_OUT = [Item(TASK, index) for index in range(100, 103)]

Evolve = Callable[..., list[Summary]]


@pytest.fixture
def evolve(model: Path, tmp_path: Path) -> Iterator[Evolve]:
    """Runs AgentEvol on an environment that pays a random model now and then."""
    spec = parity_spec(Script(turns=2))
    register(spec)
    base = tmp_path / "base.jsonl"
    messages = (Message(Role.USER, "Do anything."), Message(Role.ASSISTANT, "go on"))
    write_conversations(base, [Conversation("parity_50", messages, (None, True))] * 4)
    with serve(build_app(spec)) as url:

        def run(*overrides: str) -> list[Summary]:
            return run_agentevol(_config(model, base, url, tmp_path, overrides), train_items=TRAIN, val_items=HELD_OUT)

        yield run


def _config(model: Path, base: Path, url: str, folder: Path, overrides: tuple[str, ...]) -> AgentEvolConfig:
    argv = [
        f"data.base_file={base}",
        "data.train_file=given",
        "data.val_file=given",
        "data.train_batch_size=4",
        "data.max_response_length=200",
        f"agentgym.task_name={TASK}",
        f"agentgym.env_addr={url}",
        "agentgym.max_rounds=3",
        f"model.path={model}",
        "optim.lr=1e-3",
        "rollout.n=3",
        "rollout.max_tokens=8",
        "trainer.total_training_steps=2",
        "trainer.device=cpu",
        "trainer.worker_group=local",
        "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={folder / 'run'}",
        *overrides,
    ]
    return load_config(AgentEvolConfig, parse_command_line(argv, program="test", config_name="agentevol"))


@pytest.mark.server
def test_each_iteration_trains_on_what_the_one_before_explored(evolve: Evolve, tmp_path: Path) -> None:
    summaries = evolve()
    root = tmp_path / "run"
    assert [summary.iteration for summary in summaries] == [0, 1, 2]
    assert summaries[0].trained_on == 4
    for before, summary in pairwise(summaries):
        folder = root / f"iteration_{summary.iteration}"
        settings = json.loads((folder / "explore" / "settings.json").read_text())
        assert before.model in str(settings)
        explored, trained = (read_conversations(folder / name) for name in ("explored.jsonl", "train.jsonl"))
        assert len(explored) == summary.from_exploration == summary.items_passed > 0
        assert trained == [*read_conversations(tmp_path / "base.jsonl"), *explored]
        assert summary.explored == 18 and summary.passed >= summary.items_passed
        assert (folder / "eval" / "report.json").exists()
        assert Path(summary.model) == folder / "sft" / "huggingface"
    assert (root / "table.txt").read_text() == iteration_table(summaries) + "\n"


@pytest.mark.server
def test_the_data_change_from_one_iteration_to_the_next(evolve: Evolve, tmp_path: Path) -> None:
    evolve("optim.lr=0", "algorithm.explored=all")
    first, second = (read_conversations(tmp_path / "run" / f"iteration_{n}" / "train.jsonl") for n in (1, 2))
    # Even of a policy that has not changed at all, which with the same random numbers would play the same again.
    assert first != second


@pytest.mark.server
def test_a_run_that_is_stopped_goes_on_where_it_was(
    evolve: Evolve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before one phase after the other, the run comes to what an uninterrupted one does."""
    whole = evolve(f"trainer.default_local_dir={tmp_path / 'whole'}")
    phases_left = num_stops = 0

    class Stopped(Exception):
        pass

    def stopping(work: Callable[..., object]) -> Callable[..., object]:
        def phase(*args: object, **options: object) -> object:
            nonlocal phases_left
            if not phases_left:
                raise Stopped
            phases_left -= 1
            return work(*args, **options)

        return phase

    for name in ("run_generation", "run_sft"):
        monkeypatch.setattr(agentevol, name, stopping(getattr(agentevol, name)))
    summaries: list[Summary] = []
    while not summaries:
        phases_left = num_stops
        try:
            summaries = evolve()
        except Stopped:
            num_stops += 1
    assert num_stops >= 4
    assert [replace(summary, model="") for summary in summaries] == [replace(summary, model="") for summary in whole]


@pytest.mark.server
def test_a_finished_run_goes_on_with_more_iterations_and_refuses_other_settings(evolve: Evolve, tmp_path: Path) -> None:
    first = evolve("algorithm.iterations=1")
    made = (tmp_path / "run" / "iteration_1" / "summary.json").stat().st_mtime_ns
    assert evolve("algorithm.iterations=2")[:2] == first
    assert (tmp_path / "run" / "iteration_1" / "summary.json").stat().st_mtime_ns == made
    with pytest.raises(ConfigError, match=r"optim\.lr=0\.5.* holds results made with 0\.001"):
        evolve("optim.lr=0.5")


@pytest.mark.server
def test_a_given_first_policy_explores_and_each_iteration_trains_the_last_model(
    evolve: Evolve, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[str] = []
    train = agentevol.run_sft

    def noted(config, **options):
        starts.append(config.model.path)
        return train(config, **options)

    monkeypatch.setattr(agentevol, "run_sft", noted)
    summaries = evolve(f"algorithm.first_policy={model}", "algorithm.train_from=last", "data.base_file=null")
    assert starts == [str(model), summaries[1].model]
    assert summaries[0].trained_on == 0


@pytest.mark.server
def test_nothing_good_enough_to_train_on_is_an_error_that_says_what_to_change(evolve: Evolve) -> None:
    with pytest.raises(
        ConfigError, match=r"none of 18 explored trajectories is good enough.*algorithm\.reward_threshold"
    ):
        evolve("algorithm.reward_threshold=2", "data.base_file=null")


# ------------------------------------------------------------------------------------------------------------- choosing


def played(item: int, score: float, *, turns: int = 2, sample: int = 0, success: bool | None = None):
    return make_trajectory(
        Item("toy", item),
        score=score,
        success=score >= 1 if success is None else success,
        turns=turns,
        sample_index=sample,
    )


def test_of_each_item_the_best_and_then_the_shortest_is_kept() -> None:
    trajectories = [
        played(1, 0.5, turns=1, sample=0),
        played(1, 1.0, turns=5, sample=1),
        played(1, 1.0, turns=3, sample=2),
        played(2, 0.2, sample=0),
        played(3, 1.0, sample=0),
    ]
    exploration = choose(trajectories, {"toy": 0.5}, one_per_item=True)
    assert (exploration.num_sampled, exploration.num_passed, exploration.num_items) == (5, 4, 2)
    assert [row.item_id for row in exploration.chosen] == ["toy_1", "toy_3"]
    everything = choose(trajectories, {"toy": 0.5}, one_per_item=False)
    assert [row.item_id for row in everything.chosen] == ["toy_1", "toy_1", "toy_1", "toy_3"]


def test_the_order_of_trajectories_does_not_matter() -> None:
    trajectories = [played(item, 1.0, turns=item % 3 + 1, sample=s) for item in range(4) for s in range(3)]
    forth, back = (choose(rows, {}, one_per_item=True) for rows in (trajectories, trajectories[::-1]))
    assert forth == back


def test_without_a_threshold_the_tasks_own_word_for_success_decides() -> None:
    trajectories = [played(1, 80.0, success=False), played(2, 70.0, success=True)]
    assert [row.item_id for row in choose(trajectories, {"toy": None}, one_per_item=True).chosen] == ["toy_2"]


def test_faults_are_not_explored_trajectories() -> None:
    fault = make_trajectory(Item("toy", 1), score=1.0, success=True, stop_reason=StopReason.ENV_ERROR, error="gone")
    assert choose([fault], {"toy": None}, one_per_item=True).num_sampled == 0


def test_a_kept_trajectory_carries_its_sampled_tokens() -> None:
    [row] = choose([played(1, 1.0)], {}, one_per_item=True).chosen
    assert row.record is not None and row.record.input_ids == (4, 5, 6) and row.record.loss_mask == (0, 1, 1)


def test_the_table_has_a_row_per_iteration() -> None:
    first = Summary(0, "m0", 0, 0, 0, 40, 0, 0.2, 0.4)
    second = Summary(1, "m1", 400, 90, 30, 70, 30, 0.275, None)
    lines = iteration_table([first, second]).splitlines()
    assert lines[0].split("  ")[0].strip() == "iteration"
    assert lines[1].split() == ["0", "0", "0", "0", "40", "0", "0.200", "0.400"]
    assert lines[2].split() == ["1", "400", "90", "30", "70", "30", "0.275", "-", "+7.5"]
