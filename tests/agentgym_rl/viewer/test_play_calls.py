"""Playing through the viewer's calls: real environment servers, scripted models, and sessions that always end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
from support.faults import http_answer, raw_server
from support.judges import scripted_model

from agentgym_rl.data.conversations import read_conversations
from agentgym_rl.envs.babyai import SPEC as BABYAI
from agentgym_rl.envs.base import Environment, InvalidCall, ResetResult
from agentgym_rl.envs.server import build_app as environment_app
from agentgym_rl.envs.serving import running
from agentgym_rl.envs.textcraft import SPEC as TEXTCRAFT
from agentgym_rl.errors import ConfigError
from agentgym_rl.hosted.endpoint import HostedModel
from agentgym_rl.rollout.log import read_trajectories
from agentgym_rl.types import StopReason, encodable
from agentgym_rl.viewer.app import build_app
from agentgym_rl.viewer.library import Library
from agentgym_rl.viewer.playing import EnvServer, Games, PlayError, PlaySettings, parse_models, parse_servers

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def textcraft() -> Iterator[str]:
    with running(environment_app(TEXTCRAFT)) as url:
        yield url


class Viewer:
    """The calls that the page makes."""

    def __init__(self, url: str) -> None:
        self.url = url

    def post(self, path: str, **body: Any) -> Any:
        answer = requests.post(f"{self.url}/api/play/{path}", json=body, timeout=30)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, path: str, **body: Any) -> tuple[int, str]:
        answer = requests.post(f"{self.url}/api/play/{path}", json=body, timeout=30)
        return answer.status_code, str(answer.json()["detail"])


@contextmanager
def viewer(
    tmp_path: Path, *servers: EnvServer, models: tuple[HostedModel, ...] = (), save: bool = True
) -> Iterator[Viewer]:
    (tmp_path / "empty").mkdir(exist_ok=True)
    settings = PlaySettings(servers, models, tmp_path / "played" if save else None)
    with running(build_app(Library(tmp_path / "empty"), play=settings)) as url:
        yield Viewer(url)


def sessions(url: str) -> int:
    return int(requests.get(f"{url}/health", timeout=10).json()["sessions"])


def test_an_episode_played_by_hand_is_saved_as_any_other_trajectory(textcraft: str, tmp_path: Path) -> None:
    with viewer(tmp_path, EnvServer("textcraft", textcraft)) as page:
        game = page.post("games", server=0, item=0)
        goal = game["messages"][-1]["content"].rpartition("Goal: craft ")[2].rstrip(".")
        assert game["turns"] == []
        assert "inventory" in game["actions"]
        assert game["panel"]["frames"]
        for text in ("dance", "Thought: look first\nAction: inventory"):
            game = page.post(f"games/{game['id']}/act", text=text)
        assert [turn["text"] for turn in game["turns"]] == ["Action: dance", "Thought: look first\nAction: inventory"]
        plan = TEXTCRAFT.environment()
        plan.reset(0)
        assert TEXTCRAFT.expert is not None
        for action in TEXTCRAFT.expert(plan):
            game = page.post(f"games/{game['id']}/act", text=action)
        assert (game["done"], game["success"], game["score"], game["actions"]) == (True, True, 1.0, [])
        assert page.refused(f"games/{game['id']}/act", text="inventory") == (
            409,
            "the episode has ended: begin an item",
        )
        path = page.post(f"games/{game['id']}/save")["path"]
        assert sessions(textcraft) == 1
        assert page.post(f"games/{game['id']}/close") is True
        assert sessions(textcraft) == 0
        assert page.post(f"games/{game['id']}/close") is False
        assert page.refused(f"games/{game['id']}/act", text="inventory")[0] == 409
    [trajectory] = read_trajectories(path).trajectories
    assert trajectory.item.item_id == "textcraft_0"
    assert (trajectory.score, trajectory.success, trajectory.stop_reason) == (1.0, True, StopReason.DONE)
    assert str(trajectory.turns[-1].observation).endswith(f" minecraft:{goal.replace(' ', '_')}")
    assert trajectory.extra["played_by"] == ["hand"] * len(trajectory.turns)
    [conversation] = read_conversations(path)
    trained = [m.content for m, flag in zip(conversation.messages, conversation.train_flags, strict=True) if flag]
    assert trained == [turn.text for turn in trajectory.turns]
    library = Library(Path(path).parent)
    library.refresh()
    assert [summary.item_id for summary in library.summaries()] == ["textcraft_0"]


def test_a_model_proposes_plays_and_its_failure_leaves_the_game_as_it_was(textcraft: str, tmp_path: Path) -> None:
    with scripted_model("Thought: <b>x</b>\nAction: inventory", "Action: inventory", "") as (address, asked):
        models = (HostedModel(address, "qwen=7b"),)
        with viewer(tmp_path, EnvServer("textcraft", textcraft), models=models) as page:
            game = page.post("games", server=0, item=3)
            proposed = page.post(f"games/{game['id']}/ask", model="qwen=7b", play=False)
            assert proposed == {"proposal": "Thought: <b>x</b>\nAction: inventory"}
            after = page.post(f"games/{game['id']}/ask", model="qwen=7b", temperature=0.5)
            assert after["players"] == ["qwen=7b"]
            assert after["turns"][0]["generation_s"] > 0
            status, told = page.refused(f"games/{game['id']}/ask", model="qwen=7b")
            assert (status, "HTTP 500" in told, "qwen=7b" in told) == (502, True, True)
            assert page.refused(f"games/{game['id']}/ask", model="other")[0] == 409
            again = page.post(f"games/{game['id']}/act", text="inventory")
            assert again["players"] == ["qwen=7b", "hand"]
    assert asked[0]["messages"][-1]["content"] == game["messages"][-1]["content"]
    assert [(each["temperature"], each["model"]) for each in asked[:2]] == [(0.0, "qwen=7b"), (0.5, "qwen=7b")]
    assert sessions(textcraft) == 0  # the viewer's end closed the game


def test_only_configured_servers_are_called_and_nothing_is_written_unasked(textcraft: str, tmp_path: Path) -> None:
    with viewer(tmp_path, EnvServer("textcraft", textcraft), save=False) as page:
        assert page.refused("games", server=1, item=0)[0] == 409
        assert page.refused("games", server=0, item=0, url="http://127.0.0.1:1")[0] == 422
        game = page.post("games", server=0, item=0)
        page.post(f"games/{game['id']}/act", text="inventory")
        status, told = page.refused(f"games/{game['id']}/save")
        assert (status, "--save-to" in told) == (409, True)
        foreign = requests.post(
            f"{page.url}/api/play/games",
            json={"server": 0, "item": 0},
            headers={"origin": "http://evil.example"},
            timeout=10,
        )
        assert foreign.status_code == 403
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_server_that_is_not_there_or_has_no_such_item_is_told(tmp_path: Path) -> None:
    with running(environment_app(BABYAI)) as url:
        gone = EnvServer("textcraft", "http://127.0.0.1:9")
        with viewer(tmp_path, EnvServer("babyai", url), gone) as page:
            status, told = page.refused("games", server=1, item=0)
            assert (status, "http://127.0.0.1:9" in told) == (502, True)
            game = page.post("games", server=0, item=7)
            assert game["panel"]["frames"][0][0]["kind"] == "grid"
            moved = page.post(f"games/{game['id']}/act", text="turn left")
            assert "Played again" in moved["panel"]["note"]


def test_a_reset_that_fails_leaves_no_session(textcraft: str, tmp_path: Path) -> None:
    def make() -> Environment:
        environment = TEXTCRAFT.environment()

        def refuse(data_idx: int) -> ResetResult:
            raise InvalidCall("not today")

        environment.reset = refuse  # type: ignore[method-assign]
        return environment

    broken = replace(
        TEXTCRAFT,
        environment=make,
        wire=replace(TEXTCRAFT.wire, starts_on_create=False, created=lambda handle, start: {"id": handle}),
    )
    with running(environment_app(broken)) as url, viewer(tmp_path, EnvServer("textcraft", url)) as page:
        status, told = page.refused("games", server=0, item=0)
        assert (status, "not today" in told) == (502, True)
        assert sessions(url) == 0


def test_half_a_surrogate_pair_of_a_server_is_replaced_before_it_meets_a_file(tmp_path: Path) -> None:
    def answer(path: str, body: dict[str, Any], headers: dict[str, str]) -> bytes:
        fields = {"id": 0, "observation": "Half \ud800.", "reward": 0.0, "done": False}
        return http_answer([] if path.startswith("/available_actions") else fields)

    with raw_server(answer) as url, viewer(tmp_path, EnvServer("textcraft", url)) as page:
        game = page.post("games", server=0, item=0)
        page.post(f"games/{game['id']}/act", text="look")
        path = page.post(f"games/{game['id']}/save")["path"]
    [trajectory] = read_trajectories(path).trajectories
    said = encodable("Half \ud800.")
    assert [message.content for message in trajectory.messages[2:]] == [said, "Action: look", said]
    assert trajectory.turns[0].observation == said


def test_games_that_were_left_are_closed_and_too_many_are_refused(textcraft: str) -> None:
    now = [0.0]
    games = Games(PlaySettings((EnvServer("textcraft", textcraft),)), clock=lambda: now[0])
    first = games.begin(0, 0)
    now[0] = 1000.0
    rest = [games.begin(0, 0) for _ in range(15)]
    with pytest.raises(PlayError, match="16 games are open"):
        games.begin(0, 0)
    now[0] = 1801.0
    games.close_idle()
    with pytest.raises(PlayError, match="is closed"):
        games.find(first.id)
    assert sessions(textcraft) == 15
    assert games.find(rest[0].id) is rest[0]
    games.close_all()
    assert sessions(textcraft) == 0


def test_addresses_are_read_with_their_names() -> None:
    assert parse_servers(["textcraft=http://127.0.0.1:36001/"]) == (EnvServer("textcraft", "http://127.0.0.1:36001"),)
    [model] = parse_models(["org/model=v2=http://h:1/v1"])
    assert (model.model, model.api_base) == ("org/model=v2", "http://h:1/v1")
    for wrong in ("http://127.0.0.1:36001", "nothing=http://127.0.0.1:1", "textcraft=ftp://x"):
        with pytest.raises(ConfigError):
            parse_servers([wrong])
    for wrong in ("http://h/v1", "name=h:1/v1", "name"):
        with pytest.raises(ConfigError, match="NAME=URL"):
            parse_models([wrong])


def test_a_key_goes_to_openai_and_where_it_is_named_for_and_to_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "for-openai")
    monkeypatch.setenv("MY_KEY", "mine")
    values = ["gpt=https://api.openai.com/v1", "qwen=http://127.0.0.1:8000/v1"]
    assert [model.key for model in parse_models(values)] == ["for-openai", None]
    assert [model.key for model in parse_models(values, "MY_KEY")] == ["mine", "mine"]
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ConfigError, match="OPENAI_API_KEY: this environment variable holds the model's key"):
        parse_models(values)


def test_what_a_page_sends_is_checked(textcraft: str, tmp_path: Path) -> None:
    with viewer(tmp_path, EnvServer("textcraft", textcraft)) as page:
        assert page.refused("games", server=0, item=-1)[0] == 422
        game = page.post("games", server=0, item=0)
        assert page.refused(f"games/{game['id']}/act", text="")[0] == 422
        assert page.refused(f"games/{game['id']}/save")[0] == 409  # nothing was played
