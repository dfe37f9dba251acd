"""The tutorial on an environment of one's own: all its commands are run as they stand, on the package it describes.

The package is installed into a folder of the test alone, so that no other test meets its environment.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from agentgym_rl.data.items import load_items, overlap
from agentgym_rl.rollout.log import read_trajectories
from verl.utils.tracking import read_metrics

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "examples" / "custom_env"
TUTORIAL = ROOT / "docs" / "custom-environment.md"
INSTALL = "pip install -e examples/custom_env"
FOLDER = "OUT=saves/lights"
PORT = 36050


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables under which Python finds the installed package and the commands of this installation."""
    folder = tmp_path_factory.mktemp("custom_env")
    # A copy: building leaves files beside the sources.
    source = shutil.copytree(PACKAGE, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "__py*"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(folder / "site"), str(source)], check=True, timeout=120)
    return os.environ | {
        "PYTHONPATH": str(folder / "site"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }


def blocks(language: str) -> list[str]:
    """The tutorial's code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", TUTORIAL.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def tutorial_script(folder: Path, port: int) -> str:
    """The tutorial's commands in a row, with the package already installed, and another folder and port."""
    script = "\n".join(blocks("bash"))
    assert script.count(INSTALL) == script.count(FOLDER) == 1 and str(PORT) in script
    script = script.replace(INSTALL, ":").replace(FOLDER, f"OUT={folder}").replace(str(PORT), str(port))
    return script.replace("serve lights &", f"serve lights --port {port} &")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.server
def test_every_command_of_the_tutorial_runs_and_trains(environ: dict[str, str], tmp_path: Path) -> None:
    script = "set -e\ntrap 'kill $server 2>/dev/null || true' EXIT\n" + tutorial_script(tmp_path, free_port())
    run = subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        env=environ | {"SFT_STEPS": "50", "STEPS": "2"},  # it need not learn here
        input="press D4\npress A1\n",  # for `play`
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-3000:]
    for printed in ("All lamps are dark.\n[reward 1, done]", "all checks passed", "246 demonstrations in", "Avg@8"):
        assert printed in run.stdout
    assert re.search(r"^expert +score +1.000", run.stdout, re.MULTILINE)

    rows = read_metrics(tmp_path / "rl" / "metrics.jsonl")
    assert len(rows) == 2 and all(row["actor/grad_norm"] > 0 for row in rows)
    trained_on = read_trajectories(tmp_path / "rl" / "trajectories" / "step2").trajectories
    before, after = (
        read_trajectories(tmp_path / "eval" / model).trajectories for model in ("sft", "rl/global_step_2/actor")
    )
    assert len(trained_on) == 96 and len(before) == len(after) == 72
    assert not any(trajectory.masked for trajectory in (*trained_on, *before, *after))
    exported = (tmp_path / "episode.html").read_text(encoding="utf-8")
    data = json.loads(exported.partition('id="data">')[2].partition("</script>")[0])
    assert len(data["panel"]["frames"]) == len(trained_on[0].turns) + 1
    assert data["panel"]["frames"][0][0]["title"] == "Lamps"


def test_the_package_passes_its_own_tests(environ: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(PACKAGE / "tests")]
    run = subprocess.run(command, cwd=PACKAGE, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout[-3000:]


def test_the_tutorial_shows_the_code_that_the_package_has() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in sorted(PACKAGE.glob("lights_out/*.py")))
    sources += (PACKAGE / "pyproject.toml").read_text(encoding="utf-8")
    shown = [*blocks("python"), *blocks("toml")]
    assert len(shown) >= 4
    for block in shown:
        for passage in block.split("    ...\n"):
            assert passage.strip("\n") in sources


def test_training_and_held_out_items_share_none() -> None:
    warm_up, train, held_out = (
        load_items(PACKAGE / "items" / f"{name}.json", "lights") for name in ("warm-up", "train", "test")
    )
    assert not overlap(train, held_out) and not overlap(warm_up, held_out)
    assert {item.index for item in (*train, *held_out)} == set(range(45))


RULES, CLIENT, SPEC = "environment.py", "client.py", "__init__.py"
MISTAKES = {
    "must be an EnvSpec": (SPEC, "SPEC = EnvSpec(", "SPEC = dict("),
    "has no attribute 'SPEC'": (SPEC, "SPEC = EnvSpec(", "OTHER = EnvSpec("),
    "LightsClient.task is 'lamps'": (CLIENT, 'task = "lights"', 'task = "lamps"'),
    "LightsClient lacks example_action": (CLIENT, '    example_action = "press B2"\n', ""),
    "abstract method observation": (RULES, "def observation(", "def observe("),
    "another step was executed": (RULES, "if self._done:", "if False:"),
    "from character 0": (RULES, "self._lit: set[str] = set()", "self._lit = self.__dict__.get('_lit', set())"),
    "string index out of range": (RULES, "if lamp in LAMPS:", "if _switched_by(lamp):"),
    "must return a Python int or float as reward, not False": (RULES, "reward=float(solved)", "reward=solved"),
    "must return a StepResult(observation, reward, done), not ('": (
        RULES,
        "return StepResult(self._observation, reward=float(solved), done=self._done)",
        "return self._observation, float(solved), self._done",
    ),
    "and runs_inline has every session of the server wait": (
        RULES,
        "        lamp = action.upper()",
        "        import time; time.sleep(0.02); lamp = action.upper()",
    ),
    "as 'types of answers'": (RULES, "self._done = not self._lit", "self._done = not self._lamps"),
    "beside other sessions": (RULES, "self._presses", "Lights._presses"),
    "is above max_score=1": (RULES, "reward=float(solved)", "reward=2.0 * solved"),
    "IndexError: tuple index out of range": (RULES, "if not 0 <= data_idx < len(PUZZLES):", "if False:"),
}
"""What the tutorial quotes of a message -> the mistake: file, what stands in it, what a beginner might write."""


@pytest.mark.parametrize("quoted", MISTAKES)
def test_a_common_mistake_is_answered_as_the_tutorial_says(
    environ: dict[str, str], tmp_path: Path, quoted: str
) -> None:
    file, right, wrong = MISTAKES[quoted]
    site = shutil.copytree(environ["PYTHONPATH"], tmp_path / "site", ignore=shutil.ignore_patterns("__pycache__"))
    source = site / "lights_out" / file
    assert right in source.read_text(encoding="utf-8")
    source.write_text(source.read_text(encoding="utf-8").replace(right, wrong), encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-m", "agentgym_rl.cli", "check", "lights"],
        env=environ | {"PYTHONPATH": str(site)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 1
    assert quoted in run.stdout + run.stderr
    assert any(quoted in message for message in promised_messages())


def promised_messages() -> list[str]:
    """The first column of the tutorial's tables of mistakes."""
    return re.findall(r"^\| `(.+?)` \|", TUTORIAL.read_text(encoding="utf-8"), re.MULTILINE)


def test_items_are_written_as_the_tutorial_shows() -> None:
    assert json.loads((PACKAGE / "items" / "test.json").read_text())[:2] == ["lights_4", "lights_9"]
