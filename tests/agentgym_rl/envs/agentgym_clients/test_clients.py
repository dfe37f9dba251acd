"""Clients of AgentGym's other servers, each against a scripted server of its shape."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.rollouts import ScriptedEngine, frameless_chat, make_settings

from agentgym_rl.agent.strategies import conversation_start
from agentgym_rl.client.base import EnvClient
from agentgym_rl.client.check import check_server
from agentgym_rl.data.items import load_items
from agentgym_rl.envs.agentgym_clients.games import (
    AlfWorldClient,
    MazeClient,
    SqlGymClient,
    WebShopClient,
    WordleClient,
)
from agentgym_rl.envs.agentgym_clients.tools import (
    AcademiaClient,
    MovieClient,
    SheetClient,
    TodoClient,
    WeatherClient,
)
from agentgym_rl.envs.registry import get_spec, known_tasks
from agentgym_rl.errors import ConfigError, EnvProtocolError, EnvServerError
from agentgym_rl.rollout.collector import collect
from agentgym_rl.rollout.handler import RolloutRequest
from agentgym_rl.rollout.log import TrajectoryLog, read_trajectories

TOOLS = (WeatherClient, MovieClient, AcademiaClient, TodoClient, SheetClient)
CLIENTS = (WebShopClient, AlfWorldClient, MazeClient, WordleClient, SqlGymClient, *TOOLS)


class Script:
    """Answers by path; without ``/close``, and 404 for what it does not have, as these servers do."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.seen: list[tuple[str, Any]] = []

    def answer(self, path: str, fields: Any) -> tuple[int, Any]:
        self.seen.append((path, fields))
        if path not in self.answers:
            return 404, {"detail": "Not Found"}
        found = self.answers[path]
        if isinstance(found, list) and path.endswith("/step"):
            found = found.pop(0)
        return found if isinstance(found, tuple) else (200, found)

    def sent(self, path: str) -> list[Any]:
        return [fields for called, fields in self.seen if called == path]


@contextmanager
def serving(script: Script) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            address = urlsplit(self.path)
            self.reply(*script.answer(address.path, address.query))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.reply(*script.answer(self.path, json.loads(body)))

        def reply(self, status: int, content: Any) -> None:
            payload = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_webshop() -> None:
    script = Script(
        {
            "/create": 3,
            "/reset": ["WebShop [SEP] Instruction: a red mug [SEP] Search", None],
            "/available_actions": {"has_search_bar": True, "clickables": ["Search", "Help"]},
            "/step": [
                {"state": "Results", "reward": 0.0, "done": False, "info": None},
                {"state": "Thank you", "reward": 0.75, "done": True, "info": None},
            ],
        }
    )
    with serving(script) as url, WebShopClient(url) as client:
        assert client.reset(5).endswith("Search")
        assert client.available_actions() == ["search[words]", "click[Search]", "click[Help]"]
        assert client.step("Thought: look\nAction: search[red mug]").state == "Results"
        assert client.step("no action at all").state.startswith("No action found")
        bought = client.step("Action: click[Buy Now]")
        assert (bought.reward, bought.done) == (0.75, True)
    assert script.sent("/reset") == [{"env_idx": 3, "session_id": 5}]
    assert script.sent("/step") == [
        {"env_idx": 3, "action": "search[red mug]"},
        {"env_idx": 3, "action": "click[Buy Now]"},
    ]


@pytest.mark.parametrize("game", [7, "valid_seen/look_at_obj/trial_T1/game.tw-pddl"])
def test_alfworld(game: int | str) -> None:
    start = {"id": 4, "observation": "A room.", "available_actions": ["look", "go to desk 1"], "task_type": "look"}
    script = Script(
        {
            "/create": {"id": 4},
            "/reset": start,
            "/step": [
                {"observation": "A desk.", "reward": 0, "available_actions": ["take mug 1 from desk 1"], "done": False},
                {"observation": "You win.", "reward": 1, "available_actions": [], "done": True},
            ],
        }
    )
    with serving(script) as url, AlfWorldClient(url) as client:
        assert client.reset(game) == "A room.\nPossible actions: look, go to desk 1"
        moved = client.step("Thought:\nthere\n\nAction:\ngo to desk 1")
        assert moved.state == "A desk.\nPossible actions: take mug 1 from desk 1"
        assert client.available_actions() == ["take mug 1 from desk 1"]
        won = client.step("Action: take mug 1 from desk 1")
        assert (won.state, won.reward, won.done) == ("You win.", 1.0, True)
    assert script.sent("/reset") == [{"id": 4, "game": game, "world_type": "Text"}]
    assert script.sent("/step")[0] == {"id": 4, "action": "go to desk 1"}


