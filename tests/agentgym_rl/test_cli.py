"""The command ``agentgym-rl serve``."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import requests
from support.servers import serve_process

from agentgym_rl.cli import main
from agentgym_rl.client.check import check_server
from agentgym_rl.envs.textcraft import TextCraftClient

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]
DEMONSTRATE = ["demonstrate", "textcraft", "--items", str(ROOT / "AgentEval/textcraft/depth4.json"), "--out"]


def test_a_served_environment_is_played_and_ends_at_once_on_sigterm() -> None:
    with serve_process("textcraft", "--max-sessions", "5") as server:
        check_server(server.url, "textcraft")
        client = TextCraftClient(server.url)
        client.reset(0)
        assert client.step("Action: get 1 acacia logs").state == "Got 1 acacia logs"
        assert requests.get(f"{server.url}/health", timeout=10).json()["capacity"] == 5
        started = time.monotonic()
        server.stop()
        assert time.monotonic() - started < 10
        assert not psutil.pid_exists(server.process.pid)
        client.close()


def test_the_server_says_where_it_listens() -> None:
    command = [sys.executable, "-m", "agentgym_rl.cli", "serve", "textcraft", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("listening on http://127.0.0.1:")
        check_server(line.removeprefix("listening on ").strip(), "textcraft")
    finally:
        os.kill(process.pid, signal.SIGTERM)
        rest, _ = process.communicate()
    assert rest == ""


def test_an_unknown_environment_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "textcarft"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("agentgym-rl: ")
    assert "did you mean textcraft?" in error
    assert error.count("\n") == 1


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "textcraft", "--port", str(port)]) == 1
    assert capsys.readouterr().err == f"agentgym-rl: cannot listen on 127.0.0.1:{port}: Address already in use\n"


@pytest.mark.parametrize(
    "option",
    [["--session-ttl", "0"], ["--session-ttl", "nan"], ["--max-sessions", "0"], ["--port", "70000"], ["--port", "x"]],
)
def test_an_impossible_option_is_refused(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "textcraft", *option])
    problem = capsys.readouterr().err.splitlines()[-1]
    assert option[0] in problem
    assert option[1] in problem
    assert "_" not in problem


@pytest.mark.parametrize("token", ["schlüssel", "ключ", "two words", "line\nbreak"])
@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["serve", "textcraft", "--port", "0"], "AGENTGYM_TOKEN"),
        (["view", "{folder}", "--port", "0"], "AGENTGYM_TOKEN"),
        (["view", "{folder}", "--port", "0", "--token", "{token}"], "--token"),
    ],
)
def test_a_token_that_no_client_could_send_is_refused_at_start_and_not_repeated(
    arguments: list[str],
    name: str,
    token: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if name == "AGENTGYM_TOKEN":
        monkeypatch.setenv(name, token)
    assert main([part.format(folder=tmp_path, token=token) for part in arguments]) == 1
    error = capsys.readouterr().err
    assert error == f"agentgym-rl: {name}: must be printable ASCII without spaces\n"


def test_serving_warns_of_a_foreign_verl_and_goes_on(tmp_path: Path) -> None:
    metadata = tmp_path / "verl-0.7.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: verl\nVersion: 0.7.0\n")
    command = [sys.executable, "-m", "agentgym_rl.cli", "serve", "textcraft", "--port", "0"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline().startswith("listening on http://127.0.0.1:")
    finally:
        process.terminate()
        _, errors = process.communicate()
    assert errors.startswith("agentgym-rl: warning: The distribution 'verl' 0.7.0 is installed in")
    assert "pip uninstall -y verl" in errors


@pytest.mark.parametrize("arguments", [["serve", "textcraft", "--port", "0", "--ready-file"], DEMONSTRATE])
def test_a_file_that_cannot_be_written_is_one_line(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    target = tmp_path / "file" / "x.json"
    assert main([*arguments, str(target)]) == 1
    error = capsys.readouterr().err
    assert str(tmp_path / "file") in error
    assert error.count("\n") == 1


def test_control_c_ends_a_server_without_a_traceback() -> None:
    command = [sys.executable, "-m", "agentgym_rl.cli", "serve", "textcraft", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, "")
