"""Turns any `Environment` into an ASGI application that speaks the AgentGym protocol.

The application is written on ASGI itself: for an environment whose step takes 20 microseconds a web framework would be
most of the cost. Dialect: the handle field is ``id``; what the environment itself refuses is HTTP 200 with
``{"error": text}``; a malformed request is 422, a fault of the environment 500, both with ``{"detail": text}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from agentgym_rl.envs.base import Environment, InvalidCall, StepResult
from agentgym_rl.envs.registry import EnvSpec
from agentgym_rl.envs.sessions import AtCapacity, Session, SessionStore

MAX_BODY_BYTES = 4 * 2**20
MAX_THREADS = 256
"""Calls that run at once in an environment that is not ``runs_inline``."""
_REMEMBERED_CREATES = 4096
"""Creates whose answer is kept by request id."""

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class MalformedRequest(Exception):
    """The request is not of the protocol's form."""


class EnvironmentFault(Exception):
    """The environment's own code failed; its state is unknown until the next reset."""


@dataclass(frozen=True, slots=True)
class Request:
    """One call, whether it came alone or in a batch."""

    fields: Mapping[str, Any]
    """Body of a POST, query of a GET (as text)."""
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """One call's answer; ``content`` is any JSON value, or text that is sent as it is."""

    content: Any
    status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = ()
    content_type: bytes = b"application/json"

    def body(self) -> bytes:
        if self.content_type != b"application/json":
            return str(self.content).encode()
        return json.dumps(self.content, separators=(",", ":")).encode()


_Handler = Callable[[Request], Awaitable[Answer]]


def build_app(
    spec: EnvSpec,
    *,
    max_sessions: int = 1024,
    session_ttl_s: float = 3600.0,
    clock: Callable[[], float] = time.monotonic,
) -> EnvApp:
    """The ASGI application that serves ``spec``.

    ``session_ttl_s``: a session that no request touched for so long is closed. Raises `ConfigError` when what the
    environment needs is not installed.
    """
    store = SessionStore(max_sessions=max_sessions, ttl_s=session_ttl_s, clock=clock)
    return EnvApp(spec, store)


