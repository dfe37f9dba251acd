"""One trajectory made ready for its page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient
from support.viewer import make_trajectory, write_rows

from agentgym_rl.rollout.log import to_row
from agentgym_rl.rollout.token_values import read_token_values, token_values_file, write_token_values
from agentgym_rl.types import Aside, FinishReason, Message, Part, PartKind, Role, StopReason
from agentgym_rl.viewer.app import build_app
from agentgym_rl.viewer.library import Library
from agentgym_rl.viewer.records import record_of
from agentgym_rl.viewer.vocabulary import find_tokenizer, spell


def as_row(trajectory: Any) -> bytes:
    return json.dumps(to_row(trajectory)).encode()


def client(root: Path) -> TestClient:
    return TestClient(build_app(Library(root)), base_url="http://127.0.0.1")


def test_a_mask_is_split_into_prompt_turn_observation_turn() -> None:
    """Case 10: the response's length by mask is 4."""
    mask = [0, 0, 1, 1, 0, 1, 1]
    columns = {"loss_mask": mask, "input_ids": [1] * 7, "sequence_ids": [0, 0, 1, 1, 2, 3, 3], "token_rewards": []}
    row = to_row(make_trajectory(1)) | columns | {"rollout_log_probs": [0.0] * 7}
    tokens = record_of(json.dumps(row).encode())["tokens"]
    assert tokens["segments"] == [["prompt", 0, 2], ["turn 1", 2, 4], ["observation", 4, 5], ["turn 2", 5, 7]]
    assert sum(end - start for name, start, end in tokens["segments"] if name.startswith("turn")) == 4


def test_messages_come_in_pieces_that_give_the_whole_text_again_whatever_its_characters() -> None:
    trajectory = make_trajectory(1, turns=[("I 🤔 so", "get 1 🪵", "ok"), ("done 🎉", "stop", "bye")], opening="🌍 Go.")
    record = record_of(as_row(trajectory))
    texts = ["".join(text for _, text in message["pieces"]) for message in record["messages"]]
    assert texts == [message.content for message in trajectory.messages]
    assert record["messages"][3]["pieces"] == [
        *(["", "Thought: "], ["thought", "I 🤔 so"], ["", "\nAction: "], ["action", "get 1 🪵"])
    ]
    assert [message["turn"] for message in record["messages"]] == [None, None, None, 0, None, 1]
    assert [turn["message"] for turn in record["turns"]] == [3, 5]
    starts = [message["tokens"][0] for message in record["messages"]]
    assert starts == sorted(starts) and record["messages"][-1]["tokens"][1] == trajectory.num_tokens


def test_a_reflection_after_the_last_turn_is_an_aside_and_no_turn() -> None:
    plain = make_trajectory(1)
    said = (*plain.messages, Message(Role.USER, "Why?"), Message(Role.ASSISTANT, "I was hasty."))
    parts = (*plain.parts, (Part(PartKind.INSTRUCTION, 0, 4),), (Part(PartKind.REFLECTION, 0, 12),))
    aside = Aside(PartKind.REFLECTION, 5, FinishReason.STOP, 3, 0.2)
    record = record_of(as_row(make_trajectory(1, messages=said, parts=parts, asides=(aside,), num_trials=2)))
    assert [(message["turn"], message["aside"]) for message in record["messages"]][3:] == [
        *((0, None), (None, None), (None, "reflection"))
    ]


def test_rows_that_do_not_tell_parts_get_thought_and_action_where_they_stand() -> None:
    row = to_row(make_trajectory(1, turns=[("Look first.", "look", "Dark.")])) | {"parts": []}
    messages = record_of(json.dumps(row).encode())["messages"]
    assert messages[1]["pieces"] == [["acknowledgement", "OK."]]
    assert [kind for kind, _ in messages[3]["pieces"]] == ["", "thought", "", "action"]


def test_conversations_alone_have_turns_and_no_tokens() -> None:
    said = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "Action: north"}]
    record = record_of(json.dumps({"item_id": "maze_3", "conversations": said}).encode())
    assert record["tokens"] is None
    assert [turn["message"] for turn in record["turns"]] == [1]
    assert record["messages"][1]["pieces"] == [["", "Action: "], ["action", "north"]]


def test_a_fault_before_the_first_message_has_a_record(tmp_path: Path) -> None:
    fault = make_trajectory(1, turns=(), messages=(), parts=(), stop_reason=StopReason.ENV_ERROR, error="EnvFull: no")
    write_rows(tmp_path / "0.jsonl", [to_row(fault) | {"input_ids": [], "loss_mask": [], "sequence_ids": []}])
    opened = client(tmp_path)
    [summary] = opened.get("/api/trajectories").json()["rows"]
    record = opened.get(f"/api/trajectories/{summary['id']}").json()
    assert (record["messages"], record["turns"], record["tokens"]) == ([], [], None)


@pytest.mark.parametrize(
    "spoiled",
    [
        {"conversations": "text"},
        {"conversations": [1, 2]},
        {"parts": [[["thought", "a", None]]] * 5},
        {"turns": [{"num_tokens": 1}] * 9},
        {"asides": [{"message": 99, "num_tokens": 0}]},
        {"sequence_ids": ["x"]},
        {"loss_mask": [[1]]},
        {"extra": 3},
        {"token_rewards": None},
        {"uid": "\ud83d"},
    ],
)
def test_a_spoiled_row_is_shown_or_refused_and_never_a_fault_of_the_server(
    tmp_path: Path, spoiled: dict[str, Any]
) -> None:
    (tmp_path / "0.jsonl").write_text(json.dumps(to_row(make_trajectory(1)) | spoiled) + "\n")
    opened = client(tmp_path)
    for summary in opened.get("/api/trajectories").json()["rows"]:
        answer = opened.get(f"/api/trajectories/{summary['id']}")
        assert answer.status_code in (200, 422)


