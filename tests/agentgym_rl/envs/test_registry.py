"""Finding environments by task name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.environments import scripted_spec

from agentgym_rl.envs import registry
from agentgym_rl.envs.registry import get_spec, known_tasks, register
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


def test_a_package_of_its_own_is_found_and_served_without_torch_or_ray(tmp_path: Path) -> None:
    """What a third party ships: a module and an entry point."""
    (tmp_path / "thirdparty.py").write_text("from agentgym_rl.envs.textcraft import SPEC\n")
    info = tmp_path / "thirdparty-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thirdparty\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[agentgym_rl.envs]\nmyworld = thirdparty:SPEC\nbroken = os:sep\n")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from agentgym_rl.envs.registry import get_spec\n"
        "from agentgym_rl.envs.server import build_app\n"
        "build_app(get_spec('myworld'))\n"
        "print(sorted({'torch', 'ray', 'transformers', 'gymnasium'} & set(sys.modules)))\n"
        "try: get_spec('broken')\n"
        "except ValueError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    loaded, refused = done.stdout.splitlines()
    assert loaded == "[]"
    assert refused == "entry point 'os:sep' of environment 'broken' is '/', must be an EnvSpec"
