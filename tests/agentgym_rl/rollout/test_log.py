"""Trajectory files: written row by row, read back, torn rows tolerated."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import numpy as np
import pytest
from support.rollouts import ScriptedClient, ScriptedEngine, ends_after, make_requests, make_settings, make_trajectory
from support.tokenizers import make_tokenizer

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.errors import ConfigError, EnvServerError
from agentgym_rl.rollout.collector import collect
from agentgym_rl.rollout.log import TrajectoryLog, from_row, read_trajectories, to_row
from agentgym_rl.types import Item, Message, Role, StopReason, Trajectory


@pytest.fixture
def trajectory() -> Trajectory:
    chat = ChatTemplate(make_tokenizer())
    rollout = collect(
        make_requests([3]),
        ScriptedEngine(chat),
        make_client=lambda: ScriptedClient(ends_after(2)),
        chat=chat,
        settings=make_settings(),
    )
    return asyncio.run(rollout)[0]


def assert_same(read: Trajectory, written: Trajectory) -> None:
    for field in dataclasses.fields(Trajectory):
        ours, theirs = getattr(read, field.name), getattr(written, field.name)
        if isinstance(theirs, np.ndarray):
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)
        else:
            assert ours == theirs, field.name


def test_a_trajectory_is_read_back_as_it_was(tmp_path, trajectory):
    path = tmp_path / "step7" / "1.jsonl"
    assert path == tmp_path / "step7" / "1.jsonl"
    with TrajectoryLog(path) as log:
        log.write(trajectory)
    contents = read_trajectories(tmp_path)
    assert contents.torn == ()
    assert_same(contents.trajectories[0], trajectory)


def test_any_log_prob_is_read_back_to_the_last_bit(trajectory):
    bits = np.random.default_rng(0).integers(0, 2**32, trajectory.num_tokens, dtype=np.uint32)
    values = np.nan_to_num(bits.view(np.float32))
    written = dataclasses.replace(trajectory, rollout_log_probs=values)
    read = from_row(json.loads(json.dumps(to_row(written))), "a row")
    assert_same(read, written)


def test_a_line_is_what_pythons_json_writes_of_the_row_without_blanks(tmp_path, trajectory):
    odd = np.resize(np.array([0.0, -1e-7, -1e-5, -123456789.0, -np.inf], np.float32), trajectory.num_tokens)
    messages = (Message(Role.USER, 'é "\\ \x1f\u2028'), *trajectory.messages[1:])
    written = dataclasses.replace(trajectory, rollout_log_probs=odd, messages=messages)
    with TrajectoryLog(tmp_path / "0.jsonl") as log:
        log.write(written)
    line = json.dumps(to_row(written), ensure_ascii=False, separators=(",", ":"))
    assert (tmp_path / "0.jsonl").read_text(encoding="utf-8") == line + "\n"


def test_rows_have_the_published_fields(tmp_path, trajectory):
    with TrajectoryLog(tmp_path / "0.jsonl") as log:
        log.write(trajectory)
    row = json.loads((tmp_path / "0.jsonl").read_text())
    assert row["item_id"] == "toy_3"
    assert row["reward"] == 1.0
    assert [(entry["from"], entry["loss"]) for entry in row["conversations"]] == [
        *(("human", None), ("gpt", False), ("human", None)),  # instruction, acknowledgement, first observation
        *(("gpt", True), ("human", None), ("gpt", True)),
    ]
    assert row["token_rewards"] == [[len(row["input_ids"]) - 1, 1.0]]


def test_a_fault_has_no_reward_at_all(tmp_path):
    def script(item, step, text):
        raise EnvServerError("toy_3 reset: HTTP 500")

    chat = ChatTemplate(make_tokenizer())
    requests = make_requests([3, 4])
    good = ends_after(1)
    rollout = collect(
        requests,
        ScriptedEngine(chat),
        make_client=lambda: ScriptedClient(lambda i, s, t: script(i, s, t) if i == 3 else good(i, s, t)),
        chat=chat,
        settings=make_settings(),
    )
    fault = asyncio.run(rollout)[0]
    with TrajectoryLog(tmp_path / "0.jsonl") as log:
        log.write(fault)
    row = json.loads((tmp_path / "0.jsonl").read_text())
    assert row["reward"] is None
    assert row["error"] == "EnvServerError: toy_3 reset: HTTP 500"
    (read,) = read_trajectories(tmp_path).trajectories
    assert_same(read, fault)
    assert read.stop_reason == StopReason.ENV_ERROR


def test_a_torn_last_row_is_reported_and_removed_before_the_next(tmp_path):
    path = tmp_path / "0.jsonl"
    with TrajectoryLog(path) as log:
        for index in range(2):
            log.write(make_trajectory(Item("toy", index)))
    path.write_bytes(path.read_bytes()[:-40])
    contents = read_trajectories(path)
    assert [t.item.index for t in contents.trajectories] == [0]
    assert contents.torn == (path,)
    with TrajectoryLog(path) as log:
        log.write(make_trajectory(Item("toy", 2)))
    contents = read_trajectories(path)
    assert [t.item.index for t in contents.trajectories] == [0, 2]
    assert contents.torn == ()


def test_a_row_that_lacks_only_its_line_end_is_whole(tmp_path):
    path = tmp_path / "0.jsonl"
    with TrajectoryLog(path) as log:
        log.write(make_trajectory(Item("toy", 0)))
    path.write_bytes(path.read_bytes()[:-1])
    assert len(read_trajectories(path).trajectories) == 1
    with TrajectoryLog(path) as log:
        log.write(make_trajectory(Item("toy", 1)))
    assert [t.item.index for t in read_trajectories(path).trajectories] == [0, 1]


def test_a_log_that_does_not_append_starts_anew(tmp_path):
    for index in range(2):
        with TrajectoryLog(tmp_path / "0.jsonl", append=False) as log:
            log.write(make_trajectory(Item("toy", index)))
    assert [t.item.index for t in read_trajectories(tmp_path).trajectories] == [1]


def test_a_full_disk_is_an_error_that_names_the_file(trajectory):
    with (
        pytest.raises(OSError, match=r"No space left on device: '/dev/full'"),
        TrajectoryLog("/dev/full", append=False) as log,
    ):
        log.write(trajectory)


def test_a_broken_row_inside_a_file_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "0.jsonl"
    with TrajectoryLog(path) as log:
        log.write(make_trajectory(Item("toy", 0)))
    whole = path.read_text()
    path.write_text(whole + "{torn\n" + whole)
    with pytest.raises(ConfigError, match=r"0\.jsonl line 2 is not JSON"):
        read_trajectories(path)
    path.write_text(whole + '{"format": 99}\n')
    with pytest.raises(ConfigError, match=r"line 2: no trajectory of format 1 \(format='99'\)"):
        read_trajectories(path)
    path.write_text(json.dumps({k: v for k, v in json.loads(whole).items() if k != "turns"}) + "\n")
    with pytest.raises(ConfigError, match="line 1: KeyError: 'turns'"):
        read_trajectories(path)
    path.write_text(json.dumps(json.loads(whole) | {"input_ids": [1]}) + "\n")
    with pytest.raises(ConfigError, match="differ in length"):
        read_trajectories(path)


@pytest.mark.parametrize("value", [None, "x", 7, 10**30, [], ["x"], [[99, 1.0]], {}, {"x": 1}])
def test_a_field_of_any_wrong_form_is_an_error_that_names_the_row(value):
    """Whatever stands in a field, reading it either makes sense or says which row does not."""
    row = to_row(make_trajectory(Item("toy", 0)))
    for name in row:
        try:
            from_row(row | {name: value}, "file line 4")
        except ConfigError as error:
            assert str(error).startswith("file line 4")


@pytest.mark.parametrize("place", ["trajectories/0.jsonl", "trajectories/step1/0.jsonl", "one/trajectories/0.jsonl"])
def test_of_a_folder_that_keeps_other_records_too_the_trajectories_are_read(tmp_path, trajectory, place):
    """``usage.jsonl`` of an evaluation, ``metrics.jsonl`` of a training."""
    with TrajectoryLog(tmp_path / place) as log:
        log.write(trajectory)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "usage.jsonl").write_text('{"tokens": 3}\n')
    assert len(read_trajectories(tmp_path).trajectories) == 1


def test_a_folder_that_does_not_exist_holds_nothing(tmp_path):
    assert read_trajectories(tmp_path / "none").trajectories == ()