# ------------------------------------------------------------------------------------------------- values and spelling


def test_values_of_tokens_are_read_back_for_each_trajectory(tmp_path: Path) -> None:
    rows = [make_trajectory(index, sample=sample) for index in (1, 2) for sample in (0, 1)]
    lengths = [2, 0, 3, 1]
    advantages = np.array([0.5, -0.1, 1, 2, 3, 9], np.float64)
    path = token_values_file(tmp_path, 7)
    write_token_values(path, rows, lengths, {"advantages": advantages})
    assert path == tmp_path / "token_values" / "step7.npz"

    def of(index: int, sample: int, trial: int = 1) -> list[float]:
        columns = read_token_values(path, uid=f"step1/textcraft_{index}", sample_index=sample, trial=trial)
        return columns["advantages"].tolist() if columns else []

    assert of(2, 0) == [1, 2, 3] and of(2, 1) == [9] and of(1, 1) == [] and of(1, 0, trial=2) == []
    assert of(1, 0) == np.array([0.5, -0.1], np.float32).tolist()
    with pytest.raises(ValueError, match=r"values: shape \(2,\), there are 6 sampled tokens"):
        write_token_values(path, rows, lengths, {"values": np.zeros(2)})


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", b"not an archive"])
def test_an_unreadable_archive_has_no_values(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "step1.npz"
    path.write_bytes(content)
    assert read_token_values(path, uid="a", sample_index=0, trial=1) == {}


def test_values_stand_at_sampled_tokens_and_are_null_elsewhere(tmp_path: Path) -> None:
    trajectory = make_trajectory(1)
    sampled = trajectory.num_sampled_tokens
    write_token_values(token_values_file(tmp_path, 1), [trajectory], [sampled], {"advantages": np.full(sampled, 0.1)})
    values = record_of(as_row(trajectory), run_folder=tmp_path, step=1)["tokens"]["values"]["advantages"]
    assert values == [0.1 if mask else None for mask in trajectory.loss_mask.tolist()]
    assert record_of(as_row(trajectory), run_folder=tmp_path, step=2)["tokens"]["values"] == {}


def write_tokenizer(path: Path, model: dict[str, Any], **fields: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"model": model, **fields}))
    return path


def test_byte_level_tokens_are_spelled_as_text(tmp_path: Path) -> None:
    vocab = {"Ġcraft": 0, "Ċ": 1, "Ã©": 2, "Ã": 3, "<|end|>": 4}
    path = write_tokenizer(
        tmp_path / "tokenizer.json",
        {"vocab": vocab},
        decoder={"type": "Sequence", "decoders": [{"type": "ByteLevel"}]},
        added_tokens=[{"id": 4, "content": "<|end|>"}],
    )
    assert spell(path, [0, 1, 2, 3, 4, 99]) == [" craft", "\n", "é", "\\xc3", "<|end|>", "<99>"]


def test_sentencepiece_and_word_tokens_are_spelled_as_text(tmp_path: Path) -> None:
    pieces = [["<unk>", 0.0], ["▁go", -1.0], ["<0x0A>", -2.0], ["<0xE2>", -2.0]]
    path = write_tokenizer(tmp_path / "a.json", {"vocab": pieces}, pre_tokenizer={"type": "Metaspace"})
    assert spell(path, [1, 2, 3]) == [" go", "\n", "\\xe2"]
    words = write_tokenizer(tmp_path / "b.json", {"vocab": {"w0": 0}}, pre_tokenizer={"type": "WhitespaceSplit"})
    assert spell(words, [0]) == ["w0"]
    (tmp_path / "c.json").write_text("{")
    assert spell(tmp_path / "c.json", [0]) is None


def test_the_tokenizer_beside_the_values_comes_first_then_the_newest_checkpoints(tmp_path: Path) -> None:
    assert find_tokenizer(tmp_path, tmp_path) is None
    for step in (9, 10):
        write_tokenizer(tmp_path / f"global_step_{step}/actor/huggingface/tokenizer.json", {"vocab": {}})
    newest = find_tokenizer(tmp_path, tmp_path)
    assert newest is not None and "global_step_10" in str(newest)
    own = write_tokenizer(tmp_path / "token_values/tokenizer.json", {"vocab": {}})
    assert find_tokenizer(tmp_path, tmp_path) == own


def test_an_evaluation_is_spelled_by_its_models_tokenizer_where_the_viewer_may_look(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "shown/sft/huggingface/tokenizer.json", {"vocab": {"w": 0}})
    outside = write_tokenizer(tmp_path / "outside/tokenizer.json", {"vocab": {"w": 0}})
    run = tmp_path / "shown/eval"
    run.mkdir()
    for path, found in ((model, model), (outside, None), (tmp_path / "none/tokenizer.json", None)):
        (run / "settings.json").write_text(json.dumps({"model.path": str(path.parent), "data.seed": 0}))
        assert find_tokenizer(run, tmp_path / "shown") == found
    (run / "settings.json").write_text("[]")
    assert find_tokenizer(run, tmp_path / "shown") is None