class EnvApp:
    """Routes requests to sessions. One per server; used from one event loop."""

    def __init__(self, spec: EnvSpec, store: SessionStore) -> None:
        self.spec = spec
        self.store = store
        self._metrics = _Metrics()
        self._data_version = spec.data_version()
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, store.max_sessions), thread_name_prefix=f"env-{spec.name}")
        self._created: OrderedDict[str, asyncio.Task[Answer]] = OrderedDict()
        self._routes: dict[tuple[str, str], _Handler] = {
            ("POST", "/create"): self._create_once,
            ("POST", "/reset"): self._reset,
            ("POST", "/step"): self._step,
            ("POST", "/close"): self._close,
            ("POST", "/batch"): self._batch,
            ("GET", "/"): self._root,
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._show_metrics,
            ("GET", "/observation"): self._query(lambda environment: environment.observation()),
            ("GET", "/available_actions"): self._query(lambda environment: environment.available_actions()),
            ("GET", "/detail"): self._detail,
        }
        for name, question in spec.queries.items():
            self._routes["GET", f"/{name}"] = self._query(question)
        self._paths = {path for _, path in self._routes}

    # ---------------------------------------------------------------------------------------------------------- ASGI

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)

    async def _http(self, scope: Any, receive: Any, send: Any) -> None:
        method, path = scope["method"], scope["path"]
        request_id = next((value for name, value in scope["headers"] if name == b"x-request-id"), None)
        try:
            body = await _read_body(receive)
            fields = dict(parse_qsl(scope["query_string"].decode("latin-1"))) if method == "GET" else _parse_body(body)
        except MalformedRequest as error:
            answer = Answer({"detail": str(error)}, 422)
        else:
            id_text = None if request_id is None else request_id.decode("latin-1")
            answer = await self.call(method, path, Request(fields, id_text))
        payload = answer.body()
        headers = [(b"content-type", answer.content_type), (b"content-length", b"%d" % len(payload)), *answer.headers]
        if request_id is not None:
            # The echo tells a client that it may repeat this request under the same id.
            headers.append((b"x-request-id", request_id))
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": payload})

    async def _lifespan(self, receive: Any, send: Any) -> None:
        await receive()
        reaper = asyncio.create_task(self._reap_forever())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        reaper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reaper
        # A session whose call is still running is left alone: it may never end, and the process must.
        await self._close_sessions([session for session in self.store.remove_all() if session.users == 0])
        self._threads.shutdown(wait=False, cancel_futures=True)
        await send({"type": "lifespan.shutdown.complete"})

    async def _reap_forever(self) -> None:
        while True:
            await asyncio.sleep(min(30.0, self.store.ttl_s / 4))
            await self.reap()

    async def reap(self) -> None:
        """Close the sessions whose lifetime is over."""
        expired = self.store.remove_expired()
        self._metrics.expired += len(expired)
        await self._close_sessions(expired)

    # ------------------------------------------------------------------------------------------------------- routing

    async def call(self, method: str, path: str, request: Request) -> Answer:
        """The answer to one call, errors included."""
        handler = self._routes.get((method, path))
        if handler is None:
            known = path in self._paths
            return Answer(
                {"detail": f"{method} {path}: {'wrong method' if known else 'no such path'}"}, 405 if known else 404
            )
        try:
            answer = await handler(request)
        except InvalidCall as error:
            answer = Answer({"error": str(error)})
        except MalformedRequest as error:
            answer = Answer({"detail": f"{path}: {error}"}, 422)
        except AtCapacity as error:
            answer = Answer({"detail": str(error)}, 503, ((b"retry-after", b"1"),))
        except EnvironmentFault as error:
            answer = Answer({"detail": f"{path}: {error}"}, 500)
        self._metrics.requests[path, answer.status] += 1
        return answer

    async def _batch(self, request: Request) -> Answer:
        """``{"calls": [{"path", "body", "request_id"}, ...]}`` answered in order by ``[{"status", "body"}, ...]``."""
        calls = request.fields.get("calls")
        if not isinstance(calls, list):
            raise MalformedRequest(f"calls={calls!r}: must be a list of objects with path and body")
        return Answer([await self._batched(call) for call in calls])

    async def _batched(self, call: Any) -> dict[str, Any]:
        path = call.get("path") if isinstance(call, dict) else None
        if path not in ("/create", "/reset", "/step", "/close"):
            return {"status": 422, "body": {"detail": f"path={path!r}: must be /create, /reset, /step or /close"}}
        body, request_id = call.get("body", {}), call.get("request_id")
        if not isinstance(body, dict) or not isinstance(request_id, str | None):
            return {"status": 422, "body": {"detail": "body must be an object and request_id, if given, a string"}}
        answer = await self.call("POST", path, Request(body, request_id))
        return {"status": answer.status, "body": answer.content}

    # ------------------------------------------------------------------------------------------------------ sessions

    async def _create_once(self, request: Request) -> Answer:
        """Create; a repeated request id gets the session that the first request made."""
        if request.request_id is None:
            return await self._create()
        making = self._created.get(request.request_id)
        if making is None:
            making = self._created[request.request_id] = asyncio.create_task(self._create())
            if len(self._created) > _REMEMBERED_CREATES:
                self._created.popitem(last=False)
        try:
            return await asyncio.shield(making)
        except AtCapacity:
            self._created.pop(request.request_id, None)
            raise

    async def _create(self) -> Answer:
        try:
            self.store.reserve()
        except AtCapacity:
            await self.reap()
            self.store.reserve()
        try:
            environment, observation = await self._run("create", self._new_environment)
        except (EnvironmentFault, InvalidCall):
            self.store.cancel()
            raise
        session = self.store.add(environment)
        self._metrics.created += 1
        return Answer({"id": session.handle, "observation": observation, "done": False, "reward": 0})

    def _new_environment(self) -> tuple[Environment, str]:
        """A fresh environment, at the start of item 0."""
        with contextlib.ExitStack() as undo:
            environment = self.spec.environment()
            undo.callback(environment.close)
            observation = environment.reset(0).observation
            undo.pop_all()
        return environment, observation

    async def _reset(self, request: Request) -> Answer:
        data_idx = _integer(request.fields, "data_idx", default=0)

        def reset(session: Session) -> Any:
            session.reward, session.done = 0, False
            observation = session.environment.reset(data_idx).observation
            return {"id": session.handle, "observation": observation, "done": False, "reward": 0}

        return await self._in_session(request, f"reset to item {data_idx}", reset)

    async def _step(self, request: Request) -> Answer:
        action = request.fields.get("action")
        if not isinstance(action, str):
            raise MalformedRequest(f"action={action!r}: must be a string")

        def step(session: Session) -> Any:
            result = session.environment.step(action)
            fields = _step_fields(result)
            session.reward, session.done = result.reward, result.done
            return fields

        return await self._in_session(request, "step", step)

    async def _close(self, request: Request) -> Answer:
        """True the first time, false for a handle that is unknown or closed."""
        session = self.store.remove(_handle(request.fields))
        if session is None:
            return Answer(False)
        await self._close_sessions([session])
        return Answer(True)

    def _query(self, question: Callable[[Any], Any]) -> _Handler:
        """A GET that asks a session's environment something."""

        async def handler(request: Request) -> Answer:
            return await self._in_session(request, "query", lambda session: question(session.environment))

        return handler

    async def _detail(self, request: Request) -> Answer:
        def detail(session: Session) -> Any:
            observation = session.environment.observation()
            return {"observation": observation, "done": session.done, "reward": session.reward, "deleted": False}

        return await self._in_session(request, "detail", detail)

    async def _in_session(self, request: Request, what: str, work: Callable[[Session], Any]) -> Answer:
        """Run ``work`` alone in the session that the request names, unless this request id has been answered."""
        session = self.store.find(_handle(request.fields))
        session.users += 1
        try:
            async with session.lock:
                answer = session.answers.get(request.request_id) if request.request_id else None
                if answer is None:
                    answer = await self._answer(session, what, work)
                    if request.request_id:
                        session.remember(request.request_id, answer)
                return answer
        finally:
            session.users -= 1

    async def _answer(self, session: Session, what: str, work: Callable[[Session], Any]) -> Answer:
        try:
            return Answer(await self._run(f"{what} of session {session.handle}", lambda: work(session)))
        except InvalidCall as error:
            return Answer({"error": str(error)})
        except EnvironmentFault as fault:
            return Answer({"detail": str(fault)}, 500)

    async def _run(self, what: str, work: Callable[[], _Result]) -> _Result:
        """Run environment code where its speed allows; raises `EnvironmentFault` for whatever goes wrong in it."""
        started = time.perf_counter()
        try:
            if self.spec.runs_inline:
                return work()
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except InvalidCall:
            raise
        except Exception as error:  # broad on purpose: an environment may be a user's code, and the server outlives it
            _log.exception("%s: %s failed", self.spec.name, what)
            self._metrics.faults += 1
            raise EnvironmentFault(f"{self.spec.name}: {what} failed: {type(error).__name__}: {error}") from error
        finally:
            self._metrics.rules_s += time.perf_counter() - started

    async def _close_sessions(self, sessions: list[Session]) -> None:
        """Close environments that are out of the store already, each once its running call is over."""
        for session in sessions:
            async with session.lock:
                with contextlib.suppress(EnvironmentFault, InvalidCall):  # the session is gone either way
                    await self._run(f"close of session {session.handle}", session.environment.close)
            self._metrics.closed += 1

    # --------------------------------------------------------------------------------------------------- the server

    async def _root(self, request: Request) -> Answer:
        return Answer(f"{self.spec.title} environment ({self.spec.name})")

    async def _health(self, request: Request) -> Answer:
        return Answer(
            {
                "environment": self.spec.name,
                "version": version("agentgym-rl"),
                "data": self._data_version,
                "items": self.spec.num_items,
                "sessions": len(self.store),
                "capacity": self.store.max_sessions,
                "uptime_s": round(self._metrics.uptime_s, 3),
            }
        )

    async def _show_metrics(self, request: Request) -> Answer:
        text = self._metrics.as_prometheus(self.spec.name, len(self.store), self.store.max_sessions)
        return Answer(text, content_type=b"text/plain; version=0.0.4; charset=utf-8")


