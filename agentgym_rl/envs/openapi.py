"""The OpenAPI document of an environment's server, made from its spec: for readers, generators and fuzzers."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentgym_rl.envs.registry import EnvSpec

_MAX_HANDLE = 2**53 - 1
_TEXT = {"type": "string"}


def openapi_document(spec: EnvSpec) -> dict[str, Any]:
    """OpenAPI 3.1: every path with its request's fields and the statuses it may answer."""
    handle = {spec.wire.handle_field: {"type": "integer", "minimum": 1, "maximum": _MAX_HANDLE}}
    index = {spec.wire.index_field: {"type": "integer", "default": 0}}
    action = {"action": _TEXT}
    paths: dict[str, dict[str, Any]] = {}
    for path in ("/", "/health", "/metrics", "/openapi.json"):
        paths[path] = {"get": {"responses": _responses(200)}}
    for name in ("observation", "available_actions", "detail", "render", *spec.queries):
        paths.setdefault(f"/{name}", {})["get"] = _get(handle)
    paths["/create"] = {"post": _post({}, required=(), also=(503,))}
    posts: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
        ("reset", handle | index, tuple(handle)),
        ("close", handle, tuple(handle)),
        ("render", handle, tuple(handle)),
        *((name, handle, tuple(handle)) for name in spec.commands),
        *((name, handle | action, (*handle, "action")) for name in ("step", *spec.step_views)),
    ]
    for name, fields, required in posts:
        paths.setdefault(f"/{name}", {})["post"] = _post(fields, required=required)
    call = {"type": "object", "properties": {"path": _TEXT, "body": {"type": "object"}, "request_id": _TEXT}}
    paths["/batch"] = {"post": _post({"calls": {"type": "array", "items": call}}, required=("calls",))}
    info = {"title": f"{spec.title} environment", "version": version("agentgym-rl")}
    return {"openapi": "3.1.0", "info": info, "paths": paths}


def _get(fields: dict[str, Any]) -> dict[str, Any]:
    parameters = [{"name": name, "in": "query", "required": True, "schema": schema} for name, schema in fields.items()]
    return {"parameters": parameters, "responses": _responses(200, 400, 404, 422)}


def _post(fields: dict[str, Any], *, required: tuple[str, ...], also: tuple[int, ...] = ()) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": fields, "required": list(required)}
    body = {"required": bool(required), "content": {"application/json": {"schema": schema}}}
    return {"requestBody": body, "responses": _responses(200, 400, 404, 413, 422, *also)}


def _responses(*statuses: int) -> dict[str, Any]:
    return {str(status): {"description": "see the wire protocol"} for status in statuses}
