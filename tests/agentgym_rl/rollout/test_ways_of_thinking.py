"""Plans, reflections and function calls through the collector: what is asked, shown, sampled, kept and counted."""

from __future__ import annotations

import asyncio

import pytest
from support.rollouts import ScriptedClient, ScriptedEngine, ends_after, make_limits, make_requests, make_settings
from support.tokenizers import make_tokenizer

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.agent.strategies import AgentChoice
from agentgym_rl.data.conversations import Conversation
from agentgym_rl.errors import EnvServerError
from agentgym_rl.hosted.evaluation import without_characters
from agentgym_rl.rollout.collector import by_sample, collect
from agentgym_rl.rollout.log import from_row, to_row
from agentgym_rl.types import PartKind, Role, StepOutput, StopReason


@pytest.fixture(scope="module")
def chat() -> ChatTemplate:
    return ChatTemplate(make_tokenizer())


class Writer(ScriptedEngine):
    """Writes what ``write(trial, turn)`` says."""

    def __init__(self, chat, write):
        super().__init__(chat)
        self._write = write

    async def generate(self, prompt_ids, sampling, *, trajectory_id):
        trial = int(trajectory_id.split("/")[-2])
        self._answer = lambda turn: self._write(trial, turn)
        return await super().generate(prompt_ids, sampling, trajectory_id=trajectory_id)


def roll_out(chat, write, script, *, agent="react", action_format="react", client=ScriptedClient, n=1, **settings):
    choice = AgentChoice(agent, action_format, settings.pop("max_trials", 3))
    settings.setdefault("limits", make_limits(max_tokens=200))
    engine = Writer(chat, write)
    made = asyncio.run(
        collect(
            make_requests([7], n=n),
            engine,
            make_client=lambda: client(script),
            chat=chat,
            settings=make_settings(agent=choice, **settings),
        )
    )
    for trajectory in made:
        check_mask(trajectory, chat)
        assert_survives_its_file(trajectory)
        assert_says_who_wrote_what_without_tokens(trajectory)
    return made, engine


def check_mask(trajectory, chat):
    """The mask covers exactly what the model wrote: every assistant message but the acknowledgement, whole."""
    written = [i for i, m in enumerate(trajectory.messages) if m.role == Role.ASSISTANT and i > 1]
    mask = trajectory.loss_mask == 1
    assert sorted(set(trajectory.sequence_ids[mask].tolist())) == written
    for index in written:
        ids = trajectory.input_ids[mask & (trajectory.sequence_ids == index)]
        assert chat.decode(ids) == trajectory.messages[index].content


def assert_survives_its_file(trajectory):
    read = from_row(to_row(trajectory), "here")
    for name in ("parts", "asides", "trial", "num_trials", "reflection_reward", "messages", "turns", "score"):
        assert getattr(read, name) == getattr(trajectory, name)


def assert_says_who_wrote_what_without_tokens(trajectory):
    """A hosted model's trajectory has no tokens; what the model wrote of it is trained on all the same, and no more."""
    written = [m.role == Role.ASSISTANT and i > 1 for i, m in enumerate(trajectory.messages)]
    for each in (trajectory, without_characters(trajectory)):
        row = to_row(each)
        assert [bool(entry["loss"]) for entry in row["conversations"]] == written
        assert [bool(flag) for flag in Conversation.of(each).train_flags] == written


def shown(trajectory, index):
    """The parts of a message as texts by kind."""
    content = trajectory.messages[index].content
    return [(str(part.kind), content[part.start : part.end]) for part in trajectory.parts[index]]


def test_a_turn_of_react_is_a_thought_and_an_action_and_its_answer_an_observation(chat):
    (trajectory,), _ = roll_out(chat, lambda trial, turn: "Thought: so be it\nAction: go on.", ends_after(1))
    assert shown(trajectory, 1) == [("acknowledgement", "OK.")]
    assert shown(trajectory, 2) == [("observation", "observation 0 of 7")]
    assert shown(trajectory, 3) == [("thought", "so be it"), ("action", "go on.")]
    assert trajectory.asides == () and (trajectory.trial, trajectory.num_trials) == (1, 1)


PLAN_TURNS = (
    "Plan: 1. look\n2. go",
    "Thought: first\nAction: look",
    "Plan: jump\nThought: better\nAction: go",
    "Action: jump",
)


