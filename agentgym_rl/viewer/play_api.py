"""Calls that play on environment servers: the page talks to the viewer alone, and the viewer calls the servers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import APIRouter, HTTPException
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from agentgym_rl.envs.registry import get_spec
from agentgym_rl.errors import AgentGymError, EnvError
from agentgym_rl.viewer.answers import json_answer
from agentgym_rl.viewer.panel import panel_beside
from agentgym_rl.viewer.playing import Game, Games, PlayError

_MOST_LISTED = 500
"""Actions that are shown: SciWorld has thousands."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Begin(_Body):
    """Which item on which server."""

    server: int = Field(ge=0)
    item: int = Field(ge=0, lt=2**53)


class Act(_Body):
    """A turn, or a bare action."""

    text: str = Field(min_length=1, max_length=100_000)


class Ask(_Body):
    """Let a model write the next turn, and play it, or only show it."""

    model: str
    temperature: float = Field(0.0, ge=0, le=2)
    play: bool = True


def make_router(games: Games) -> APIRouter:
    router = APIRouter(prefix="/play")

    @router.get("")
    def settings() -> Response:
        """Servers and models that may be called."""
        chosen = games.settings
        return json_answer(
            {
                "servers": [_server(each.task, each.url) for each in chosen.servers],
                "models": [{"name": model.model, "url": model.api_base} for model in chosen.models],
                "can_save": chosen.folder is not None,
            }
        )

    @router.post("/games")
    def begin(body: Begin) -> Response:
        """Create a session and reset it to an item."""
        with _told():
            return _state(games.begin(body.server, body.item))

    @router.post("/games/{id}/act")
    def act(id: str, body: Act) -> Response:
        """Play a turn by hand."""
        with _held(games, id) as game:
            game.act(body.text)
            return _state(game)

    @router.post("/games/{id}/ask")
    def ask(id: str, body: Ask) -> Response:
        """Ask a model for the next turn."""
        with _held(games, id) as game:
            model, start = games.model(body.model), time.monotonic()
            text = replace(model, temperature=body.temperature).ask(game.messages).text
            if body.play:
                game.act(text, body.model, time.monotonic() - start)
                return _state(game)
            return json_answer({"proposal": text})

    @router.post("/games/{id}/save")
    def save(id: str) -> Response:
        """Write the trajectory so far."""
        with _held(games, id) as game:
            return json_answer({"path": str(games.save(game))})

    @router.post("/games/{id}/close")
    def close(id: str) -> Response:
        """End the session; false for one that had ended."""
        return json_answer(games.close(id))

    return router


def _server(task: str, url: str) -> dict[str, Any]:
    spec = get_spec(task)
    return {"task": task, "title": spec.title, "url": url, "num_items": spec.num_items}


@contextmanager
def _told() -> Iterator[None]:
    """What goes wrong, in words: 409 for what cannot be done now, 502 for a server or model that failed."""
    try:
        yield
    except PlayError as error:
        raise HTTPException(409, str(error)) from error
    except AgentGymError as error:
        raise HTTPException(502, str(error)) from error
    except OSError as error:
        raise HTTPException(500, f"could not be written: {error}") from error


@contextmanager
def _held(games: Games, id: str) -> Iterator[Game]:
    with _told():
        game = games.find(id)
        with game.lock:
            yield game


def _state(game: Game) -> Response:
    """All that the page shows."""
    trajectory = game.trajectory()
    try:
        actions = game.actions()
    except EnvError:  # the turn was played all the same; the page does without the list
        actions = []
    return json_answer(
        {
            "id": game.id,
            "item_id": trajectory.item.item_id,
            "messages": [{"role": str(message.role), "content": message.content} for message in game.messages],
            "turns": [msgspec.to_builtins(turn) for turn in game.turns],
            "players": game.players,
            "score": trajectory.score,
            "success": trajectory.success,
            "done": game.done,
            "actions": actions[:_MOST_LISTED],
            "num_actions": len(actions),
            "panel": panel_beside(trajectory),
        }
    )
