"""What preference training reads of a pair: both sides as a rollout would have them, loss on what tells them apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.pairs import pair
from support.tokenizers import make_tokenizer

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.data.pairs import Pair, parse_pair
from agentgym_rl.errors import ConfigError
from verl.trainer.dpo import PairExample, batch_of_pairs, encode_pairs, share_pairs
from verl.trainer.examples import RowEncoder


@pytest.fixture(scope="module")
def chat() -> ChatTemplate:
    return ChatTemplate(make_tokenizer())


def encode(chat: ChatTemplate, *pairs: Pair, max_length: int = 1000, truncation: str = "error") -> list[PairExample]:
    return encode_pairs(pairs, RowEncoder(chat, max_length=max_length, truncation=truncation))


def trained_text(chat: ChatTemplate, example) -> str:
    return chat.decode(example.ids[example.loss_mask == 1].tolist())


def test_each_side_has_the_very_ids_that_a_rollout_of_it_has(chat: ChatTemplate) -> None:
    both = pair(["Action: look", "Action: get 1 log"], ["Action: look", "Action: wait"])
    [example] = encode(chat, both)
    for side, conversation in zip(example.sides, (both.chosen, both.rejected), strict=True):
        assert side.ids.tolist() == list(chat.encode_conversation(conversation.messages, conversation.train_flags).ids)


def test_what_both_sides_begin_with_is_prompt(chat: ChatTemplate) -> None:
    """The first turn is the same on both sides: it is preferred to nothing, so no loss is taken there."""
    both = pair(["Action: look", "get 1 log"], ["Action: look", "wait"])
    [example] = encode(chat, both)
    assert trained_text(chat, example.chosen) == "get 1 log"
    assert trained_text(chat, example.rejected) == "wait"
    start = int(example.chosen.loss_mask.argmax())
    assert example.chosen.ids[:start].tolist() == example.rejected.ids[:start].tolist()


def test_observations_have_no_loss_after_the_sides_part(chat: ChatTemplate) -> None:
    [example] = encode(chat, pair(["left", "up", "take"], ["right", "down"]))
    assert trained_text(chat, example.chosen).count("Seen") == 0
    assert example.chosen.num_trained == sum(len(chat.encode_answer(turn)) for turn in ("left", "up", "take"))


def test_pairs_cut_before_they_differ_are_dropped_and_counted(
    chat: ChatTemplate, capsys: pytest.CaptureFixture[str]
) -> None:
    short, long = pair(["left"], ["right"]), pair(["wait " * 60, "left"], ["wait " * 60, "right"])
    examples = encode(chat, short, long, max_length=60, truncation="right")
    assert len(examples) == 1
    assert trained_text(chat, examples[0].chosen) == "left"
    said = capsys.readouterr().out
    assert "1 of 2 pairs are left out: cut before they differ" in said
    assert "2 rows were cut to data.max_length=60 tokens" in said


def test_a_pair_cut_after_its_sides_part_is_trained_on(chat: ChatTemplate) -> None:
    [example] = encode(chat, pair(["left", "wait " * 60], ["right", "wait " * 60]), max_length=60, truncation="right")
    assert [len(side.ids) for side in example.sides] == [60, 60]
    assert trained_text(chat, example.chosen).startswith("left")


def test_a_pair_too_long_is_an_error_that_names_row_and_side(chat: ChatTemplate) -> None:
    with pytest.raises(
        ConfigError, match=r"row 1 \(textcraft_1\), rejected: \d+ tokens, more than data\.max_length=60"
    ):
        encode(chat, pair(["left"], ["right " * 60]), max_length=60)


def test_sides_that_are_the_same_are_dropped_and_counted(
    chat: ChatTemplate, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(encode(chat, pair(["left"], ["left"]), pair(["left"], ["right"]))) == 1
    assert "1 of 2 pairs are left out: both sides are the same" in capsys.readouterr().out


def test_a_side_that_ends_where_the_other_goes_on_tells_nothing_of_it(
    chat: ChatTemplate, capsys: pytest.CaptureFixture[str]
) -> None:
    """One episode ended by chance where the other, of the same actions, went on."""
    assert len(encode(chat, pair(["left"], ["left", "wait"]), pair(["left"], ["right"]))) == 1
    assert "nothing after their common beginning is trained on" in capsys.readouterr().out


def test_pairs_of_which_none_differs_are_an_error(chat: ChatTemplate) -> None:
    with pytest.raises(ConfigError, match="none of its 2 pairs has a difference to train on"):
        encode(chat, pair(["left"], ["left"]), pair(["up"], ["up"]))


def test_turns_that_are_not_to_be_trained_on_are_not(chat: ChatTemplate) -> None:
    both = pair(["left", "up"], ["right", "down"])
    silenced = replace(both, chosen=replace(both.chosen, train_flags=(None, False, None, True)))
    [example] = encode(chat, silenced)
    assert trained_text(chat, example.chosen) == "up"


def test_shares_hold_whole_pairs_of_about_equal_numbers_of_tokens(chat: ChatTemplate) -> None:
    pairs = [pair([f"left {'x ' * n}"], [f"right {'x ' * n}"]) for n in (1, 2, 30, 31)]
    batch = batch_of_pairs(encode(chat, *pairs))
    shares = share_pairs(batch, 2)
    assert [len(share) for share in shares] == [4, 4]
    for share in shares:
        groups = share.group_ids_B.tolist()
        assert groups[0::2] == groups[1::2]
    assert abs(shares[0].num_tokens - shares[1].num_tokens) < 20
    assert [len(share) for share in share_pairs(batch.select([0, 1]), 2)] == [2, 0]


def test_a_prompt_of_its_own_is_common_to_both_sides() -> None:
    row = {
        "item_id": "textcraft_1",
        "prompt": [{"role": role, "content": "x"} for role in ("user", "assistant", "user")],
        "chosen": [{"role": "assistant", "content": "left"}],
        "rejected": [{"role": "assistant", "content": "right"}],
    }
    parsed = parse_pair(row, "row 1")
    assert parsed.chosen.train_flags == (False, False, False, None)
    assert parsed.chosen.messages[:3] == parsed.rejected.messages[:3]
    assert parsed.item_id == "textcraft_1"