@dataclass
class _Metrics:
    """What the server counts."""

    started: float = field(default_factory=time.monotonic)
    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Answered calls by path and status, those in batches included."""
    created: int = 0
    closed: int = 0
    expired: int = 0
    faults: int = 0
    rules_s: float = 0.0
    """Seconds in environment code."""

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self.started

    def as_prometheus(self, environment: str, sessions: int, capacity: int) -> str:
        """Prometheus' text format."""
        gauges = {"sessions": sessions, "capacity": capacity, "uptime_seconds": self.uptime_s}
        counts = {
            "sessions_created_total": self.created,
            "sessions_closed_total": self.closed,
            "sessions_expired_total": self.expired,
            "environment_faults_total": self.faults,
            "environment_seconds_total": self.rules_s,
            "cpu_seconds_total": time.process_time(),
        }
        lines = []
        for kind, values in (("gauge", gauges), ("counter", counts)):
            for name, value in values.items():
                lines.append(f"# TYPE agentgym_{name} {kind}")
                lines.append(f'agentgym_{name}{{environment="{environment}"}} {value}')
        lines.append("# TYPE agentgym_requests_total counter")
        for (path, status), count in sorted(self.requests.items()):
            labels = f'environment="{environment}",path="{path}",status="{status}"'
            lines.append(f"agentgym_requests_total{{{labels}}} {count}")
        return "\n".join(lines) + "\n"