def test_items_that_are_paths_of_games_go_from_their_file_to_the_server_into_the_log_and_back(tmp_path: Path) -> None:
    games = [f"json_2.1.1/train/pick_and_place_simple-Mug-None-Desk-{n}/trial_T2019_{n}" for n in (308, 309)]
    (tmp_path / "alfworld_train.json").write_text(json.dumps([{"item_id": game} for game in games]))
    items = load_items(tmp_path / "alfworld_train.json", "alfworld")
    won = {"observation": "You win.", "reward": 1, "available_actions": [], "done": True}
    start = {"id": 4, "observation": "A room.", "available_actions": ["look"], "task_type": "look"}
    script = Script({"/create": {"id": 4}, "/reset": start, "/step": [won, dict(won)]})
    chat = frameless_chat()
    with serving(script) as url:
        trajectories = asyncio.run(
            collect(
                [RolloutRequest(item, item.item_id, 0) for item in items],
                ScriptedEngine(chat, lambda turn: "Action: look"),
                make_client=lambda: AlfWorldClient(url),
                chat=chat,
                settings=make_settings(),
            )
        )
    assert sorted(fields["game"] for fields in script.sent("/reset")) == games
    with TrajectoryLog(tmp_path / "0.jsonl") as log:
        for trajectory in trajectories:
            log.write(trajectory)
    read = read_trajectories(tmp_path / "0.jsonl").trajectories
    assert [trajectory.item for trajectory in read] == list(items)
    assert all(trajectory.success for trajectory in read)


@pytest.mark.parametrize("suffix", ["", "/", "/maze", "/maze/"])
def test_maze(suffix: str) -> None:
    script = Script(
        {
            "/maze/create": {"id": 1},
            "/maze/reset": {"id": 1, "observation": "The goal is at 8, 6.", "reward": 0, "done": False},
            "/maze/available_actions": ["move up", "move down"],
            "/maze/step": [
                {"observation": "A wall.", "reward": -1, "done": False},
                {"observation": "Success", "reward": 0, "done": True},
            ],
        }
    )
    with serving(script) as url, MazeClient(url + suffix) as client:
        assert client.reset(25) == "The goal is at 8, 6."
        assert client.available_actions() == ["move up", "move down"]
        assert client.step("Action: Up").reward == -1.0
        assert client.step("Action: move left").done
    assert script.sent("/maze/reset") == [{"id": 1, "game": 25}]
    assert [fields["action"] for fields in script.sent("/maze/step")] == ["move up", "move left"]


def test_wordle() -> None:
    script = Script(
        {
            "/wordle/create": {"id": 2},
            "/wordle/reset": {"id": 2, "observation": "", "reward": 0, "done": False},
            "/wordle/filtered_vocab": ["c r a n e", "s l a t e"],
            "/wordle/step": [
                {"observation": "g b y b b", "reward": -1.0, "done": False},
                {"observation": "g g g g g", "reward": 0.0, "done": True},
            ],
        }
    )
    with serving(script) as url, WordleClient(url) as client:
        assert client.reset(11) == "Words that may be guessed: crane slate"
        wrong, right = client.step("Action: CRANE"), client.step("Action: s l a t e")
        assert [(step.reward, step.done) for step in (wrong, right)] == [(0.0, False), (1.0, True)]
    assert script.sent("/wordle/reset") == [{"id": 2, "seed": 11}]
    assert [fields["action"] for fields in script.sent("/wordle/step")] == ["c r a n e", "s l a t e"]


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("Thought: so\nAction: ```sql\nSELECT a\nFROM t;\n```", "SELECT a\nFROM t;"),
        ("```SQL SELECT 1;```", "SELECT 1;"),
        ("```sql\nSELECT 1;\n```\nor better\n```sql\nSELECT 2;\n```", "SELECT 2;"),
        ("The tables:\n```text\nusers(id)\n```\nSo it is:\n```sql\nSELECT 1;\n```", "SELECT 1;"),
        ("```python\nx = 1\n```\nthen\n```SQLite\nSELECT 1;\n```\nDone.", "SELECT 1;"),
        ("```\nSELECT 1;\n```\ngives\n```text\n5\n```\nand that is all", "SELECT 1;"),
        ("```text\nt(a)\n```\nand\n```text\nu(b)\n```\nAction: SELECT 4;", "SELECT 4;"),
        ("<think>A ``` opens; ```sql\nSELECT 0;\n```?</think>\n```sql\nSELECT 1;\n```", "SELECT 1;"),
        ("<think>Perhaps ```sql\nSELECT 0;\n```</think>\nAction: SELECT 5;", "SELECT 5;"),
        ("Action: SELECT 3;", "SELECT 3;"),
        ("I do not know", None),
        ("```sql\nSELECT 1;\n```\n```sql\n```", "SELECT 1;"),
        ("```sql\n```", None),
        ("```text\nt(a)\n```\nand nothing\n```text\nelse\n```", None),
    ],
)
def test_sqlgym(text: str, sent: str | None) -> None:
    done = {"state": "[(1,)]", "reward": 1.0, "done": True, "info": {}}
    script = Script({"/create": 0, "/reset": ["Tables: t. Question: how many?", None], "/step": [done]})
    with serving(script) as url, SqlGymClient(url) as client:
        assert client.reset(9) == "Tables: t. Question: how many?"
        output = client.step(text)
        assert output.done is (sent is not None)
    assert script.sent("/reset") == [{"env_idx": 0, "item_id": 9}]
    assert [fields["action"] for fields in script.sent("/step")] == ([] if sent is None else [sent])


