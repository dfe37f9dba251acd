"""Answers of the API: JSON made by msgspec, in which numbers that are not finite become null."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import HTTPException
from starlette.responses import Response


def json_answer(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def not_found(what: str, name: str) -> HTTPException:
    """HTTP 404 that names what was asked for."""
    return HTTPException(404, f"{what} {name[:200]!r} is not here, or not any more")
