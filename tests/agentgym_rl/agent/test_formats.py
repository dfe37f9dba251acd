"""Actions as lines, as function calls and as calls in code: found, never run."""

from __future__ import annotations

import builtins

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym_rl.agent.formats import TaskView, call_text, make_format
from agentgym_rl.agent.functions import CallError, as_call, find_function, functions_of
from agentgym_rl.envs.registry import get_spec

CRAFT = TaskView.of(get_spec("textcraft").client)
LONG = "craft 4 oak planks using 1 oak log, 2 stick"


def read(name, text, task=CRAFT):
    return make_format(name, task).find(text)


# ------------------------------------------------------------------------------------------------------------ functions


@pytest.mark.parametrize(
    ("form", "signature", "arguments", "action"),
    [
        ("get <n> <item>", "get(n, item)", {"n": 1, "item": "oak log"}, "get 1 oak log"),
        (
            "craft <n> <item> using <n> <item>, ...",
            "craft_using(n, item, rest)",
            {"n": 4, "item": "oak planks", "rest": ["1 oak log", "2 stick"]},
            LONG,
        ),
        ("use OBJ on OBJ", "use_on(obj, obj_2)", {"obj": "key", "obj_2": "door"}, "use key on door"),
        ("<search>words</search>", "search(words)", {"words": "Kenya"}, "<search>Kenya</search>"),
        ("```type [id] [text] [0|1]```", "type(id, text, choice)", {"id": 7.0, "text": "a b", "choice": "1"},
         "```type [7] [a b] [1]```"),
        ("```go_back```", "go_back()", {}, "```go_back```"),
        ("turn left", "turn_left()", {}, "turn left"),
        ("pass", "pass_()", {}, "pass"),
        ("2 steps", "action_2_steps()", {}, "2 steps"),
    ],
)  # fmt: skip
def test_a_form_is_a_function_and_a_call_fills_it(form, signature, arguments, action):
    (function,) = functions_of((form,))
    assert function.signature == signature
    assert function.fill([], arguments) == action
    assert function.fill(list(arguments.values()), {}) == action
    _, found = as_call([function], action)
    assert function.fill([], found) == action
    assert function.schema()["function"]["parameters"]["required"] == list(arguments)


@pytest.mark.parametrize(
    "forms", [(), ("<tool> with Action Input: {...}",), ("<five letters>",), ("```sql\nselect\n```",)]
)
def test_a_task_whose_forms_have_no_plain_gaps_has_one_function_for_all(forms):
    (function,) = functions_of(forms)
    assert function.signature == "act(action)"
    assert function.fill(['search with Action Input: {"a":\n1}'], {}) == 'search with Action Input: {"a":\n1}'
    assert all(form in function.parameters[0].hint for form in forms)


def test_functions_of_the_same_words_keep_apart():
    assert [f.name for f in functions_of(("go <a>", "go [b]"))] == ["go", "go_2"]


@pytest.mark.parametrize(
    ("positional", "named", "message"),
    [
        ([1], {}, r"get\(n, item\): item must be given"),
        ([1, 2, 3], {}, "takes 2 arguments, not 3"),
        ([1], {"n": 2}, "argument 'n' is twice"),
        ([], {"m": 2}, "argument 'm' is unknown"),
        ([1, None], {}, "item must be a text or a number"),
        ([1, {"a": 1}], {}, "item must be a text or a number"),
    ],
)
def test_arguments_that_do_not_fit_are_named(positional, named, message):
    with pytest.raises(CallError, match=message):
        find_function(functions_of(CRAFT.action_forms), "get").fill(positional, named)


# ----------------------------------------------------------------------------------------------------- function calling


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ('<tool_call>\n{"name": "get", "arguments": {"n": 1, "item": "log"}}\n</tool_call>', "get 1 log"),
        ('so\n<tool_call>{"name": "get", "arguments": {"n": 1, "item": "log"}}', "get 1 log"),
        ('{"name": "get", "parameters": {"n": "1", "item": "log"}}', "get 1 log"),
        ('I will. {"name": "inventory", "parameters": {}} done', "inventory"),
        ('[{"name": "inventory"}, {"name": "get", "arguments": {}}]', "inventory"),
        ('{"name": "get", "arguments": "{\\"n\\": 1, \\"item\\": \\"log\\"}"}', "get 1 log"),
        ('{"note": [1]} [2] {"name": "inventory"}', "inventory"),
        ('<tool_call>{bad</tool_call><tool_call>{"name": "inventory"}</tool_call>', "inventory"),
        ('<think>{"name": "get"}?</think>{"name": "inventory"}', "inventory"),
        ('<think><tool_call>{"name": "get"}</tool_call>?</think><tool_call>{"name": "inventory"}', "inventory"),
        ('<think>a <tool_call>?</think>{"name": "inventory"}', "inventory"),
    ],
)
def test_calls_are_read_as_models_write_them(text, action):
    found = read("function_calling", text)
    assert found.for_environment == f"Action: {action}"
    assert "inventory" in text[found.start : found.end] or "get" in text[found.start : found.end]
    assert text[: found.lead_end] + text[found.start : found.end] in text
    assert found.start >= text.rfind("</think>")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("Action: inventory", "no function call was found"),
        ("", "no function call was found"),
        ('{"name": 3}', "no function call was found"),
        ('<think>{"name": "inventory"}</think>I do not know', "no function call was found"),
        ('{"name": "fly"}', "there is no function 'fly'; there are get(n, item)"),
        ('{"name": "get", "arguments": [1, "log"]}', "its arguments are no JSON object"),
        ('{"name": "get", "arguments": "{"}', "its arguments are not JSON"),
        ('{"name": "get", "arguments": {"n": 1}}', "get(n, item): item must be given"),
        ("[" * 100_000, "no function call was found"),
        ('{"a":' * 5_000 + "1" + "}" * 5_000, "no function call was found"),
    ],
)
def test_what_is_no_call_is_explained_with_an_example_of_one(text, complaint):
    found = read("function_calling", text)
    assert found.for_environment is None and complaint in found.complaint
    assert found.complaint.endswith(call_text("inventory", {}))