def _step_fields(result: StepResult) -> dict[str, Any]:
    """The wire form of a step; raises TypeError or ValueError when the environment broke its own contract."""
    if not isinstance(result.observation, str) or not isinstance(result.done, bool):
        raise TypeError(f"a step must give a str observation and a bool done, not {result!r}")
    if isinstance(result.reward, bool) or not isinstance(result.reward, int | float):
        raise TypeError(f"a step must give an int or float reward, not {result.reward!r}")
    if not math.isfinite(result.reward):
        raise ValueError(f"a step gave the reward {result.reward!r}")
    return {"observation": result.observation, "reward": result.reward, "done": result.done}


async def _read_body(receive: Any) -> bytes:
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise MalformedRequest("the client went away before the body's end")
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise MalformedRequest(f"the body is longer than {MAX_BODY_BYTES} bytes")
        if not message.get("more_body"):
            return body


def _parse_body(body: bytes) -> Mapping[str, Any]:
    """The JSON object of a body; an empty one counts as ``{}``."""
    if not body.strip():
        return {}
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedRequest(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise MalformedRequest(f"the body is {type(fields).__name__}, must be a JSON object")
    return fields


def _handle(fields: Mapping[str, Any]) -> int:
    handle = _integer(fields, "id")
    if handle <= 0:
        raise MalformedRequest(f"id={handle}: must be above 0")
    return handle


def _integer(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """An integer, or (in queries) its decimal text."""
    value = fields.get(name, default)
    if isinstance(value, str) and value.isascii() and value.removeprefix("-").isdigit() and len(value) < 20:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise MalformedRequest(f"{name}={value!r}: must be an integer")
    return value
