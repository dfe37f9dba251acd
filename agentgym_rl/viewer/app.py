"""The application: pages and their JSON, on FastAPI. README.md describes the calls."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from starlette.responses import Response

from agentgym_rl.viewer import runs_api, trajectories_api
from agentgym_rl.viewer.library import Library
from agentgym_rl.viewer.security import Access, Guard

STATIC = Path(__file__).parent / "static"


def build_app(library: Library, *, access: Access | None = None) -> FastAPI:
    """The viewer of ``library``; it only ever reads files."""
    app = FastAPI(title="AgentGym-RL viewer", docs_url=None, redoc_url=None, openapi_url=None)
    for module in (runs_api, trajectories_api):
        app.include_router(module.make_router(library), prefix="/api")
    app.add_api_route("/", _index, methods=["GET"], include_in_schema=False)
    app.mount("/static", _Static(directory=STATIC))
    app.add_middleware(Guard, access=access or Access())
    return app


def _index() -> Response:
    return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})


class _Static(StaticFiles):
    """Files of the front end; the browser keeps them, and asks each time whether they have changed."""

    def file_response(self, *arguments: object, **options: object) -> Response:
        response = super().file_response(*arguments, **options)  # type: ignore[arg-type]
        response.headers["cache-control"] = "no-cache"
        return response