# --------------------------------------------------------------------------------------------------------------- code


@pytest.mark.parametrize(
    ("text", "call", "action"),
    [
        ("Action: get(1, 'oak log')", "get(1, 'oak log')", "get 1 oak log"),
        ("Thought: so\nAction: `get(n=1, item='log')`", "get(n=1, item='log')", "get 1 log"),
        ("Action:\n```python\nget(1,\n    'log')\n```\n", "get(1,\n    'log')", "get 1 log"),
        ("first\n```py\ninventory()\n```\nthat is all", "inventory()", "inventory"),
        ("I look.\ninventory()", "inventory()", "inventory"),
        ("Action: [get(1, 'a'), get(1, 'b')]", "[get(1, 'a'), get(1, 'b')]", "get 1 a"),
        ("Action: inventory()\nObservation: nothing", "inventory()", "inventory"),
        ("Thought: so\nObservation: a tree\nAction: inventory()", "inventory()", "inventory"),
        ("Thought: so\nObservation: a tree\ninventory()", "inventory()", "inventory"),
        ("inventory()\nObservation: nothing\nget(1, 'log')", "inventory()", "inventory"),
        ("[inventory()]\nObservation: nothing\nget(1, 'log')", "[inventory()]", "inventory"),
        ("```py\ninventory()\n```\nObservation: nothing\n```py\nget(1, 'log')\n```", "inventory()", "inventory"),
        ("<think>\nAction: get(1, 'log')\nObservation: ok\n</think>\ninventory()", "inventory()", "inventory"),
        ("<think>Action: get(1, 'log')</think>\n```py\ninventory()\n```", "inventory()", "inventory"),
        ("Action: get(1, 'log')\nand then more(", "get(1, 'log')\nand then more(", "get 1 log"),
        ("Action: craft_using(4, 'oak planks', ['1 oak log', '2 stick'])", None, LONG),
        ("Action: get(-1, r'\\d')", None, "get -1 \\d"),
    ],
)
def test_a_call_in_code_is_read_wherever_it_stands(text, call, action):
    found = read("code_as_action", text)
    assert found.for_environment == f"Action: {action}"
    assert call is None or text[found.start : found.end] == call


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("__import__('os').system('true')", "only a function's bare name can be called"),
        ("get(1, open('/etc/passwd').read())", "its arguments must be literal values"),
        ("get(1, [x for x in 'ab'])", "its arguments must be literal values"),
        ("get(1, f'{1}')", "its arguments must be literal values"),
        ("get(*[1, 'log'])", "its arguments must be literal values"),
        ("get(1, **{'item': 'log'})", "**arguments are not allowed"),
        ("eval('1')", "there is no function 'eval'"),
        ("lambda: inventory()", "it is not one call"),
        ("inventory", "it is not one call"),
        ("import os", "it is not one call"),
        ("x = inventory()", "it is not one call"),
        ("get(1, 9**9**9)", "its arguments must be literal values"),
        ("(" * 3000, "it is not one call"),
        ("get(1, " + "-" * 3000 + "1)", "it is not one call"),
        ("get(1, '" + "a" * 5000 + "')", "it has 5010 characters, at most 4000 are read"),
        ("get(1, '\x00')", "it is not one call"),
        ("", "it is not one call"),
    ],
)
def test_code_that_is_no_call_with_literals_is_explained_and_never_run(code, complaint, monkeypatch):
    for name in ("eval", "exec", "open"):
        monkeypatch.setattr(builtins, name, _never)
    found = read("code_as_action", f"Action: {code}")
    assert found.for_environment is None and complaint in found.complaint
    assert found.complaint.endswith("Action: inventory()")


def _never(*_, **__):
    raise AssertionError("text of a model was run")


@given(st.text(alphabet="get(n=1,'item\"): [] {}*\\\n`Action:<tool_call>/", max_size=80))
def test_whatever_a_model_writes_is_an_action_or_explained(text):
    for name in ("react", "function_calling", "code_as_action"):
        found = read(name, text)
        assert 0 <= found.lead_end <= found.start <= found.end <= len(text) or found.start == found.end
        assert (found.for_environment is None) == bool(found.complaint)


def test_the_text_of_a_call_is_read_back_as_that_call():
    assert (
        read("function_calling", call_text("get", {"n": 1, "item": "bücher"})).for_environment == "Action: get 1 bücher"
    )
