"""Preference pairs: which two trajectories make one, and the files they are kept in."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.rollouts import make_trajectory

from agentgym_rl.cli import main
from agentgym_rl.data.conversations import Conversation, TokenRecord, sampled_flags, write_conversations
from agentgym_rl.data.pairs import PairRules, make_pairs, parse_pair, read_pairs, write_pairs
from agentgym_rl.errors import ConfigError
from agentgym_rl.rollout.log import TrajectoryLog
from agentgym_rl.types import Item, Message, Role, StopReason


def played(item, score, text, *, opening="start", success=None, **options):
    success = score >= 1 if success is None else success
    trajectory = make_trajectory(Item("toy", item), score=score, success=success, turns=1, **options)
    return replace(trajectory, messages=(Message(Role.USER, opening), Message(Role.ASSISTANT, text)))


def texts(pairs):
    return [(pair.chosen.messages[-1].content, pair.rejected.messages[-1].content) for pair in pairs]


def test_a_success_is_preferred_to_a_failure_of_the_same_item():
    made = make_pairs([played(1, 1.0, "good"), played(1, 0.0, "bad"), played(2, 1.0, "other")], PairRules())
    assert texts(made.pairs) == [("good", "bad")]
    assert (made.pairs[0].item_id, made.pairs[0].chosen_reward, made.pairs[0].rejected_reward) == ("toy_1", 1.0, 0.0)
    assert made.lines() == ["1 pairs of 1 of 2 items", "1 items without: a single sample"]


def test_the_gap_and_the_threshold_decide_who_may_be_chosen():
    samples = [played(1, score, f"s{score:g}", success=False) for score in (0.2, 0.5, 0.9)]
    assert texts(make_pairs(samples, PairRules(threshold=0.8, min_gap=0.5, per_item=9)).pairs) == [("s0.9", "s0.2")]
    assert len(make_pairs(samples, PairRules(threshold=0.5, per_item=9)).pairs) == 3
    assert make_pairs(samples, PairRules()).without == {"no sample is good enough to be chosen": 1}
    assert make_pairs(samples, PairRules(threshold=0.5, min_gap=0.8)).without == {
        "no two samples differ enough in score": 1
    }


def test_equal_scores_and_equal_texts_make_no_pair():
    same = [played(1, 1.0, "same"), played(1, 0.0, "same")]
    assert make_pairs(same, PairRules()).pairs == ()
    assert make_pairs([played(1, 1.0, "a"), played(1, 1.0, "b")], PairRules()).pairs == ()


def test_samples_that_begin_otherwise_make_no_pair():
    """Of two instructions, say: the sides would differ in what no model can be blamed for."""
    made = make_pairs([played(1, 1.0, "a"), played(1, 0.0, "b", opening="another start")], PairRules())
    assert made.without == {"samples that differ in score begin with different messages": 1}


def test_faults_make_no_pair():
    fault = played(1, 0.0, "bad", stop_reason=StopReason.ENV_ERROR, error="gone")
    assert make_pairs([played(1, 1.0, "good"), fault], PairRules()).without == {"a single sample": 1}


def expert(item, text, *, opening="start"):
    messages = (Message(Role.USER, opening), Message(Role.ASSISTANT, text))
    return Conversation(f"toy_{item}", messages, (None, True))


def test_an_expert_is_preferred_to_failures_and_not_to_successes():
    samples = [played(1, 0.0, "bad"), played(1, 1.0, "good"), played(2, 0.0, "bad"), played(3, 1.0, "good")]
    made = make_pairs(samples, PairRules(per_item=9), experts=[expert(n, "expert") for n in (1, 2, 3)])
    assert texts(made.pairs) == [("expert", "bad"), ("good", "bad"), ("expert", "bad")]
    assert made.pairs[0].chosen_reward is None and made.pairs[1].chosen_reward == 1.0
    assert made.without == {"no sample is bad enough to be rejected": 1}
    assert make_pairs(samples[:1], PairRules(), experts=[expert(1, "x", opening="other")]).pairs == ()


def test_several_pairs_of_an_item_take_each_sample_before_any_twice():
    samples = [played(1, 1.0, f"good{n}") for n in range(2)] + [played(1, 0.0, f"bad{n}") for n in range(3)]
    chosen, rejected = zip(*texts(make_pairs(samples, PairRules(per_item=2)).pairs), strict=True)
    assert sorted(chosen) == ["good0", "good1"] and len(set(rejected)) == 2
    assert len(make_pairs(samples, PairRules(per_item=9)).pairs) == 6


def test_the_order_of_the_files_does_not_matter_but_the_seed_does():
    samples = [played(1, 1.0, f"good{n}") for n in range(6)] + [played(1, 0.0, f"bad{n}") for n in range(6)]
    first = texts(make_pairs(samples, PairRules(per_item=3)).pairs)
    assert texts(make_pairs(samples[::-1], PairRules(per_item=3)).pairs) == first
    assert any(texts(make_pairs(samples, PairRules(per_item=3, seed=seed)).pairs) != first for seed in range(1, 4))


@pytest.mark.parametrize("name", ["pairs.json", "pairs.jsonl"])
def test_what_is_written_is_read_back(tmp_path, name):
    made = make_pairs([played(1, 1.0, "good"), played(1, 0.0, "bad")], PairRules())
    write_pairs(tmp_path / name, made.pairs)
    assert read_pairs(tmp_path / name) == list(made.pairs)
    assert made.pairs[0].chosen.record == TokenRecord((4, 5, 6), (0, 1, 1), (0, 1, 1))


def test_sides_may_be_lists_of_messages_after_a_prompt():
    row = {
        "prompt": [{"role": "user", "content": "Where?"}],
        "chosen": [{"role": "assistant", "content": "left"}],
        "rejected": [{"from": "gpt", "value": "right"}],
    }
    pair = parse_pair(row, "row 1")
    assert texts([pair]) == [("left", "right")]
    assert pair.chosen.messages[0] == pair.rejected.messages[0] == Message(Role.USER, "Where?")
    assert (pair.chosen_reward, pair.item_id) == (None, "")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (3, "row 1: expected an object with chosen and rejected, got '3'"),
        ({"chosen": []}, "row 1: chosen: field 'conversations' must be a list of messages"),
        ({"chosen": {"reward": "1", "conversations": []}}, r"field chosen\.reward must be a number or null, got '1'"),
    ],
)
def test_a_row_that_is_no_pair_is_named(row, message):
    with pytest.raises(ConfigError, match=message):
        parse_pair(row, "row 1")


def test_the_command_pairs_the_results_of_several_evaluations(tmp_path, capsys):
    for name, score, text in (("one", 1.0, "good"), ("two", 0.0, "bad")):
        with TrajectoryLog(tmp_path / name / "trajectories" / "0.jsonl") as log:
            log.write(played(1, score, text))
    arguments = ["make-pairs", str(tmp_path / "one"), str(tmp_path / "two"), "--out", str(tmp_path / "pairs.jsonl")]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("1 pairs of 1 of 1 items\n")
    assert texts(read_pairs(tmp_path / "pairs.jsonl")) == [("good", "bad")]
    assert main([*arguments, "--min-gap", "2"]) == 1
    assert "no pairs among 2 trajectories" in capsys.readouterr().err
    write_conversations(tmp_path / "experts.jsonl", [expert(1, "expert")])
    assert main([*arguments, "--experts", str(tmp_path / "experts.jsonl"), "--per-item", "2"]) == 0
    assert texts(read_pairs(tmp_path / "pairs.jsonl")) == [("expert", "bad"), ("good", "bad")]
    capsys.readouterr()
    assert main(["make-pairs", str(tmp_path / "none"), "--out", str(tmp_path / "x.jsonl")]) == 1
    assert "holds no trajectories" in capsys.readouterr().err
    assert main([*arguments, "--per-item", "0"]) == 1
    assert "per_item=0: must be at least 1" in capsys.readouterr().err


def test_a_trajectory_without_tokens_is_known_by_its_turns():
    """A hosted model's: what it wrote are the last answers, the acknowledgement before them is not."""
    trajectory = played(1, 1.0, "go")
    empty = {name: getattr(trajectory, name)[:0] for name in ("input_ids", "loss_mask", "sequence_ids")}
    opening = (Message(Role.USER, "Do it."), Message(Role.ASSISTANT, "OK."), Message(Role.USER, "Go."))
    hosted = replace(trajectory, messages=(*opening, Message(Role.ASSISTANT, "go")), **empty)
    assert sampled_flags(hosted) == (None, False, None, True)
    assert Conversation.of(hosted).record is None


def test_a_pair_is_a_line_that_any_tool_can_read(tmp_path):
    write_pairs(
        tmp_path / "pairs.jsonl", make_pairs([played(1, 1.0, "good"), played(1, 0.0, "bad")], PairRules()).pairs
    )
    row = json.loads((tmp_path / "pairs.jsonl").read_text())
    assert list(row) == ["item_id", "chosen", "rejected"]
    assert row["chosen"]["conversations"][1] == {"from": "gpt", "loss": True, "value": "good"}
