"""What is said of conversations before a model is trained on them."""

from __future__ import annotations

import pytest

from agentgym_rl.data.checks import TokenCounts, check_roles, describe_rows, describe_tokens
from agentgym_rl.data.conversations import Conversation
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Message, Role

U, A, S = Role.USER, Role.ASSISTANT, Role.SYSTEM


def row(*roles, item_id="toy_1", texts=None, flags=None):
    texts = texts or [f"text {index}" for index in range(len(roles))]
    messages = tuple(Message(role, text) for role, text in zip(roles, texts, strict=True))
    return Conversation(item_id, messages, flags or (None,) * len(roles))


@pytest.mark.parametrize(
    "roles", [(U, A), (S, U, A, U, A), (U, A, U), (U, A, Role.TOOL, A), (S, U, A, U, A, U)], ids=str
)
def test_what_a_rollout_could_have_is_sound(roles):
    check_roles([row(*roles)], "train.json")


def test_before_the_first_trained_answer_any_order_will_do():
    check_roles([row(U, U, A, A, U, A, flags=(None, None, False, False, None, True))], "train.json")


@pytest.mark.parametrize(
    ("roles", "fault"),
    [
        ((U, U), "has no assistant message"),
        ((A, U, A), "begins with an assistant message that is trained on"),
        ((U, A, A), "message 2 is the assistant's and follows the assistant's: must be a user's"),
        ((U, A, U, U, A), "message 3 is the user's and follows the user's: must be the assistant's"),
        ((U, A, S, A), "message 2 is the system's and follows the assistant's: must be a user's"),
    ],
    ids=str,
)
def test_a_row_that_no_rollout_could_have_is_named(roles, fault):
    with pytest.raises(ConfigError) as caught:
        check_roles([row(U, A), row(*roles, item_id="toy_9")], "train.json")
    assert str(caught.value).startswith(f"train.json: row 2 (toy_9): {fault}")


def test_of_many_broken_rows_the_first_are_shown_and_all_are_counted():
    with pytest.raises(ConfigError, match=r"row 1 .*row 2 .*row 3 .*; and 2 rows more$"):
        check_roles([row(U)] * 5, "train.json")


def test_ids_that_come_twice_and_equal_rows_are_told_apart():
    rows = [row(U, A), row(U, A), row(U, A, texts=["other", "words"]), row(U, A, item_id="toy_2", texts=["x", "y"])]
    assert describe_rows(rows) == [
        "1 of 2 item ids have several rows, up to 3: toy_1",
        "warning: 1 rows equal an earlier row, word for word",
    ]


def test_items_that_are_held_out_must_not_be_trained_on():
    rows = [row(U, A, item_id=f"toy_{n}", texts=[str(n), "x"]) for n in range(6)]
    assert describe_rows(rows, held_out={f"toy_{n}" for n in range(1, 9)}) == [
        "warning: 5 item ids are trained on and held out: toy_1, toy_2, toy_3, ..."
    ]


def test_empty_messages_are_counted_by_what_they_do():
    rows = [row(U, A, texts=["hi", " "]), row(U, A, item_id="toy_2", texts=["", "ok"])]
    rows.append(row(U, A, item_id="toy_3", texts=["hi", ""], flags=(None, False)))
    assert describe_rows(rows) == [
        "warning: 1 empty answers are trained on: row 1",
        "warning: 2 other messages are empty: row 2, row 3",
    ]


def test_sound_rows_are_not_spoken_of():
    assert describe_rows([row(U, A), row(U, A, item_id="toy_2", texts=["a", "b"])], held_out={"toy_3"}) == []


def test_tokens_are_shown_as_share_with_loss_and_histogram_of_lengths():
    counts = [TokenCounts(length, 10) for length in (100, 128, 129, 300)]
    assert describe_tokens(counts) == [
        "657 tokens, 40 of them (6.1%) with loss; lengths from 100 to 300, median 129",
        "    to 128 tokens       2 ##############################",
        "    to 256 tokens       1 ###############",
        "    to 512 tokens       1 ###############",
    ]
