"""The application: pages and their JSON, on FastAPI. README.md describes the calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from starlette.responses import Response

from agentgym_rl.viewer import episodes_api, play_api, runs_api, trajectories_api
from agentgym_rl.viewer.library import Library
from agentgym_rl.viewer.playing import Games, PlaySettings
from agentgym_rl.viewer.security import Access, Guard

STATIC = Path(__file__).parent / "static"
_LOOK_FOR_IDLE_S = 60.0


def build_app(library: Library, *, access: Access | None = None, play: PlaySettings | None = None) -> FastAPI:
    """The viewer of ``library``, whose files it only ever reads; ``play``: the servers that it may play on."""
    games = Games(play or PlaySettings())
    app = FastAPI(
        title="AgentGym-RL viewer", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lambda app: _ending(games)
    )
    for module in (runs_api, trajectories_api, episodes_api):
        app.include_router(module.make_router(library), prefix="/api")
    app.include_router(play_api.make_router(games), prefix="/api")
    app.add_api_route("/", _index, methods=["GET"], include_in_schema=False)
    app.mount("/static", _Static(directory=STATIC))
    app.add_middleware(Guard, access=access or Access())
    return app


@asynccontextmanager
async def _ending(games: Games) -> AsyncIterator[None]:
    """Games that are left are ended now and then, and all when the viewer ends."""
    looking = asyncio.create_task(_end_idle(games))
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.to_thread(games.close_all)


async def _end_idle(games: Games) -> None:
    while True:
        await asyncio.sleep(_LOOK_FOR_IDLE_S)
        await asyncio.to_thread(games.close_idle)


def _index() -> Response:
    return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})


class _Static(StaticFiles):
    """Files of the front end; the browser keeps them, and asks each time whether they have changed."""

    def file_response(self, *arguments: object, **options: object) -> Response:
        response = super().file_response(*arguments, **options)  # type: ignore[arg-type]
        response.headers["cache-control"] = "no-cache"
        return response
