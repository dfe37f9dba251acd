"""The client against a server that answers as AgentGym's does, and what lies around the browser."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from agentgym_rl.agent.formats import TaskView
from agentgym_rl.agent.strategies import AgentChoice
from agentgym_rl.envs.webarena import browser
from agentgym_rl.envs.webarena.actions import Kind, read_action
from agentgym_rl.envs.webarena.client import WebArenaClient
from agentgym_rl.errors import EnvProtocolError, EnvServerError, EnvTimeout
from agentgym_rl.types import StepOutput

ROOT = Path(__file__).parents[4]
RESET = {"observation": "tree 0", "sites": ["reddit"], "object": "Find it."}
STEP = {"observation": "tree", "reward": 0.0, "terminated": False, "truncated": False, "info": {}}


class Scripted:
    """Answers each path with the next of its answers, the last one for ever; keeps what it was sent."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Any]] = {
            "/create": [{"env_idx": 7}],
            "/reset": [RESET],
            "/step": [STEP],
            "/observation": ["page 0", "page 1", "page 2"],
            "/close": [{"closed": "closed"}],
        }
        self.sent: list[tuple[str, Any]] = []

    def answer(self, path: str, sent: Any) -> tuple[int, Any]:
        self.sent.append((path, sent))
        known = self.answers.get(path)
        if known is None:
            return 404, {"detail": "Not Found"}
        return 200, known.pop(0) if len(known) > 1 else known[0]


@pytest.fixture
def script() -> Scripted:
    return Scripted()


@pytest.fixture
def url(script: Scripted) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            self._send(*script.answer(path, query))

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            self._send(*script.answer(self.path, json.loads(self.rfile.read(length) or b"{}")))

        def _send(self, status: int, content: Any) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_the_calls_of_an_episode_and_what_the_agent_sees(script: Scripted, url: str) -> None:
    script.answers["/step"] = [STEP | {"reward": 0.5}, STEP | {"reward": 1.0, "terminated": True}]
    with WebArenaClient(url) as client:
        assert client.reset(3) == client.observation() == "page 0"
        # A reward before the end is none, whatever the server says.
        assert client.step("Thought: hm\n```click [1]```") == StepOutput("page 1", 0.0, False)
        assert client.step("```stop [x]```") == StepOutput("page 2", 1.0, True)
        assert client.available_actions() == list(client.action_forms)
    assert [entry for entry in script.sent if entry[0] in ("/create", "/reset", "/step", "/close")] == [
        ("/create", {}),
        ("/reset", {"env_idx": 7, "seed": 0, "idx": 3}),
        ("/step", {"env_idx": 7, "action": "Thought: hm\n```click [1]```"}),
        ("/step", {"env_idx": 7, "action": "```stop [x]```"}),
        ("/close", {"env_idx": 7}),
    ]
    assert ("/observation", "env_idx=7") in script.sent


def test_pictures_go_to_the_viewer_and_not_to_the_agent(script: Scripted, url: str) -> None:
    script.answers["/reset"] = [RESET | {"screenshot": "data:0"}, RESET]
    script.answers["/step"] = [STEP | {"info": {"screenshot": "data:1"}}, STEP]
    with WebArenaClient(url) as client:
        assert client.reset(3) == "page 0"
        assert client.viewer_state == {"screenshot": "data:0"}
        assert client.step("```click [1]```").state == "page 1"
        assert client.viewer_state == {"screenshot": "data:1"}
        client.step("```click [1]```")
        assert client.viewer_state is None


def test_a_truncated_episode_is_done(script: Scripted, url: str) -> None:
    script.answers["/step"] = [STEP | {"truncated": True}]
    with WebArenaClient(url) as client:
        client.reset(0)
        assert client.step("```go_back```").done


def test_a_reset_that_timed_out_is_an_error_that_names_the_item(script: Scripted, url: str) -> None:
    script.answers["/reset"] = [{"observation": "TimeoutError", "sites": "Error", "object": "Error"}]
    with WebArenaClient(url) as client, pytest.raises(EnvTimeout, match=r"webarena_5 .*reports TimeoutError"):
        client.reset(5)


@pytest.mark.parametrize(
    ("path", "answer", "error"),
    [
        ("/step", {"observation": "x"}, EnvProtocolError),
        ("/step", STEP | {"terminated": True, "reward": None}, EnvProtocolError),
        ("/reset", "tree", EnvProtocolError),
        ("/observation", {"tree": ""}, EnvProtocolError),
        ("/reset", {"error": "gone"}, EnvServerError),
    ],
)
def test_other_answers_are_errors_and_never_a_reward(
    script: Scripted, url: str, path: str, answer: Any, error: type[Exception]
) -> None:
    script.answers[path] = [answer]
    with WebArenaClient(url) as client, pytest.raises(error, match="webarena_0"):
        client.reset(0)
        client.step("```stop []```")


def test_the_instruction_names_every_action_and_the_answer_form_fits() -> None:
    for kind in Kind:
        assert f"{kind}" in WebArenaClient.task_description
        assert any(f"```{kind}" in form for form in WebArenaClient.action_forms)
    for choice in (AgentChoice("react"), AgentChoice("act"), AgentChoice("react", "code_as_action")):
        agent = choice.make(TaskView.of(WebArenaClient))
        reply = agent.read(agent.write(WebArenaClient.example_action, "so"))
        assert read_action(reply.for_environment).kind == Kind.SCROLL


# -------------------------------------------------------------------------------------------------- around the browser


def test_folders_of_ended_processes_are_removed_and_others_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ended = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout.strip()
    names = [f"agentgym-webarena-{ended}-a", f"agentgym-webarena-{os.getpid()}-b", "agentgym-webarena-x", "other"]
    for name in names:
        (tmp_path / name).mkdir()
    browser._remove_folders_of_ended_processes()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


def test_the_script_prints_a_browser_that_is_there(tmp_path: Path) -> None:
    program = tmp_path / "chromium"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    run = subprocess.run(
        ["bash", "scripts/chromium.sh"], capture_output=True, text=True, check=True, env=environment, cwd=ROOT
    )
    assert run.stdout.splitlines()[0] == str(program)


def test_the_script_says_how_to_install_a_browser_where_it_cannot(tmp_path: Path) -> None:
    for tool in ("bash", "tail", "grep", "id"):
        (tmp_path / tool).symlink_to(f"/usr/bin/{tool}" if Path(f"/usr/bin/{tool}").exists() else f"/bin/{tool}")
    run = subprocess.run(
        [str(tmp_path / "bash"), "scripts/chromium.sh"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": str(tmp_path), "HOME": str(tmp_path)},
        cwd=ROOT,
    )
    assert run.returncode == 1 and "apt-get install chromium" in run.stderr
