"""Numbers that pages show are what the code computes."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
from support.batches import batch_of
from support.documents import ROOT, blocks, code, rows
from support.published import HORIZONS
from support.rollouts import make_generation, make_limits, make_requests
from support.servers import serve
from support.tokenizers import make_tokenizer

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.envs.registry import get_spec
from agentgym_rl.envs.server import build_app
from agentgym_rl.rollout.handler import RolloutHandler
from agentgym_rl.types import Message, Role, StepOutput, StopReason
from verl.config import AlgorithmConfig
from verl.protocol import DataProto
from verl.trainer.core_algos import find_estimator
from verl.trainer.core_algos.advantages import ADVANTAGE_ESTIMATORS

TOKENS = ROOT / "docs" / "concepts" / "tokens.md"
ADVANTAGES = ROOT / "docs" / "concepts" / "advantages.md"
TASKS = ROOT / "docs" / "tasks" / "index.md"


# --------------------------------------------------------------------------------------------------------------- tokens


def test_the_row_of_tokens_is_what_a_rollout_records() -> None:
    tokenizer = make_tokenizer()
    chat = ChatTemplate(tokenizer)
    opening = (Message(Role.USER, "Goal: craft oak planks"),)
    handler = RolloutHandler(make_requests([0])[0], opening, chat, make_limits(), max_rounds=2)
    handler.append_generation(make_generation(chat.encode_answer("get 1 oak log")))
    handler.append_step(StepOutput("Got 1 oak log.", 0.0, False))
    handler.append_observation("Got 1 oak log.")
    handler.append_generation(make_generation(chat.encode_answer("craft 4 oak planks")))
    handler.append_step(StepOutput("Crafted 4 minecraft:oak_planks", 1.0, True))
    made = handler.finish(StopReason.DONE)
    shown = rows(TOKENS, "| position | token |")
    assert len(shown) == len(made.input_ids)
    for position, (number, token, *columns) in enumerate(shown):
        text = html.unescape(re.sub(r"^(`|<code>)|(`|</code>)$", "", token)).replace("\\n", "\n")
        assert (int(number), text) == (handler.position_ids[position], tokenizer.decode([made.input_ids[position]]))
        given = [float(column or 0) for column in columns]
        record = (made.input_ids, handler.attention_mask, made.loss_mask, made.sequence_ids, made.token_rewards)
        assert given == [float(column[position]) for column in record]


# ----------------------------------------------------------------------------------------------------------- advantages


def two_turns() -> DataProto:
    """The group that the page draws: two tokens, three of an observation, one token; A alone earns 1."""
    return batch_of(
        [[1, 1, 0, 0, 0, 1]] * 4,
        rewards=[[0, 0, 0, 0, 0, 1], *[[0] * 6] * 3],
        scores=[1, 0, 0, 0],
        groups=["item"] * 4,
        values=[*[[0.25, 0.25, 9, 9, 9, 0.5]] * 2, *[[0.25, 0.25, 9, 9, 9, 0]] * 2],
        messages=[[1, 1, 2, 2, 2, 3]] * 4,
        anchors=[*[[7, 7, 0, 0, 0, 8]] * 2, *[[7, 7, 0, 0, 0, 9]] * 2],
        baselines=[0.0] * 4,
    )


def one_turn() -> DataProto:
    return batch_of(
        [[1, 1]] * 4,
        rewards=[[0, 1], *[[0, 0]] * 3],
        scores=[1, 0, 0, 0],
        groups=["item"] * 4,
        values=[[0.25, 0.25]] * 4,
        messages=[[1, 1]] * 4,
        anchors=[[7, 7]] * 4,
        baselines=[0.0] * 4,
    )


def advantages(batch: DataProto, cell: str) -> list[list[str]]:
    """Of each trajectory the numbers of its sampled tokens, as the page writes them, by what its first cell says."""
    name, *settings = code(cell)
    keys: dict[str, Any] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        keys[key] = value == "True" if value in ("True", "False") else float(value)
    config = AlgorithmConfig(adv_estimator=name, **keys)
    made = find_estimator(name)(batch, config).advantages_T[batch.loss_mask_T].reshape(len(batch), -1)
    return [[f"{float(value) + 0.0:.3f}".replace("-0.000", "0.000") for value in row] for row in made]


def cell_of(numbers: list[str]) -> str:
    return numbers[0] if len(set(numbers)) == 1 else ", ".join(numbers)


@pytest.mark.parametrize("row", rows(ADVANTAGES, "| estimator | A, turn 1 |"), ids=lambda row: row[0])
def test_advantages_of_two_turns_are_those_of_the_page(row: list[str]) -> None:
    a, b, c, d = advantages(two_turns(), row[0])
    assert c == d
    assert row[1:] == [cell_of(part) for each in (a, b, c) for part in (each[:2], each[2:])]


@pytest.mark.parametrize("row", rows(ADVANTAGES, "| estimator | A | B, C, D |"), ids=lambda row: row[0])
def test_advantages_of_one_turn_are_those_of_the_page(row: list[str]) -> None:
    a, *others = advantages(one_turn(), row[0])
    assert row[1] == cell_of(a) and all(row[2] == cell_of(other) for other in others)


@pytest.mark.parametrize("header", ["| estimator | a number", "| estimator | A, turn 1", "| estimator | A | B, C, D"])
def test_every_estimator_is_in_every_table(header: str) -> None:
    assert {code(row[0])[0] for row in rows(ADVANTAGES, header)} == set(ADVANTAGE_ESTIMATORS)


# ---------------------------------------------------------------------------------------------------------------- tasks


def test_ports_and_horizons_are_those_of_the_tasks() -> None:
    ports = {row[0].partition("]")[0].strip("["): row[2] for row in rows(TASKS, "| task | what it is | port")}
    for task, (fixed, staged) in HORIZONS.items():
        assert ports[task] == str(get_spec(task).default_port)
        [horizon] = [row for row in rows(TASKS, "| task | fixed |") if row[0].lower() == task]
        assert horizon[1:3] == [fixed, staged.strip("[]").replace(",", ", ")]


# -------------------------------------------------------------------------------------------------------- python blocks


def test_the_estimator_that_contributors_are_shown_works() -> None:
    [block] = blocks(ROOT / "CONTRIBUTING.md", "python")
    names: dict[str, Any] = {}
    exec(compile(block, "CONTRIBUTING.md", "exec"), names)
    made = names["plain_score"](batch_of([[1, 0, 1], [1, 1]], scores=[0.5, 1.0]), AlgorithmConfig())
    assert made.advantages_T.tolist() == [0, 0.5, 0, 0.5, 0, 1, 1]


@pytest.mark.server
@pytest.mark.parametrize("task", ["textcraft", "babyai"])
def test_the_client_of_a_task_plays_as_its_page_shows(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "agentgym_rl" / "envs" / task / "README.md"
    [block] = blocks(page, "python")
    with serve(build_app(get_spec(task))) as url:
        exec(compile(re.sub(r"http://127\.0\.0\.1:\d+", url, block), str(page), "exec"), {})
    printed = capsys.readouterr().out
    assert "Goal: " in printed.replace("Your goal: ", "Goal: ") and "StepOutput(" in printed