def test_a_plan_comes_before_the_first_action_stays_in_view_and_is_replaced_when_the_agent_says_so(chat):
    (trajectory,), engine = roll_out(chat, lambda trial, turn: PLAN_TURNS[turn], ends_after(3), agent="plan")
    assert len(engine.requests) == 4
    assert [str(m.role) for m in trajectory.messages] == ["user", "assistant"] * 5
    assert shown(trajectory, 2)[0] == ("observation", "observation 0 of 7")
    assert shown(trajectory, 3) == [("plan", "1. look\n2. go")]
    assert shown(trajectory, 5) == [("thought", "first"), ("action", "look")]
    assert shown(trajectory, 6) == [("observation", "observation 1 of 7"), ("plan", "1. look\n2. go")]
    assert shown(trajectory, 7) == [("plan", "jump"), ("thought", "better"), ("action", "go")]
    assert shown(trajectory, 8) == [("observation", "observation 2 of 7"), ("plan", "jump")]
    assert [(aside.kind, aside.message) for aside in trajectory.asides] == [(PartKind.PLAN, 3)]
    assert [turn.text for turn in trajectory.turns] == list(PLAN_TURNS[1:])
    assert trajectory.stop_reason == StopReason.DONE and trajectory.score == 1.0


def test_a_plan_is_no_round(chat):
    (trajectory,), _ = roll_out(chat, lambda trial, turn: f"step {turn}", ends_after(9), agent="plan", max_rounds=2)
    assert (len(trajectory.turns), len(trajectory.asides)) == (2, 1)
    assert trajectory.stop_reason == StopReason.MAX_ROUNDS


def reflect_on(trial, turn):
    return f"Reflection: lesson {trial}" if turn == 2 else f"Thought: trial {trial}\nAction: {turn}"


def third_time(item, step, text):
    """Done after two steps; only a third trial is rewarded."""
    return StepOutput(f"observation {step}", 1.0 if "trial 3" in text and step == 2 else 0.0, step == 2)


def test_a_failed_trial_is_reflected_on_and_the_next_one_has_that_in_view(chat):
    trials, _ = roll_out(chat, reflect_on, third_time, agent="reflect", max_trials=5)
    assert [(t.trial, t.num_trials, t.score, t.success) for t in trials] == [
        *((1, 3, 0.0, False), (2, 3, 0.0, False), (3, 3, 1.0, True)),
    ]
    first, second, third = trials
    assert [t.reflection_reward for t in trials] == [0.0, 1.0, None]
    # The request shows what the last action did, which the agent would not have seen otherwise.
    assert [kind for kind, _ in shown(first, 6)] == ["observation", "instruction"]
    assert first.messages[6].content.startswith("observation 2\n\nYou have not reached the goal")
    assert shown(first, 7) == [("reflection", "lesson 1")]
    assert (first.reflection.message, first.reflection.kind) == (7, PartKind.REFLECTION)
    assert shown(second, 2)[1:] == [("reflection", "lesson 1"), ("observation", "observation 0")]
    assert shown(third, 2)[1:] == [
        ("reflection", "lesson 1"),
        ("reflection", "lesson 2"),
        ("observation", "observation 0"),
    ]
    assert third.reflection is None and len(third.messages) == 6
    assert {(t.uid, t.sample_index) for t in trials} == {("toy_7", 0)}


def test_trials_end_with_success_and_with_the_last_that_is_allowed(chat):
    made, _ = roll_out(chat, reflect_on, ends_after(2), agent="reflect")
    assert [t.num_trials for t in made] == [1]
    made, _ = roll_out(chat, reflect_on, third_time, agent="reflect", max_trials=2)
    assert [(t.trial, t.num_trials, t.reflection is None) for t in made] == [(1, 2, False), (2, 2, True)]
    assert not made[-1].success


def test_every_trial_draws_its_own_random_numbers_and_a_resumed_one_the_same(chat):
    def seeds():
        engine = Writer(chat, reflect_on)
        requests = [request.__class__(**{**_fields(request), "seed": 11}) for request in make_requests([7])]
        settings = make_settings(agent=AgentChoice("reflect"), limits=make_limits(max_tokens=200))
        asyncio.run(
            collect(requests, engine, make_client=lambda: ScriptedClient(third_time), chat=chat, settings=settings)
        )
        return [sampling.seed for _, _, sampling in engine.requests]

    drawn = seeds()
    assert len(drawn) == len(set(drawn)) == 8  # two turns and a reflection, twice, and two turns
    assert seeds() == drawn


