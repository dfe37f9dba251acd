from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.batches import batch_of, random_batch
from support.rollouts import make_limits, make_requests
from support.tokenizers import make_tokenizer

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.rollout.handler import RolloutHandler
from agentgym_rl.rollout.log import TrajectoryLog, read_trajectories
from agentgym_rl.types import FinishReason, Generation, Item, Message, Role, StepOutput, StopReason, Trajectory
from verl.protocol import DataProto, group_code


def trajectory(ids, mask, *, uid="a", score=0.0, stop_reason=StopReason.DONE) -> Trajectory:
    rewards = np.zeros(len(ids), np.float32)
    rewards[-1] = score
    return Trajectory(
        item=Item("textcraft", 0),
        uid=uid,
        sample_index=0,
        attempt=1,
        messages=(),
        turns=(),
        input_ids=np.array(ids, np.int32),
        loss_mask=np.array(mask, np.int8),
        sequence_ids=np.zeros(len(ids), np.int32),
        rollout_log_probs=-np.array(mask, np.float32),
        token_rewards=rewards,
        prompt_length=1,
        score=score,
        success=score > 0,
        stop_reason=stop_reason,
        policy_version=0,
        max_rounds=1,
        duration_s=0.0,
    )


def test_trajectories_are_laid_end_to_end_without_padding():
    batch = DataProto.from_trajectories(
        [trajectory([7, 8, 9], [0, 1, 1], uid="a", score=1.0), trajectory([5, 6], [0, 1], uid="b")]
    )
    assert batch.offsets_B1.tolist() == [0, 3, 5]
    assert batch.input_ids_T.tolist() == [7, 8, 9, 5, 6]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 0, 1]
    assert batch.loss_mask_T.tolist() == [False, True, True, False, True]
    assert batch.rollout_log_probs_T.tolist() == [0, -1, -1, 0, -1]
    assert batch.token_rewards_T.tolist() == [0, 0, 1, 0, 0]
    assert batch.scores_B.tolist() == [1.0, 0.0] and batch.scores_B.dtype == torch.float64
    assert batch.group_ids_B.tolist() == [group_code("a"), group_code("b")]
    assert batch.sequence_index_T.tolist() == [0, 0, 0, 1, 1]
    assert batch.lengths_B.tolist() == [3, 2] and batch.sampled_lengths_B.tolist() == [2, 1]
    assert (len(batch), batch.num_tokens, batch.num_sampled_tokens) == (2, 5, 3)


def test_rollouts_read_back_from_their_file_give_the_batch_that_was_trained_on(tmp_path):
    chat = ChatTemplate(make_tokenizer())
    handlers = []
    for item, request in enumerate(make_requests([3, 4])):
        handler = RolloutHandler(request, (Message(Role.USER, "Goal: log"),), chat, make_limits(), max_rounds=9)
        for turn in range(item + 1):
            ids = chat.encode_answer(f"Action: look {turn}")
            log_probs = tuple(-0.1 * (index + 1) / 3 for index in range(len(ids)))
            handler.append_generation(Generation(ids, log_probs, FinishReason.STOP, 5))
            handler.append_step(StepOutput("seen", 0.1 * (turn + 1), False))
            handler.append_observation("seen")
        handlers.append(handler)
    trajectories = [handler.finish(StopReason.MAX_ROUNDS) for handler in handlers]
    with TrajectoryLog(tmp_path / "0.jsonl") as log:
        for written in trajectories:
            log.write(written)
    batch = DataProto.from_trajectories(trajectories)
    again = DataProto.from_trajectories(read_trajectories(tmp_path).trajectories)
    for name, tensor in batch._tensors():
        assert torch.equal(tensor, getattr(again, name)), name
    for row, handler in enumerate(handlers):
        one = batch.select([row])
        assert one.input_ids_T.tolist() == handler.input_ids.tolist()
        assert one.position_ids_T.tolist() == handler.position_ids.tolist()
        assert one.loss_mask_T.tolist() == handler.loss_mask.astype(bool).tolist()
        assert one.rollout_log_probs_T.tolist() == handler.rollout_log_probs.tolist()
        assert len(handler.attention_mask) == one.num_tokens  # nothing is padded
        assert float(one.token_rewards_T.sum()) == pytest.approx(handler.score)


