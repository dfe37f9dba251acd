"""Every command that the documentation shows is run, small, or is run by another test that is named.

Which is which stands in `support.doc_rules`. The few commands that no test can run are checked for what they name:
scripts, paths, extras, options and keys.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.chat_server import ChatServer, chat_server, says
from support.doc_rules import RULES, SMALL_TRAINING, SOME_TRAINING, Rule, rule_of
from support.documents import ROOT, blocks, commands, pages
from support.models import tiny_qwen2
from support.ranks import free_port
from support.rollouts import make_trajectory
from support.servers import serve
from support.tokenizers import make_tokenizer
from support.warm_python import warm_python

from agentgym_rl.envs.registry import get_spec
from agentgym_rl.envs.server import build_app
from agentgym_rl.rollout.log import TrajectoryLog
from agentgym_rl.types import Item, Message, Role
from verl.agent_trainer.loading import known_keys
from verl.config import GenerationConfig, PPOConfig

NEED_A_RUN = ("docs/evaluation.md", "docs/viewer.md")
"""Pages that take for granted what a training on another page has left in ``saves/textcraft``."""
PREAMBLE = """
set -eo pipefail
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
# Waits until the job that was started last listens on a port.
up() { until (: </dev/tcp/127.0.0.1/$1) 2>/dev/null; do kill -0 $!; sleep 0.1; done; }
# Leaves a few items in each list below a folder.
cut() { python -c 'import json, pathlib, sys
for path in pathlib.Path(sys.argv[1]).rglob("*.json"):
    if isinstance(rows := json.loads(path.read_text()), list):
        path.write_text(json.dumps(rows[:2]))' $1; }
"""


@dataclass(frozen=True)
class Shown:
    """A command as a page shows it, without the words behind ``#``."""

    page: str
    command: str

    @property
    def rule(self) -> Rule | None:
        return rule_of(self.page, self.command)


def shown_commands() -> list[Shown]:
    found = []
    for page in pages():
        for block in blocks(page, "bash"):
            found += [Shown(str(page.relative_to(ROOT)), re.sub(r"\s+# .*$", "", each)) for each in commands(block)]
    return found


SHOWN = shown_commands()
RUN_PAGES = sorted({shown.page for shown in SHOWN if shown.rule is not None and shown.rule.runs})


# ---------------------------------------------------------------------------------------------------------- every page


@dataclass(frozen=True)
class Surroundings:
    """What all pages are run with."""

    bin: Path
    model: Path
    textcraft: str
    babyai: str
    chat: ChatServer


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Surroundings]:
    model = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer()
    tiny_qwen2(vocab_size=len(tokenizer)).save_pretrained(model)
    tokenizer.save_pretrained(model)
    with (
        tempfile.TemporaryDirectory(prefix="warm") as folder,  # a short path, as sockets want it
        warm_python(Path(folder)) as bin_folder,
        serve(build_app(get_spec("textcraft"))) as textcraft,
        serve(build_app(get_spec("babyai"))) as babyai,
        chat_server(lambda number, body: says("Thought: I look.\nAction: inventory")) as chat,
    ):
        yield Surroundings(bin_folder, model, textcraft, babyai, chat)


