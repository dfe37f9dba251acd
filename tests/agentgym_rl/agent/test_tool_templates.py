"""Function calling in a model's own chat template: functions in the prompt, results in their frame."""

from __future__ import annotations

import asyncio
import json

import pytest
from support.rollouts import ScriptedClient, ScriptedEngine, make_limits, make_requests, make_settings
from support.tokenizers import CHATML, make_tokenizer

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.agent.formats import FormatName, TaskView, make_format
from agentgym_rl.agent.strategies import AgentChoice
from agentgym_rl.rollout.collector import collect
from agentgym_rl.types import Message, Role, StepOutput

# The shape of Qwen2.5's and Hermes' templates: functions in the system message, results in a user message of their own.
TAGGED = (
    "{% if tools %}<|im_start|>system\nYou can call:{% for t in tools %}\n{{ t | tojson }}{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The shape of Llama 3's: functions in the first user message, results as JSON under a role of their own.
JSON_RESULTS = (
    "{% for m in messages %}{% set role = 'ipython' if m.role == 'tool' else m.role %}<|im_start|>{{ role }}\n\n"
    "{% if loop.first and tools %}Functions:{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n{% endif %}"
    "{{ m.content | tojson if m.role == 'tool' else m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
# One that lists functions but refuses results: a user message answers then.
WITHOUT_RESULTS = TAGGED.replace(
    "{% if m.role == 'tool' %}", "{% if m.role == 'tool' %}{{ raise_exception('no call to answer') }}"
)
TASK = TaskView("Craft the goal.", ("get <n> <item>", "inventory"), "inventory")
TOOLS = make_format(FormatName.FUNCTION_CALLING, TASK).tools()
OBSERVATION = 'Got "1" log.\n\\o/ <|im_end|> done'
CALL = '<tool_call>\n{"name": "inventory", "arguments": {}}\n</tool_call>'


class CraftClient(ScriptedClient):
    action_forms = TASK.action_forms
    example_action = TASK.example_action


def full_ids(tokenizer, messages):
    """What the tokenizer itself gives for the conversation, functions declared."""
    conversation = [{"role": str(m.role), "content": m.content} for m in messages]
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True, tools=list(TOOLS))
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("template", [TAGGED, JSON_RESULTS], ids=["tagged", "json results"])
@pytest.mark.parametrize("byte_level", [True, False])
def test_functions_and_results_stand_as_the_template_itself_would_write_them(template, byte_level):
    tokenizer = make_tokenizer(template, byte_level=byte_level)
    chat = ChatTemplate(tokenizer).with_tools(TOOLS)
    assert chat.declares_tools and chat.answer_role == Role.TOOL
    opening = [Message(Role.USER, "Go."), Message(Role.ASSISTANT, "OK."), Message(Role.USER, "A door.")]
    prompt = chat.encode_prompt(opening)
    assert list(prompt.ids) == full_ids(tokenizer, opening)
    plain = OBSERVATION.replace("<|im_end|>", "")
    result = chat.encode_observation(plain, 4, Role.TOOL)
    again = chat.encode_observation("Go on.", 6)
    answered = [*opening, Message(Role.ASSISTANT, CALL), Message(Role.TOOL, plain)]
    expected = full_ids(tokenizer, [*answered, Message(Role.ASSISTANT, CALL), Message(Role.USER, "Go on.")])
    assert [*prompt.ids, *chat.encode_answer(CALL), *result.ids, *chat.encode_answer(CALL), *again.ids] == expected
    whole = [*answered, Message(Role.ASSISTANT, CALL)]
    assert list(chat.encode_conversation(whole).ids) == expected[: len(expected) - len(again.ids)]


@pytest.mark.parametrize("template", [TAGGED, JSON_RESULTS])
def test_control_strings_of_a_result_are_plain_text(template):
    chat = ChatTemplate(make_tokenizer(template)).with_tools(TOOLS)
    end_of_turn = chat.end_of_turn_id
    sound, hostile = (
        chat.encode_observation(text, 4, Role.TOOL).ids.count(end_of_turn) for text in ("fine", OBSERVATION)
    )
    assert sound == hostile


def test_a_template_without_functions_stays_as_it_is_and_one_without_results_answers_as_the_user():
    plain = ChatTemplate(make_tokenizer(CHATML))
    assert plain.with_tools(TOOLS) is plain and not plain.declares_tools
    assert plain.with_tools(()) is plain
    listing = ChatTemplate(make_tokenizer(WITHOUT_RESULTS)).with_tools(TOOLS)
    assert listing.declares_tools and listing.answer_role == Role.USER
    assert listing.encode_observation("a", 2, Role.TOOL) == listing.encode_observation("a", 2)
    assert ChatTemplate(make_tokenizer(TAGGED)).answer_role == Role.USER


def test_a_template_with_functions_is_made_once():
    chat = ChatTemplate(make_tokenizer(TAGGED))
    assert chat.with_tools(TOOLS) is chat.with_tools(list(TOOLS))


@pytest.mark.parametrize(
    ("template", "role"), [(TAGGED, Role.TOOL), (JSON_RESULTS, Role.TOOL), (CHATML, Role.USER)], ids=str
)
def test_a_rollout_declares_functions_in_the_models_own_format_where_there_is_one(template, role):
    tokenizer = make_tokenizer(template)
    chat, heard = ChatTemplate(tokenizer), []

    def script(item, step, text):
        heard.append(text)
        return StepOutput(f"seen {step}", float(step == 3), step == 3)

    turns = ("no call here", CALL, CALL, CALL)
    engine = ScriptedEngine(chat, lambda turn: turns[turn])
    (trajectory,) = asyncio.run(
        collect(
            make_requests([1]),
            engine,
            make_client=lambda: CraftClient(script),
            chat=chat,
            settings=make_settings(
                agent=AgentChoice("react", "function_calling"),
                limits=make_limits(max_tokens=200, max_prompt_length=2000),
            ),
        )
    )
    assert heard == ["", *["Action: inventory"] * 3]
    # What has no call is answered by the user: there is no result to give.
    roles = [m.role for m in trajectory.messages[3:]]
    assert roles == [Role.ASSISTANT, Role.USER, Role.ASSISTANT, role, Role.ASSISTANT, role, Role.ASSISTANT]
    is_listed = "Each kind of action is a function" in trajectory.messages[0].content
    assert is_listed == (role == Role.USER)
    prompt = tokenizer.decode(trajectory.input_ids[: trajectory.prompt_length])
    assert prompt.count('"name": "get"') == (role == Role.TOOL)
    sampled = trajectory.input_ids[trajectory.loss_mask == 1]
    assert sampled.tolist() == [id for text in turns for id in chat.encode_answer(text)]
    assert json.loads(json.dumps(TOOLS))[0]["function"]["parameters"]["required"] == ["n", "item"]
