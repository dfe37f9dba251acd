"""Answers of the API: JSON made by msgspec, in which numbers that are not finite become null."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import HTTPException
from starlette.responses import Response


def json_answer(value: Any) -> Response:
    """Half a surrogate pair, which JSON may carry and UTF-8 may not, is replaced."""
    try:
        content = msgspec.json.encode(value)
    except UnicodeEncodeError:
        content = msgspec.json.encode(_encodable(msgspec.to_builtins(value)))
    return Response(content, media_type="application/json")


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_encodable(name): _encodable(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(each) for each in value]
    return value


def not_found(what: str, name: str) -> HTTPException:
    """HTTP 404 that names what was asked for."""
    return HTTPException(404, f"{what} {name[:200]!r} is not here, or not any more")