@pytest.fixture(scope="module")
def trained(surroundings: Surroundings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training run."""
    place = make_place(tmp_path_factory.mktemp("trained"), surroundings)
    address = f"actor_rollout_ref.agentgym.env_addr={surroundings.textcraft}"
    command = f"python -m verl.agent_trainer.main_ppo {SOME_TRAINING} {address} {SMALL_TRAINING}"
    run_script(f"{command} trainer.default_local_dir=saves/textcraft", place, surroundings)
    return place / "saves" / "textcraft"


def make_place(folder: Path, surroundings: Surroundings) -> Path:
    """A folder that looks like the project's root, with a tiny model, few items and nothing saved."""
    for entry in ROOT.iterdir():
        if entry.name not in ("AgentEval", "models", "results", "saves"):
            (folder / entry.name).symlink_to(entry)
    (folder / "models").mkdir()
    (folder / "models" / "Qwen2.5-7B-Instruct").symlink_to(surroundings.model)
    for task in ("textcraft", "babyai"):
        for path in (ROOT / "AgentEval" / task).glob("*.json"):
            if path.stem.endswith("_test"):
                continue  # a folder of categories will do
            few = folder / "AgentEval" / task / path.name
            few.parent.mkdir(parents=True, exist_ok=True)
            few.write_text(json.dumps(json.loads(path.read_text())[:1]))
    for name, score in (("one", 1.0), ("two", 0.0)):
        played = make_trajectory(Item("textcraft", 1), score=score, success=score == 1.0)
        with TrajectoryLog(folder / "results" / name / "trajectories" / "0.jsonl") as log:
            log.write(replace(played, messages=(played.messages[0], Message(Role.ASSISTANT, f"Action: {name}"))))
    return folder


def page_script(page: str, surroundings: Surroundings) -> str:
    """The page's commands in a row, each as its rule says, between free ports."""
    script = [PREAMBLE]
    for shown in SHOWN:
        if shown.page == page:
            rule = shown.rule
            assert rule is not None
            line = rule.script(shown.command) if rule.runs else ":"
            script.append(line.replace("FREE", str(free_port())))
    text = "\n".join(script)
    own_server = f"http://127.0.0.1:{free_port()}" if "up 36001" in text else surroundings.textcraft
    for port, url in (("36001", own_server), ("36002", surroundings.babyai)):
        text = text.replace(port, url.rsplit(":", 1)[-1])
    return text


def run_script(script: str, place: Path, surroundings: Surroundings) -> str:
    """What the script printed; it must succeed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "AGENTGYM_"))}
    path = f"{surroundings.bin}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-x", "-c", script],
        cwd=place,
        env=clean | {"PATH": path, "OMP_NUM_THREADS": "1", "CHAT_URL": surroundings.chat.url},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.timeout(900)  # a dozen programs, beside whatever else the machine does
@pytest.mark.parametrize("page", RUN_PAGES)
def test_the_commands_of_a_page_run(
    page: str, surroundings: Surroundings, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    place = make_place(tmp_path, surroundings)
    if page in NEED_A_RUN:
        shutil.copytree(request.getfixturevalue("trained"), place / "saves" / "textcraft")
    printed = run_script(page_script(page, surroundings), place, surroundings)
    for expected in EXPECTED.get(page, ()):
        assert expected in printed, printed[-3000:]


EXPECTED = {
    "README.md": ("step     1 | rounds 10", "Avg@2", "TextCraft: all checks passed"),
    "docs/moving.md": ("step     1 | rounds 10",),
    "docs/evaluation.md": ("Avg@2", "Avg@1", "items to train on"),
    "docs/multi-node.md": ("512 trajectories", "64 workers"),
    "docs/sft-dpo-agentevol.md": ("the model is in", "pairs in", "iteration 1"),
    "docs/troubleshooting.md": ("agentgym-rl   passed",),
}
"""Of some pages, what their commands must have printed."""


# -------------------------------------------------------------------------------------------------------- every command


@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: f"{shown.page}: {shown.command[:60]}")
def test_a_rule_says_how_a_command_is_tested(shown: Shown) -> None:
    assert shown.rule is not None, (
        f"{shown.page} shows a command that no rule covers; say in tests/support/doc_rules.py how it is run:\n"
        f"{shown.command}"
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.pattern)
def test_a_rule_is_that_of_some_command(rule: Rule) -> None:
    if "experiments" not in rule.pattern:
        assert any(shown.rule is rule for shown in SHOWN)


@pytest.mark.parametrize("test", sorted({rule.by for rule in RULES if rule.by}))
def test_a_test_that_runs_commands_for_the_pages_exists(test: str) -> None:
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


# ----------------------------------------------------------------------------------------------- what nothing here runs

CHECKED = [shown for shown in SHOWN if shown.rule is not None and not shown.rule.runs]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
MARKERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]


@pytest.mark.parametrize("shown", CHECKED, ids=lambda shown: f"{shown.page}: {shown.command[:60]}")
def test_what_a_command_names_exists(shown: Shown) -> None:
    if shown.page == "docs/custom-environment.md":
        return  # its test runs every word of it
    words = shlex.split(shown.command.rstrip("&"), comments=True)
    for path in (word for word in words if re.match(r"(scripts|examples|tests)/[\w/.]+$", word)):
        assert (ROOT / path).exists(), path
        if path.endswith((".sh", ".sbatch")):
            subprocess.run(["bash", "-n", ROOT / path], check=True)
    for extra in extras_of(shown.command):
        assert extra in EXTRAS, extra
    if "-m" in words[2:]:
        named = set(re.findall(r"\w+", words[words.index("-m", 2) + 1])) - {"not", "and", "or"}
        assert named <= {marker.partition(":")[0] for marker in MARKERS}
    check_options(words)
    check_keys(words)


def extras_of(command: str) -> list[str]:
    """The extras that a command installs."""
    by_pip = re.findall(r"\.\[([\w,-]+)\]", command)
    by_setup = re.findall(r"scripts/setup\.sh ([\w -]+?)(?: &&|$)", command)
    return [name for found in (*by_pip, *by_setup) for name in re.split(r"[ ,]+", found.strip())]


def check_options(words: list[str]) -> None:
    """Options are those of the program: what it says of itself, or, where it takes hours, its source."""
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    if words[0] == "agentgym-rl":
        help_text = subprocess.run(
            [sys.executable, "-m", "agentgym_rl.cli", *words[1:3], "--help"], capture_output=True, text=True, check=True
        ).stdout
        assert all(option in help_text for option in options), help_text
    script = next((word for word in words if word.startswith("scripts/") and word.endswith(".py")), None)
    if script is not None:
        sources = [ROOT / script, *(ROOT / script).parent.glob("*.py")]
        text = "".join(path.read_text(encoding="utf-8") for path in sources)
        assert all(f'"{option}"' in text for option in options), (script, options)


def check_keys(words: list[str]) -> None:
    """Keys of a program of the trainer are known to it."""
    program = next((word for word in words if word.startswith("verl.agent_trainer.")), None)
    roots = {"verl.agent_trainer.main_ppo": PPOConfig, "verl.agent_trainer.main_generation": GenerationConfig}
    if program is not None:
        keys = {word.partition("=")[0] for word in words if "=" in word} - {"task", "algorithm", "model", "hardware"}
        assert keys <= set(known_keys(roots[program]))
