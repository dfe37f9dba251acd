"""The token record: masks, budgets and rewards, worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from support.rollouts import frameless_chat, make_generation, make_limits, make_requests
from support.tokenizers import make_tokenizer

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.errors import ConfigError, EngineError
from agentgym_rl.rollout.handler import RewardRule, RolloutHandler
from agentgym_rl.rollout.statistics import split_segments
from agentgym_rl.types import FinishReason, Message, Role, StepOutput, StopReason

START = (Message(Role.USER, "Be good."), Message(Role.ASSISTANT, "OK."), Message(Role.USER, "Goal: log"))


def make_handler(chat: ChatTemplate, *, rewards: RewardRule | None = None, **limits: int) -> RolloutHandler:
    request = make_requests([7])[0]
    return RolloutHandler(request, START, chat, make_limits(**limits), max_rounds=10, rewards=rewards)


def check_equal_lengths(handler: RolloutHandler) -> None:
    columns = (handler.input_ids, handler.attention_mask, handler.position_ids, handler.loss_mask)
    columns += (handler.sequence_ids, handler.rollout_log_probs)
    assert {len(column) for column in columns} == {handler.num_tokens}
    assert handler.position_ids.tolist() == list(range(handler.num_tokens))
    assert handler.attention_mask.all()


def test_the_ids_that_were_sampled_are_the_ids_that_are_stored():
    tokenizer = make_tokenizer()
    chat = ChatTemplate(tokenizer)
    he, llo = tokenizer.convert_tokens_to_ids(["h", "e"]), tokenizer.convert_tokens_to_ids(["l", "l", "o"])
    sampled = [*he, *llo, chat.end_of_turn_id]
    assert len(tokenizer.encode("hello")) < len(he + llo)
    handler = make_handler(chat)
    text = handler.append_generation(make_generation(sampled))
    assert text == "hello"
    assert handler.input_ids[handler.prompt_length :].tolist() == sampled


def test_the_mask_is_one_exactly_on_sampled_tokens():
    chat = ChatTemplate(make_tokenizer())
    handler = make_handler(chat)
    for turn in range(3):
        handler.append_generation(make_generation(chat.encode_answer(f"Action: {turn}")))
        handler.append_step(StepOutput("Got 1 oak log", 0.0, False))
        assert handler.append_observation("Got 1 oak log")
        check_equal_lengths(handler)
    trajectory = handler.finish(StopReason.MAX_ROUNDS)
    sampled = trajectory.input_ids[trajectory.loss_mask == 1].tolist()
    assert sampled == [id for turn in range(3) for id in chat.encode_answer(f"Action: {turn}")]
    assert ((trajectory.rollout_log_probs != 0) == (trajectory.loss_mask == 1)).all()
    assert set(trajectory.sequence_ids[trajectory.loss_mask == 1]) == {3, 5, 7}
    # The separator newline follows each end-of-turn and is not the model's.
    ends = np.flatnonzero((trajectory.input_ids == chat.end_of_turn_id) & (trajectory.loss_mask == 1))
    newline = make_tokenizer().encode("\n")
    assert [trajectory.input_ids[end + 1] for end in ends] == newline * 3
    assert trajectory.loss_mask[ends + 1].tolist() == [0, 0, 0]


def test_a_turn_cut_by_its_token_limit_gets_its_end_of_turn_with_mask_zero():
    tokenizer = make_tokenizer()
    chat = ChatTemplate(tokenizer)
    handler = make_handler(chat)
    ids = chat.encode_answer("Thought: I need")[:-1]
    handler.append_generation(make_generation(ids, finish_reason=FinishReason.LENGTH))
    assert handler.input_ids[-1] == chat.end_of_turn_id
    assert handler.loss_mask[-2:].tolist() == [1, 0]
    handler.append_step(StepOutput("no action", 0.0, False))
    handler.append_observation("no action")
    text = tokenizer.decode(handler.input_ids[handler.prompt_length :])
    assert text == "Thought: I need<|im_end|>\n<|im_start|>user\nno action<|im_end|>\n<|im_start|>assistant\n"


def test_turns_of_40_tokens_in_a_response_of_100_get_40_40_20():
    chat = frameless_chat()
    handler = make_handler(chat, max_response_length=100, max_tokens=40)
    budgets = []
    while handler.turn_budget():
        budgets.append(handler.turn_budget())
        ids = [5] * (budgets[-1] - 1) + [chat.end_of_turn_id if budgets[-1] == 40 else 5]
        handler.append_generation(make_generation(ids))
        handler.append_step(StepOutput("", 0.0, False))
        assert handler.append_observation("")
    assert budgets == [40, 40, 20]
    assert handler.num_tokens - handler.prompt_length == 100
    check_equal_lengths(handler)


def test_the_added_end_of_turn_counts_in_the_budget():
    chat = frameless_chat()
    handler = make_handler(chat, max_response_length=100, max_tokens=40)
    budgets = []
    while handler.turn_budget():
        budgets.append(handler.turn_budget())
        handler.append_generation(make_generation([5] * budgets[-1], finish_reason=FinishReason.LENGTH))
        handler.append_step(StepOutput("", 0.0, False))
        handler.append_observation("")
    assert budgets == [40, 40, 18]  # 41 + 41 + 18
    assert handler.num_tokens - handler.prompt_length == 100


def test_an_observation_that_does_not_fit_is_not_appended():
    chat = ChatTemplate(make_tokenizer())
    handler = make_handler(chat, max_response_length=200)
    handler.append_generation(make_generation(chat.encode_answer("Action: look")))
    handler.append_step(StepOutput("", 0.0, False))
    before, messages = handler.num_tokens, list(handler.messages)
    assert not handler.append_observation("log " * 10_000)
    assert handler.num_tokens == before
    assert handler.messages == messages
    check_equal_lengths(handler)


def test_the_whole_sequence_stays_within_the_models_length():
    chat = frameless_chat()
    prompt = make_handler(chat).prompt_length
    handler = make_handler(chat, max_model_len=prompt + 60, max_response_length=1000, max_tokens=100)
    assert handler.turn_budget() == 60
    handler.append_generation(make_generation([5] * 60, finish_reason=FinishReason.LENGTH))
    handler.append_step(StepOutput("", 1.0, False))
    assert handler.turn_budget() == 0
    assert handler.finish(StopReason.LENGTH).num_tokens == prompt + 60


def test_a_prompt_that_is_too_long_names_the_item_and_both_lengths():
    length = make_handler(frameless_chat()).prompt_length
    with pytest.raises(ConfigError, match=f"toy_7.*{length} tokens.*max_prompt_length={length - 1}"):
        make_handler(frameless_chat(), max_prompt_length=length - 1)
    make_handler(frameless_chat(), max_prompt_length=length)


@pytest.mark.parametrize(("is_cumulative", "reported"), [(True, [0.2, 0.5, 1.0]), (False, [0.2, 0.3, 0.5])])
def test_step_rewards_stand_on_the_last_sampled_token_of_their_turns_and_sum_to_the_score(is_cumulative, reported):
    chat = ChatTemplate(make_tokenizer())
    handler = make_handler(chat, rewards=RewardRule(is_cumulative))
    ends = []
    for reward in reported:
        handler.append_generation(make_generation(chat.encode_answer("Action: look")))
        ends.append(handler.num_tokens - 1)
        handler.append_step(StepOutput("seen", reward, False))
        handler.append_observation("seen")
    trajectory = handler.finish(StopReason.MAX_ROUNDS)
    assert np.flatnonzero(trajectory.token_rewards).tolist() == ends
    np.testing.assert_allclose(trajectory.token_rewards[ends], [0.2, 0.3, 0.5], rtol=1e-6)
    np.testing.assert_allclose([turn.reward for turn in trajectory.turns], [0.2, 0.3, 0.5])
    assert trajectory.score == pytest.approx(1.0)
    assert trajectory.success


def test_rewards_of_an_environment_that_counts_to_a_hundred_are_scaled_to_one():
    def trajectory_of(reported):
        chat = ChatTemplate(make_tokenizer())
        handler = make_handler(chat, rewards=RewardRule(is_cumulative=True, success_score=100.0, scale=0.01))
        for reward in reported:
            handler.append_generation(make_generation(chat.encode_answer("Action: look")))
            handler.append_step(StepOutput("seen", reward, False))
            handler.append_observation("seen")
        return handler.finish(StopReason.MAX_ROUNDS)

    reached, missed, wrong = trajectory_of([20, 50, 100]), trajectory_of([20, 99]), trajectory_of([20, -100])
    np.testing.assert_allclose([turn.reward for turn in reached.turns], [0.2, 0.3, 0.5])
    assert (reached.score, missed.score, wrong.score) == pytest.approx((1.0, 0.99, -1.0))
    assert (reached.success, missed.success, wrong.success) == (True, False, False)


def test_the_reward_of_a_turn_cut_by_length_stands_before_the_added_end_of_turn():
    chat = ChatTemplate(make_tokenizer())
    handler = make_handler(chat)
    handler.append_generation(make_generation([70, 71], finish_reason=FinishReason.LENGTH))
    handler.append_step(StepOutput("seen", 1.0, True))
    trajectory = handler.finish(StopReason.DONE)
    assert trajectory.token_rewards[-2:].tolist() == [1.0, 0.0]
    assert trajectory.loss_mask[-2:].tolist() == [1, 0]


def test_an_empty_completion_writes_no_reward_anywhere():
    chat = ChatTemplate(make_tokenizer())
    handler = make_handler(chat)
    handler.append_generation(make_generation(chat.encode_answer("Action: look")))
    first = handler.num_tokens - 1
    handler.append_step(StepOutput("seen", 0.25, False))
    handler.append_observation("seen")
    handler.append_generation(make_generation([]))
    handler.append_step(StepOutput("nothing", 0.5, False))
    handler.append_observation("nothing")
    trajectory = handler.finish(StopReason.MAX_ROUNDS)
    assert np.flatnonzero(trajectory.token_rewards).tolist() == [first]
    assert trajectory.token_rewards[first] == 0.25
    assert trajectory.turns[1].num_tokens == 0


def test_a_turn_that_the_environment_never_answered_is_kept_without_observation():
    chat = ChatTemplate(make_tokenizer())
    handler = make_handler(chat)
    handler.append_generation(make_generation(chat.encode_answer("Action: look")))
    trajectory = handler.finish(StopReason.ENV_ERROR, "EnvTimeout: toy_7 turn 1")
    assert [turn.observation for turn in trajectory.turns] == [None]
    assert trajectory.masked
    assert not trajectory.success
    assert handler.stop_reason == StopReason.ENV_ERROR


def test_a_malformed_generation_is_the_engines_fault():
    handler = make_handler(ChatTemplate(make_tokenizer()), max_tokens=2)
    with pytest.raises(EngineError, match="sampled 3 tokens where 2 were allowed"):
        handler.append_generation(make_generation([70, 71, 72]))


def test_the_policy_version_is_that_of_the_oldest_weights():
    chat = ChatTemplate(make_tokenizer())
    handler = make_handler(chat)
    for version in (4, 5):
        handler.append_generation(make_generation(chat.encode_answer("Action: look"), version=version))
        handler.append_step(StepOutput("seen", 0.0, False))
        handler.append_observation("seen")
    assert handler.finish(StopReason.MAX_ROUNDS).policy_version == 4


def test_views_of_the_record_cannot_be_written():
    handler = make_handler(ChatTemplate(make_tokenizer()))
    with pytest.raises(ValueError, match="read-only"):
        handler.input_ids[0] = 1


def test_a_mask_splits_into_prompt_turns_and_observations():
    mask = np.array([0, 0, 1, 1, 0, 1, 1])
    assert mask.sum() == 4
    segments = [(segment.name, segment.start, segment.end) for segment in split_segments(mask)]
    assert segments == [("prompt", 0, 2), ("turn 1", 2, 4), ("observation", 4, 5), ("turn 2", 5, 7)]
    assert split_segments(np.array([])) == []