def test_a_fault_keeps_its_row_and_gets_no_loss():
    batch = DataProto.from_trajectories(
        [trajectory([7, 8], [0, 1], stop_reason=StopReason.ENV_ERROR), trajectory([5, 6], [0, 1])]
    )
    assert batch.masked_B.tolist() == [True, False]
    assert batch.loss_mask_T.tolist() == [False, False, False, True]


def test_the_same_uid_has_the_same_code_in_batches_made_apart():
    first, second = (DataProto.from_trajectories([trajectory([1, 2], [0, 1], uid="step3/item7")]) for _ in range(2))
    assert first.group_ids_B.tolist() == second.group_ids_B.tolist()


@pytest.mark.parametrize(
    ("ids", "masks", "message"),
    [
        ([[1, 2], []], [[0, 1], []], "sequence 1 has no tokens"),
        ([[1, 2]], [[0]], "sequence 0 has 2 tokens and a loss mask of length 1"),
        ([[1, 2]], [[1, 1]], "sequence 0: its first token has loss mask 1"),
    ],
)
def test_impossible_sequences_are_refused_by_number(ids, masks, message):
    with pytest.raises(ValueError, match=message):
        DataProto.from_sequences(ids, masks)


@given(st.lists(st.integers(0, 3), max_size=6))
def test_select_takes_whole_sequences_in_any_order(indices):
    batch = random_batch([5, 2, 9, 3])
    picked = batch.select(indices)
    assert len(picked) == len(indices)
    for place, index in enumerate(indices):
        alone = batch.select([index])
        part = slice(int(picked.offsets_B1[place]), int(picked.offsets_B1[place + 1]))
        for name in ("input_ids_T", "position_ids_T", "loss_mask_T", "advantages_T"):
            assert torch.equal(getattr(picked, name)[part], getattr(alone, name))
        assert picked.group_ids_B[place] == batch.group_ids_B[index]
    assert torch.equal(batch.input_ids_T[batch.token_positions(indices)], picked.input_ids_T)


def test_concat_undoes_a_split():
    batch = random_batch([5, 2, 9, 3])
    joined = DataProto.concat([batch.select([0, 1]), batch.select([]), batch.select([2, 3])])
    for name in ("offsets_B1", "input_ids_T", "position_ids_T", "loss_mask_T", "advantages_T", "group_ids_B"):
        assert torch.equal(getattr(joined, name), getattr(batch, name))
    assert joined.old_log_probs_T is None


def test_concat_refuses_a_field_that_only_some_batches_have():
    batch = random_batch([5])
    with pytest.raises(ValueError, match="advantages_T is set in some batches and missing in others"):
        DataProto.concat([batch, batch.replace(advantages_T=None)])


def test_pickling_costs_no_more_than_the_tensors_and_gives_them_back():
    whole = random_batch([2000, 4])
    small = whole.select([1])
    assert len(pickle.dumps(small, protocol=5)) < 4000
    again = pickle.loads(pickle.dumps(whole, protocol=5))
    assert torch.equal(again.input_ids_T, whole.input_ids_T) and again.scores_B.dtype == torch.float64
    again.input_ids_T[0] = 0  # writable


def test_buffers_out_of_band_carry_the_tokens():
    buffers: list[pickle.PickleBuffer] = []
    batch = random_batch([4000])
    stream = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    assert len(stream) < 4000
    again = pickle.loads(stream, buffers=[bytes(buffer) for buffer in buffers])  # read-only, as from Ray
    assert torch.equal(again.advantages_T, batch.advantages_T)


def test_an_empty_batch_has_no_sequences():
    empty = batch_of([[1]]).select([])
    assert (len(empty), empty.num_tokens, empty.num_sampled_tokens) == (0, 0, 0)