@pytest.mark.parametrize("kind", TOOLS)
def test_tools(kind: type[EnvClient]) -> None:
    script = Script(
        {
            "/create": 6,
            "/reset": "Goal: when?",
            "/step": [
                {"observation": "2015-01-02", "reward": 0, "done": False},
                {"observation": "yes", "reward": 1.0, "done": True},
            ],
        }
    )
    turns = [
        "Thought: I ask.\n\nAction: get_user_current_date with Action Input: {}",
        'Action: finish with Action Input: {"answer": "yes"}',
    ]
    with serving(script) as url, kind(url) as client:
        assert client.reset(3) == "Goal: when?"
        assert [client.step(turn).reward for turn in turns] == [0.0, 1.0]
        assert client.available_actions() == list(client.action_forms)
    assert script.sent("/create") == [{"id": 0}]
    assert script.sent("/reset") == [{"env_idx": 6, "id": 3}]
    assert script.sent("/step") == [{"env_idx": 6, "action": turn} for turn in turns]


@pytest.mark.parametrize("kind", CLIENTS)
def test_each_is_a_task_that_can_be_trained_on_and_describes_itself(kind: type[EnvClient]) -> None:
    assert kind.task in known_tasks()
    spec = get_spec(kind.task)
    assert spec.client is kind
    opening = conversation_start(kind.task_description, "react")
    assert kind.task_description in opening[0].content
    with pytest.raises(ConfigError, match=f"{kind.task}: only its client is here; start AgentGym's server"):
        spec.data_version()


@pytest.mark.parametrize(
    ("kind", "greeting"),
    [(WebShopClient, "This is environment WebShop."), (TodoClient, "This is environment Todo."), (MovieClient, "ok")],
)
def test_the_check_before_training_takes_such_a_server(kind: type[EnvClient], greeting: str) -> None:
    script = Script({"/": greeting, "/step": (422, {"detail": "env_idx"})})
    with serving(script) as url:
        check_server(url, kind.task)


@pytest.mark.parametrize(
    ("answers", "error", "message"),
    [
        ({"/create": {"id": 1}}, EnvProtocolError, "expected an integer, got {'id': 1}"),
        ({"/create": True}, EnvProtocolError, "expected an integer, got True"),
        ({"/create": 1, "/reset": None}, EnvProtocolError, "expected a text, got None"),
        ({"/create": 1, "/reset": [None, None]}, EnvProtocolError, "expected a text"),
        ({"/create": 1, "/reset": (500, "boom")}, EnvServerError, "HTTP 500: boom"),
        (
            {"/create": 1, "/reset": "go", "/step": [{"observation": "x"}]},
            EnvProtocolError,
            "no 'reward' in the answer",
        ),
        ({"/create": 1, "/reset": "go", "/step": [(500, "boom")]}, EnvServerError, "item weather_0 step 1.*HTTP 500"),
    ],
)
def test_what_is_not_of_the_shape_is_a_fault_and_never_a_reward(
    answers: dict[str, Any], error: type[Exception], message: str
) -> None:
    def play(url: str) -> None:
        with WeatherClient(url) as client:
            client.reset(0)
            client.step("Action: finish with Action Input: {}")

    run: Callable[[str], None] = play
    with serving(Script(answers)) as url, pytest.raises(error, match=message):
        run(url)
