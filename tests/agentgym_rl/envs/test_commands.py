"""The commands play and bench, and the settings of environments as options."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from support.dialect_b import QUIZ_SPEC
from support.isolated import SPEC as ISOLATED_SPEC
from support.servers import serve

from agentgym_rl.cli import main
from agentgym_rl.envs import registry
from agentgym_rl.envs.benching import load
from agentgym_rl.envs.commands import TaskParser, add_serve
from agentgym_rl.envs.options import configured_spec, settings_arguments
from agentgym_rl.envs.registry import EnvSpec
from agentgym_rl.envs.server import build_app
from agentgym_rl.envs.textcraft import SPEC
from agentgym_rl.errors import ConfigError

pytestmark = pytest.mark.server


def written(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def register(monkeypatch: pytest.MonkeyPatch, *specs: EnvSpec) -> None:
    monkeypatch.setattr(registry, "_registered", {spec.name: spec for spec in specs})


# ---------------------------------------------------------------------------------------------------------------- play


@pytest.mark.parametrize("remote", [False, True])
def test_an_episode_is_played_by_hand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], remote: bool
) -> None:
    written(
        monkeypatch,
        "get 1 acacia logs",
        "",
        "craft 4 acacia planks using 1 acacia logs",
        "inventory",
        ":reset",
        "inventory",
        ":actions",
        ":render",
        ":what",
        ":quit",
        "get 1 coal",
    )
    with serve(build_app(SPEC)) as url:
        assert main(["play", "textcraft", "--item", "0", *(["--env-addr", url] if remote else [])]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Crafting commands:\n")
    assert "Got 1 acacia logs\n[reward 0]\n" in said
    assert "Crafted 4 minecraft:acacia_planks\n[reward 1, done]\n" in said
    assert "refused: " in said
    assert "has finished" in said
    assert "Inventory: nothing yet.\n[reward 0]\n" in said
    assert "\ninventory\n" in said
    assert "coal" not in said.split(":quit ends", 2)[2]


def test_the_expert_shows_how(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    register(monkeypatch, QUIZ_SPEC, replace(ISOLATED_SPEC, settings=None, configure=None))
    written(monkeypatch, ":expert")
    assert main(["play", "quiz", "--item", "41"]) == 0
    assert capsys.readouterr().out.endswith("\n41\n")
    written(monkeypatch, ":expert")
    assert main(["play", "isolated"]) == 0
    assert capsys.readouterr().out.endswith("refused: Isolated has no expert\n")


def test_an_item_that_does_not_exist_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    register(monkeypatch, QUIZ_SPEC)
    written(monkeypatch)
    assert main(["play", "quiz", "--item", "100"]) == 1
    assert capsys.readouterr().err == "agentgym-rl: data_idx 100: must be in 0..99\n"


@pytest.mark.parametrize("command", [["play"], ["bench", "--seconds", "0.1"]])
def test_a_server_of_another_task_and_a_missing_one_are_one_line_at_once(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(monkeypatch, "inventory")
    with serve(build_app(QUIZ_SPEC)) as url:
        assert main([command[0], "textcraft", *command[1:], "--env-addr", url]) == 1
        said = capsys.readouterr()
        assert (said.out, said.err) == (
            "",
            f"agentgym-rl: agentgym.env_addr={url}: serves 'quiz', this is for 'textcraft'\n",
        )
    assert main([command[0], "textcraft", *command[1:], "--env-addr", url]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith(f"agentgym-rl: no textcraft server at {url}: ")
    assert f"start one with: agentgym-rl serve textcraft --host 127.0.0.1 --port {url.rsplit(':', 1)[1]}" in said.err


# --------------------------------------------------------------------------------------------------------------- bench


def test_a_bench_reports_speed_latency_memory_and_scores(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "textcraft", "--clients", "2", "--seconds", "0.3", "--episodes", "3", "--steps", "4"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(" steps/s with 2 clients")
    assert float(lines[0].split()[0]) > 10
    assert lines[1].endswith(" kB per session")
    assert [line.split()[0] for line in lines[2:]] == [
        *("create", "reset", "step", "close"),
        *("no-op", "random", "expert"),
    ]
    assert "score    1.000   success 100.0%" in lines[-1]
    assert "score    0.000   success  0.0%" in lines[6]


def test_a_server_that_runs_already_is_measured_in_its_own_dialect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    register(monkeypatch, QUIZ_SPEC)
    with serve(build_app(QUIZ_SPEC)) as url:
        assert main(["bench", "quiz", "--clients", "2", "--seconds", "0.2", "--episodes", "4", "--env-addr", url]) == 0
    assert "kB per session" not in capsys.readouterr().out


def test_each_client_makes_a_step_however_long_its_reset_takes() -> None:
    with serve(build_app(SPEC)) as url:
        result = load(SPEC, url, clients=3, seconds=0)
    assert result.steps == 3 and result.steps_per_s > 0
    assert [call.count for call in result.calls if call.name == "step"] == [3]


# ------------------------------------------------------------------------------------------------------------ settings


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Settings:
    max_answers: int | None = field(default=None, metadata={"help": "answers of an episode"})
    strict: bool = False
    folder: Path = Path("here")
    colour: Colour = Colour.RED


def quiz_with(settings: Settings) -> EnvSpec:
    return replace(QUIZ_SPEC, settings=settings, configure=quiz_with)


def parsed(*arguments: str) -> Any:
    parser = TaskParser()
    add_serve(parser.add_subparsers(parser_class=TaskParser))
    return parser.parse_args(["serve", *arguments])


def test_settings_are_options_of_the_commands_that_take_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, quiz_with(Settings()))
    options = parsed("quiz", "--max-answers", "2", "--strict", "--folder", "there", "--colour", "blue", "--port", "0")
    assert configured_spec(options).settings == Settings(2, True, Path("there"), Colour.BLUE)
    again = parsed("quiz", *settings_arguments(options))
    assert configured_spec(again).settings == configured_spec(options).settings
    assert configured_spec(parsed("--port", "0", "quiz")).settings == Settings()


def test_a_wrong_setting_and_one_of_another_task_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    register(monkeypatch, quiz_with(Settings()))
    for arguments, words in (
        (("quiz", "--max-answers", "two"), "invalid int value: 'two'"),
        (("quiz", "--colour", "green"), "invalid choice: 'green'"),
        (("textcraft", "--max-answers", "2"), "unrecognized arguments: --max-answers 2"),
    ):
        with pytest.raises(SystemExit):
            parsed(*arguments)
        assert words in capsys.readouterr().err


def test_the_help_of_a_command_for_a_task_lists_its_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    register(monkeypatch, quiz_with(Settings()))
    with pytest.raises(SystemExit):
        parsed("quiz", "--help")
    said = capsys.readouterr().out
    assert "settings of Quiz" in said
    assert "answers of an episode" in said


def test_a_configure_that_forgets_its_settings_is_found() -> None:
    spec = replace(QUIZ_SPEC, settings=Settings(), configure=lambda settings: quiz_with(Settings()))
    with pytest.raises(ConfigError, match="configure lost its settings"):
        spec.with_settings(Settings(strict=True))


def test_settings_of_another_kind_are_refused() -> None:
    with pytest.raises(ConfigError, match="has no settings of type Settings"):
        QUIZ_SPEC.with_settings(Settings())


def test_play_obeys_settings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    register(monkeypatch, ISOLATED_SPEC)
    written(monkeypatch)
    assert main(["play", "isolated", "--item", "3", "--greeting", "salut"]) == 0
    assert capsys.readouterr().out.startswith("salut 3\n")


def test_isolation_is_chosen_only_where_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "textcraft", "--port", "0", "--started-ahead", "2"]) == 1
    assert "textcraft lives in the server's process" in capsys.readouterr().err


def test_fewer_sessions_than_workers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "textcraft", "--port", "0", "--workers", "4", "--max-sessions", "3"]) == 1
    assert "--max-sessions 3: must be at least --workers 4" in capsys.readouterr().err


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom agentgym_rl.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'numpy', 'requests', 'uvicorn', 'msgspec', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
