"""Finding environments by task name."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from support.environments import scripted_spec

from agentgym_rl.client.base import EnvClient
from agentgym_rl.envs import registry
from agentgym_rl.envs.registry import get_spec, known_tasks, load_spec, register
from agentgym_rl.envs.textcraft import SPEC, TextCraftClient
from agentgym_rl.errors import ConfigError


def test_textcraft_is_found_by_its_entry_point() -> None:
    spec = get_spec("textcraft")
    assert spec is SPEC
    assert spec.client is TextCraftClient
    assert (spec.num_items, spec.max_score, spec.reward_is_cumulative, spec.default_port) == (544, 1.0, False, 36001)


def test_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"task_name='textcarft': known environments are .*; did you mean textcraft\?"
    ):
        get_spec("textcarft")


def test_an_environment_can_be_registered_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    spec = scripted_spec()
    register(spec)
    assert get_spec("scripted") is spec
    assert "scripted" in known_tasks()


# All that a third party writes, in the order in which `registry` describes it.
OWN_ENVIRONMENT = """
from agentgym_rl.client.base import EnvClient
from agentgym_rl.envs.base import Environment, ResetResult, StepResult
from agentgym_rl.envs.registry import EnvSpec

class MyWorld(Environment):
    def reset(self, data_idx):
        self.seen = f"say {data_idx}"
        return ResetResult(self.seen)
    def step(self, action):
        self.seen = "you said " + action
        return StepResult(self.seen, float(action in self.seen), True)
    def observation(self):
        return self.seen

class MyWorldClient(EnvClient):
    task = "myworld"
    task_description = "Say the number."
    example_action = "7"

SPEC = EnvSpec("myworld", "My World", MyWorld, MyWorldClient, num_items=10, default_port=0, data_version=lambda: "1")
"""


def test_a_package_of_its_own_is_found_and_served_without_torch_or_ray(tmp_path: Path) -> None:
    """What a third party ships: a module and an entry point."""
    (tmp_path / "thirdparty.py").write_text(OWN_ENVIRONMENT)
    info = tmp_path / "thirdparty-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thirdparty\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[agentgym_rl.envs]\nmyworld = thirdparty:SPEC\nbroken = os:sep\nother = thirdparty:SPEC\n"
        "absent = no_such_module:SPEC\nnameless = thirdparty:SPEK\n"
    )
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from agentgym_rl.envs.registry import get_spec\n"
        "from agentgym_rl.envs.server import build_app\n"
        "build_app(get_spec('myworld'))\n"
        "print(sorted({'torch', 'ray', 'transformers', 'gymnasium'} & set(sys.modules)))\n"
        "for task in ('broken', 'other', 'absent', 'nameless'):\n"
        "    try: get_spec(task)\n"
        "    except ValueError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    loaded, refused, misnamed, absent, nameless = done.stdout.splitlines()
    assert loaded == "[]"
    assert refused == "entry point 'os:sep' of environment 'broken' is '/', must be an EnvSpec"
    assert misnamed == "entry point 'thirdparty:SPEC' of environment 'other' is the EnvSpec of 'myworld'"
    assert absent == (
        "entry point 'no_such_module:SPEC' of environment 'absent' does not load: No module named 'no_such_module'"
    )
    assert nameless.startswith("entry point 'thirdparty:SPEK' of environment 'nameless' does not load: ")


@pytest.mark.parametrize(
    ("source", "line", "problem"),
    [
        ("import os\n\ndef step(:\n", 3, "invalid syntax"),
        ("if True:\npass\n", 2, "expected an indented block after 'if' statement on line 1"),
        ("x = 1\nSPEC = Specc()\n", 2, "NameError: name 'Specc' is not defined"),
        ("def made():\n    return 1 / 0\n\nmade()\n", 2, "ZeroDivisionError: division by zero"),
        ("\nimport not_there_at_all\n", 2, "No module named 'not_there_at_all'"),
        ("import os\nos.nothing\n", 2, "module 'os' has no attribute 'nothing'"),
    ],
)
def test_a_package_whose_code_does_not_run_is_told_with_file_and_line(
    source: str, line: int, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"half_written_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        load_spec(EntryPoint("mine", f"{name}:SPEC", "agentgym_rl.envs"), "mine")
    assert str(caught.value) == (
        f"entry point '{name}:SPEC' of environment 'mine' does not load: {problem} ({tmp_path / name}.py, line {line})"
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"name": "mine"}, r"'mine': ScriptedClient\.task is 'scripted'"),
        ({"client": EnvClient}, "'scripted': EnvClient lacks task, task_description, example_action"),
        ({"num_items": 0}, "'scripted': num_items=0, must be at least 1"),
    ],
)
def test_a_spec_that_would_fail_in_the_middle_of_a_run_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        replace(scripted_spec(), **changes)