def _fields(request):
    return {name: getattr(request, name) for name in ("item", "uid", "sample_index", "greedy")}


def test_what_a_later_trial_sees_may_be_longer_than_a_prompt_at_the_cost_of_its_response(chat):
    trials, _ = roll_out(chat, reflect_on, third_time, agent="reflect")
    length = trials[0].prompt_length
    limits = make_limits(max_prompt_length=length, max_response_length=300, max_tokens=200)
    again, engine = roll_out(chat, reflect_on, third_time, agent="reflect", limits=limits)
    assert again[1].prompt_length > length
    assert all(len(ids) + sampling.max_tokens <= length + 300 for _, ids, sampling in engine.requests)


def test_without_room_for_a_reflection_a_failure_is_the_end(chat):
    trials, _ = roll_out(chat, reflect_on, third_time, agent="reflect")
    cut = int((trials[0].sequence_ids < 6).sum()) - trials[0].prompt_length
    limits = make_limits(max_response_length=cut + 5, max_tokens=200)
    made, _ = roll_out(chat, reflect_on, third_time, agent="reflect", limits=limits)
    assert [(t.num_trials, t.stop_reason, t.reflection) for t in made] == [(1, StopReason.DONE, None)]


def test_a_fault_in_a_later_trial_masks_that_trial_and_leaves_its_reflection_without_reward(chat):
    def script(item, step, text):
        if "trial 2" in text:
            raise EnvServerError("toy_7: HTTP 500")
        return StepOutput("seen", 0.0, step == 2)

    first, second = roll_out(chat, reflect_on, script, agent="reflect")[0]
    assert (first.masked, first.reflection_reward, first.num_trials) == (False, None, 2)
    assert second.masked and second.is_last_trial


def test_the_trials_of_each_sample_stay_together_in_the_order_of_the_requests(chat):
    trials, _ = roll_out(chat, reflect_on, third_time, agent="reflect", n=3)
    assert [(t.sample_index, t.trial) for t in trials] == [(s, k) for s in range(3) for k in (1, 2, 3)]
    assert [[t.trial for t in sample] for sample in by_sample(trials)] == [[1, 2, 3]] * 3


# ---------------------------------------------------------------------------------------------- functions and code


class CraftClient(ScriptedClient):
    action_forms = ("get <n> <item>", "inventory")
    example_action = "inventory"


class ScoreClient(CraftClient):
    reward_is_cumulative = True


CALLS = (
    '<tool_call>{"name": "fly", "arguments": {}}</tool_call>',
    '{"name": "get", "arguments": {"n": 1, "item": "log"}}',
)


def test_a_call_reaches_the_environment_as_the_action_that_it_stands_for(chat):
    heard = []

    def script(item, step, text):
        heard.append(text)
        return StepOutput("got it", 0.5, step == 1)

    (trajectory,), _ = roll_out(
        chat, lambda trial, turn: CALLS[turn], script, action_format="function_calling", client=ScoreClient
    )
    assert heard == ["", "Action: get 1 log"]
    # The first call fits no function: the agent is told so, at no cost and for no reward, and it is a turn.
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.5]
    assert "there is no function 'fly'; there are get(n, item), inventory()" in trajectory.turns[0].observation
    assert shown(trajectory, 3) == [("action", CALLS[0])]
    assert shown(trajectory, 4)[0][0] == "instruction"
    assert "get(n, item): get <n> <item>" in trajectory.messages[0].content


def test_a_refused_call_leaves_a_score_so_far_as_it_is(chat):
    turns = ("Action: get(1, 'log')", "Action: get()", "Action: inventory()")
    script = [0.0, 0.25, 1.0]
    (trajectory,), _ = roll_out(
        chat,
        lambda trial, turn: turns[turn],
        lambda item, step, text: StepOutput("seen", script[step], step == 2),
        action_format="code_as_action",
        client=ScoreClient,
    )
    assert [turn.reward for turn in trajectory.turns] == [0.25, 0.0, 0.75]
    assert trajectory.score == 1.0
