"""Turns any `Environment` into an ASGI application that speaks the AgentGym protocol.

The application is written on ASGI itself: for an environment whose step takes 20 microseconds a web framework would be
most of the cost. How answers look is the environment's `Wire`. The same for all: a malformed request is 422, one
without the server's token 401, one too large 413, a full server 503, a fault of the environment 500, each with
``{"detail": text}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import version
from typing import Any, Protocol
from urllib.parse import parse_qsl

from msgspec import Struct

from agentgym_rl.client.addresses import TOKEN_VARIABLE, checked_token, environment_token
from agentgym_rl.envs.base import InvalidCall
from agentgym_rl.envs.metrics import Metrics, as_prometheus
from agentgym_rl.envs.openapi import openapi_document
from agentgym_rl.envs.registry import EnvSpec
from agentgym_rl.envs.runners import EnvironmentFault, InlineRunner, runner_for
from agentgym_rl.envs.sessions import AtCapacity, NoSession, Session, SessionStore
from agentgym_rl.envs.wire import MalformedRequest, decode_object, encode, read_integer, read_text

MAX_BODY_BYTES = 4 * 2**20
MAX_BATCH_CALLS = 1024
BATCHED_PATHS = ("/create", "/reset", "/step", "/close")
_REMEMBERED_CREATES = 4096
"""Creates whose answer is kept by request id."""
_JSON = b"application/json"

_requests_log = logging.getLogger("agentgym_rl.requests")


class _TooLarge(Exception):
    """The body is beyond `MAX_BODY_BYTES`."""


class Request(Struct, frozen=True):
    """One call, whether it came alone or in a batch; no dataclass, which takes several times as long to make."""

    fields: Mapping[str, Any]
    """Body of a POST, query of a GET (as text)."""
    request_id: str | None = None


class Answer(Struct, frozen=True):
    """One call's answer."""

    body: bytes
    status: int = 200
    content_type: bytes = _JSON
    retry_after_s: int | None = None
    """Seconds after which a turned away call may be made again."""


def _json(content: Any, status: int = 200) -> Answer:
    return Answer(encode(content), status)


_Handler = Callable[[Request], Awaitable[Answer]]


class Peers(Protocol):
    """The other worker processes of a server, as `EnvApp` uses them."""

    async def start(self) -> None:
        """Be reachable for the other workers."""
        ...

    async def stop(self) -> None:
        """Leave the other workers."""
        ...

    def owner_of(self, handle: Any) -> int | None:
        """The worker that has the session; None when it is this one, or when ``handle`` is no handle."""
        ...

    async def forward(self, worker: int, method: str, path: str, request: Request) -> Answer:
        """Another worker's answer to a call."""
        ...

    async def create_elsewhere(self, request: Request) -> Answer | None:
        """A session of the first other worker that has room; None when none has."""
        ...

    async def summaries(self) -> dict[int, dict[str, Any]]:
        """`EnvApp.summary` of the other workers that answer."""
        ...

    @property
    def worker(self) -> int:
        """This worker's number."""
        ...


def build_app(
    spec: EnvSpec,
    *,
    max_sessions: int = 1024,
    session_ttl_s: float = 3600.0,
    clock: Callable[[], float] = time.monotonic,
    token: str | None = None,
) -> EnvApp:
    """The ASGI application that serves ``spec``.

    ``session_ttl_s``: a session that no request touched for so long is closed. ``token``: what requests must carry as
    ``Authorization: Bearer <token>``; default: the variable `TOKEN_VARIABLE`. Raises `ConfigError` when what the
    environment needs is not installed, and for a token that no client could send.
    """
    store = SessionStore(max_sessions=max_sessions, ttl_s=session_ttl_s, clock=clock)
    return EnvApp(spec, store, token=token)


class EnvApp:
    """Routes requests to sessions. One per process; used from one event loop."""

    def __init__(self, spec: EnvSpec, store: SessionStore, *, token: str | None = None) -> None:
        self.spec = spec
        self.store = store
        self.metrics = Metrics()
        self.peers: Peers | None = None
        """Set where the server has several worker processes."""
        self._data_version = spec.data_version()
        self._runner = runner_for(spec, max_sessions=store.max_sessions)
        self._inline = self._runner if type(self._runner) is InlineRunner else None
        self._wire = spec.wire
        chosen = environment_token() if token is None else checked_token(token, "token")
        self._authorization = f"Bearer {chosen}".encode() if chosen else None
        self._created: OrderedDict[str, asyncio.Task[Answer]] = OrderedDict()
        self._askers: Counter[object] = Counter()
        """Calls of ``/create`` that wait, by their request id."""
        self._routes = self._make_routes()
        self._at_once = self._make_routes_at_once()
        self._paths = {path for _, path in self._routes}

    def _make_routes(self) -> dict[tuple[str, str], _Handler]:
        routes: dict[tuple[str, str], _Handler] = {
            ("POST", "/create"): self._create_once,
            ("POST", "/close"): self._close,
            ("POST", "/batch"): self._batch,
            ("GET", "/"): self._root,
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._show_metrics,
            ("GET", "/openapi.json"): self._openapi,
        }
        asked = ("observation", "available_actions", "detail", "render", *self.spec.queries)
        routes |= {("GET", f"/{name}"): self._in_session(name) for name in asked}
        routes["POST", "/reset"] = self._in_session("reset", self._check_reset)
        routes |= {("POST", f"/{name}"): self._in_session(name) for name in ("render", *self.spec.commands)}
        routes |= {
            ("POST", f"/{name}"): self._in_session(name, _check_step) for name in ("step", *self.spec.step_views)
        }
        return routes

    def _make_routes_at_once(self) -> dict[str, Callable[[Request], Answer]]:
        """Of the POST calls that a batch consists of, those in which nothing waits where environments run inline."""
        if self._inline is None:
            return {}
        return {
            "/reset": self._in_session_at_once("reset", self._check_reset),
            "/step": self._in_session_at_once("step", _check_step),
        }

    # ---------------------------------------------------------------------------------------------------------- ASGI

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)

    async def _http(self, scope: Any, receive: Any, send: Any) -> None:
        started = time.perf_counter()
        headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id")
        answer = await self._answer_http(scope, headers, request_id, receive)
        head = [(b"content-type", answer.content_type), (b"content-length", b"%d" % len(answer.body))]
        if answer.retry_after_s is not None:
            head.append((b"retry-after", b"%d" % answer.retry_after_s))
        if request_id is not None:
            # The echo tells a client that it may repeat this request under the same id.
            head.append((b"x-request-id", request_id))
        await send({"type": "http.response.start", "status": answer.status, "headers": head})
        await send({"type": "http.response.body", "body": answer.body})
        if _requests_log.isEnabledFor(logging.INFO):
            took_ms = 1000 * (time.perf_counter() - started)
            _requests_log.info("%s %s %d %.1f ms", scope["method"], scope["path"], answer.status, took_ms)

    async def _answer_http(
        self, scope: Any, headers: Mapping[bytes, bytes], request_id: bytes | None, receive: Any
    ) -> Answer:
        if self._authorization is not None and not _is_authorized(headers, self._authorization):
            return _json({"detail": f"needs Authorization: Bearer <the server's {TOKEN_VARIABLE}>"}, 401)
        method = scope["method"]
        try:
            body = await _read_body(receive)
            fields = _parse_query(scope["query_string"]) if method == "GET" else decode_object(body)
        except MalformedRequest as error:
            return _json({"detail": str(error)}, 422)
        except _TooLarge as error:
            return _json({"detail": str(error)}, 413)
        id_text = None if request_id is None else request_id.decode("latin-1")
        request = Request(fields, id_text)
        if (method, scope["path"]) == ("POST", "/create") and self._inline is None:
            return await self._create_for(request, receive)
        return await self.call(method, scope["path"], request)

    async def _lifespan(self, receive: Any, send: Any) -> None:
        await receive()
        await self.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def start(self) -> None:
        """Begin to start children ahead and to close expired sessions."""
        if self.peers is not None:
            await self.peers.start()
        await self._runner.start()
        self._reaper = asyncio.create_task(self._reap_forever())

    async def stop(self) -> None:
        """Close every session and child."""
        self._reaper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reaper
        # A session whose call is still running is left alone: it may never end, and the process must.
        await self._close_sessions([session for session in self.store.remove_all() if session.users == 0])
        await self._runner.stop()
        if self.peers is not None:
            await self.peers.stop()

    async def _reap_forever(self) -> None:
        while True:
            await asyncio.sleep(min(30.0, self.store.ttl_s / 4))
            await self.reap()

    async def reap(self) -> None:
        """Close the sessions whose lifetime is over."""
        expired = self.store.remove_expired()
        self.metrics.expired += len(expired)
        await self._close_sessions(expired)

    # ------------------------------------------------------------------------------------------------------- routing

    async def call(self, method: str, path: str, request: Request) -> Answer:
        """The answer to one call, errors included, of whichever worker process has the session."""
        if self.peers is not None:
            owner = self.peers.owner_of(request.fields.get(self._wire.handle_field))
            if owner is not None and (method, path) in self._routes and path not in ("/batch", "/create"):
                return await self.peers.forward(owner, method, path, request)
        answer = await self.call_here(method, path, request)
        if answer.status == 503 and self.peers is not None and path == "/create":
            return await self.peers.create_elsewhere(request) or answer
        return answer

    async def call_here(self, method: str, path: str, request: Request) -> Answer:
        """The answer of this process."""
        handler = self._routes.get((method, path))
        if handler is None:
            known = path in self._paths
            detail = f"{method} {path}: {'wrong method' if known else 'no such path'}"
            return _json({"detail": detail}, 405 if known else 404)
        try:
            answer = await handler(request)
        except (InvalidCall, MalformedRequest, AtCapacity, EnvironmentFault) as error:
            answer = self._failure(path, error)
        self.metrics.requests[path, answer.status] += 1
        return answer

    def _call_at_once(self, path: str, request: Request) -> Answer:
        """`call_here` of a path of ``_at_once``, without an event loop in between."""
        try:
            answer = self._at_once[path](request)
        except (InvalidCall, MalformedRequest) as error:
            answer = self._failure(path, error)
        self.metrics.requests[path, answer.status] += 1
        return answer

    def _failure(self, path: str, error: Exception) -> Answer:
        if isinstance(error, InvalidCall):
            status, content = self._wire.refusal(str(error), known_session=not isinstance(error, NoSession))
            return _json(content, status)
        if isinstance(error, AtCapacity):
            return Answer(encode({"detail": str(error)}), 503, retry_after_s=1)
        if isinstance(error, MalformedRequest):
            return _json({"detail": f"{path}: {error}"}, 422)
        self.metrics.faults += 1
        return _json({"detail": f"{path}: {error}"}, 500)

    # --------------------------------------------------------------------------------------------------------- batch

    async def _batch(self, request: Request) -> Answer:
        """``{"calls": [{"path", "body", "request_id"}, ...]}`` answered in order by ``[{"status", "body"}, ...]``.

        Calls for one handle run in their order; where calls may block, different handles run in parallel.
        """
        calls = request.fields.get("calls")
        if not isinstance(calls, list) or len(calls) > MAX_BATCH_CALLS:
            seen = f"a list of {len(calls)}" if isinstance(calls, list) else repr(calls)
            raise MalformedRequest(
                f"calls={seen}: must be a list of at most {MAX_BATCH_CALLS} objects with path and body"
            )
        if self.spec.runs_inline and self.peers is None:
            return _joined([self._batched_at_once(call) or await self._batched(call, self.call_here) for call in calls])
        answers: dict[int, bytes] = {}

        async def run(positions: list[int]) -> None:
            for position in positions:
                answers[position] = await self._batched(calls[position], self.call)

        await asyncio.gather(*(run(positions) for positions in self._by_handle(calls)))
        return _joined([answers[position] for position in range(len(calls))])

    def _by_handle(self, calls: list[Any]) -> list[list[int]]:
        """Positions of the calls that must run one after the other."""
        groups: dict[Any, list[int]] = {}
        for position, call in enumerate(calls):
            body = call.get("body") if isinstance(call, dict) else None
            handle = body.get(self._wire.handle_field) if isinstance(body, dict) else None
            key = handle if isinstance(handle, int) else ("alone", position)
            groups.setdefault(key, []).append(position)
        return list(groups.values())

    def _batched_at_once(self, call: Any) -> bytes | None:
        """The answer to one call of a batch in which nothing waits; None for any other, and for one of a wrong form."""
        if not isinstance(call, dict):
            return None
        path, body, request_id = call.get("path"), call.get("body"), call.get("request_id")
        if not isinstance(path, str) or path not in self._at_once or not isinstance(body, dict):
            return None
        if request_id is not None and not isinstance(request_id, str):
            return None
        return _batch_item(self._call_at_once(path, Request(body, request_id)))

    async def _batched(self, call: Any, answer: Callable[[str, str, Request], Awaitable[Answer]]) -> bytes:
        path = call.get("path") if isinstance(call, dict) else None
        if path not in BATCHED_PATHS:
            return _batch_item(_json({"detail": f"path={path!r}: must be one of {', '.join(BATCHED_PATHS)}"}, 422))
        body, request_id = call.get("body", {}), call.get("request_id")
        if not isinstance(body, dict) or not isinstance(request_id, str | None):
            detail = "body must be an object and request_id, if given, a string"
            return _batch_item(_json({"detail": detail}, 422))
        return _batch_item(await answer("POST", path, Request(body, request_id)))

    # ------------------------------------------------------------------------------------------------------ sessions

    async def _create_for(self, request: Request, receive: Any) -> Answer:
        """The answer to ``/create``, which may take long: a child starts a browser or a virtual machine.

        A session that was made for a client who has left meanwhile is closed, for nobody knows its handle; unless the
        client asks again and waits for the same session.
        """
        key = request.request_id or object()
        self._askers[key] += 1
        leaving = asyncio.ensure_future(receive())
        try:
            answer = await self.call("POST", "/create", request)
            if self._askers[key] == 1 and _has_left(leaving):
                await self._close_unclaimed(request, answer)
            return answer
        finally:
            leaving.cancel()
            self._askers[key] -= 1
            if not self._askers[key]:
                del self._askers[key]

    async def _close_unclaimed(self, request: Request, answer: Answer) -> None:
        """Close the session that was made, on whichever worker; the same request id makes another one from now on."""
        handle = _handle_in(answer, self._wire.handle_field)
        if handle is not None:
            self._created.pop(request.request_id or "", None)
            await self.call("POST", "/close", Request({self._wire.handle_field: handle}, None))
            _requests_log.warning("session %d closed: its client left before it was made", handle)

    async def _create_once(self, request: Request) -> Answer:
        """Create; a repeated request id gets the session that the first request made."""
        if request.request_id is None:
            return await self._create(request)
        making = self._created.get(request.request_id)
        if making is None:
            making = self._created[request.request_id] = asyncio.create_task(self._create(request))
            if len(self._created) > _REMEMBERED_CREATES:
                self._created.popitem(last=False)
        try:
            return await asyncio.shield(making)
        except AtCapacity:
            self._created.pop(request.request_id, None)
            raise

    async def _create(self, request: Request) -> Answer:
        try:
            handle = self.store.reserve()
        except AtCapacity:
            await self.reap()
            handle = self.store.reserve()
        try:
            episode, content = await self._timed(self._runner.create(handle, request.fields))
        except BaseException:
            self.store.cancel(handle)
            raise
        self.store.add(handle, episode)
        self.metrics.created += 1
        return Answer(content)

    async def _close(self, request: Request) -> Answer:
        """Whether there was such a session, in the environment's form."""
        session = self.store.remove(self._handle(request.fields))
        if session is not None:
            await self._close_sessions([session])
        return _json(self._wire.closed(session is not None))

    def _in_session(self, name: str, check: Callable[[Mapping[str, Any]], Any] = lambda fields: None) -> _Handler:
        """Runs a call alone in the session that the request names, unless its request id has been answered.

        ``check`` raises `MalformedRequest`; a wrong form is told before anything about the session is.
        """

        if self._inline is not None:
            return _waiting(self._in_session_at_once(name, check))

        async def handler(request: Request) -> Answer:
            handle = self._handle(request.fields)
            check(request.fields)
            session = self.store.find(handle)
            session.users += 1
            try:
                async with session.lock:
                    answer = session.answers.get(request.request_id) if request.request_id else None
                    if answer is None:
                        answer = await self._answer(session, name, request.fields)
                        if request.request_id:
                            session.remember(request.request_id, answer)
                    return answer
            finally:
                session.users -= 1

        return handler

    def _in_session_at_once(self, name: str, check: Callable[[Mapping[str, Any]], Any]) -> Callable[[Request], Answer]:
        """`_in_session` where environments run inline: nothing waits."""

        def handler(request: Request) -> Answer:
            handle = self._handle(request.fields)
            check(request.fields)
            return self._answer_inline(self.store.find(handle), name, request)

        return handler

    async def _answer(self, session: Session, name: str, fields: Mapping[str, Any]) -> Answer:
        """What is kept for a repeated request: good answers, refusals and faults."""
        try:
            return Answer(await self._timed(self._runner.call(session.episode, name, fields)))
        except (InvalidCall, MalformedRequest, EnvironmentFault) as error:
            return self._failure(f"/{name}", error)

    def _answer_inline(self, session: Session, name: str, request: Request) -> Answer:
        """Nothing waits here, so that no other request can come between and no lock is needed."""
        assert self._inline is not None
        request_id = request.request_id
        if request_id and (repeated := session.answers.get(request_id)) is not None:
            return repeated
        try:
            answer = Answer(self._inline.call_now(session.episode, name, request.fields))
        except (InvalidCall, MalformedRequest, EnvironmentFault) as error:
            answer = self._failure(f"/{name}", error)
        self.metrics.environment_s += self._inline.took_s
        if request_id:
            session.remember(request_id, answer)
        return answer

    async def _timed(self, work: Awaitable[Any]) -> Any:
        started = time.perf_counter()
        try:
            return await work
        finally:
            self.metrics.environment_s += time.perf_counter() - started

    def _check_reset(self, fields: Mapping[str, Any]) -> None:
        read_integer(fields, self._wire.index_field, default=0)

    def _handle(self, fields: Mapping[str, Any]) -> int:
        handle = read_integer(fields, self._wire.handle_field)
        if handle <= 0:
            raise MalformedRequest(f"{self._wire.handle_field}={handle}: must be above 0")
        return handle

    async def _close_sessions(self, sessions: list[Session]) -> None:
        """Close environments that are out of the store already, each once its running call is over."""
        await asyncio.gather(*(self._close_session(session) for session in sessions))

    async def _close_session(self, session: Session) -> None:
        async with session.lock:
            with contextlib.suppress(EnvironmentFault, InvalidCall):  # the session is gone either way
                await self._timed(self._runner.close(session.episode))
        self.metrics.closed += 1

    # --------------------------------------------------------------------------------------------------- the server

    async def _root(self, request: Request) -> Answer:
        return _json(f"{self.spec.title} environment ({self.spec.name})")

    def summary(self) -> dict[str, Any]:
        """What workers tell each other for `/health` and `/metrics`."""
        sessions, capacity = len(self.store), self.store.max_sessions
        samples = self.metrics.samples(sessions, capacity)
        return {"sessions": sessions, "capacity": capacity, "samples": samples}

    async def _summaries(self) -> dict[int, dict[str, Any]]:
        if self.peers is None:
            return {0: self.summary()}
        return dict(sorted({self.peers.worker: self.summary(), **await self.peers.summaries()}.items()))

    async def _health(self, request: Request) -> Answer:
        workers = await self._summaries()
        return _json(
            {
                "environment": self.spec.name,
                "version": version("agentgym-rl"),
                "data": self._data_version,
                "items": self.spec.num_items,
                "sessions": sum(summary["sessions"] for summary in workers.values()),
                "capacity": sum(summary["capacity"] for summary in workers.values()),
                "workers": len(workers),
                "uptime_s": round(self.metrics.uptime_s, 3),
            }
        )

    async def _show_metrics(self, request: Request) -> Answer:
        samples = {str(worker): summary["samples"] for worker, summary in (await self._summaries()).items()}
        text = as_prometheus(self.spec.name, samples)
        return Answer(text.encode(), content_type=b"text/plain; version=0.0.4; charset=utf-8")

    async def _openapi(self, request: Request) -> Answer:
        return _json(openapi_document(self.spec))


def _waiting(handler: Callable[[Request], Answer]) -> _Handler:
    """The same to be awaited."""

    async def waiting(request: Request) -> Answer:
        return handler(request)

    return waiting


def _joined(items: list[bytes]) -> Answer:
    return Answer(b"[" + b",".join(items) + b"]")


def _batch_item(answer: Answer) -> bytes:
    return b'{"status":%d,"body":%b}' % (answer.status, answer.body)


def _check_step(fields: Mapping[str, Any]) -> None:
    read_text(fields, "action")


def _is_authorized(headers: Mapping[bytes, bytes], expected: bytes) -> bool:
    return hmac.compare_digest(headers.get(b"authorization", b""), expected)


def _parse_query(query: bytes) -> Mapping[str, Any]:
    return dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True)) if query else {}


def _has_left(leaving: asyncio.Future[Any]) -> bool:
    """Whether what the connection says after a request's body is that the client is gone."""
    if not leaving.done() or leaving.cancelled() or leaving.exception() is not None:
        return False
    return bool(leaving.result()["type"] == "http.disconnect")


def _handle_in(created: Answer, field: str) -> int | None:
    """The session that an answer to ``/create`` names, in the forms that clients read; None for a refusal."""
    content = json.loads(created.body) if created.status == 200 else None
    handle = content.get(field) if isinstance(content, dict) else content
    return handle if isinstance(handle, int) and not isinstance(handle, bool) else None


async def _read_body(receive: Any) -> bytes:
    message = await receive()
    body: bytes = message.get("body", b"")
    while message["type"] != "http.disconnect" and message.get("more_body") and len(body) <= MAX_BODY_BYTES:
        message = await receive()
        body += message.get("body", b"")
    if message["type"] == "http.disconnect":
        raise MalformedRequest("the client went away before the body's end")
    if len(body) > MAX_BODY_BYTES:
        raise _TooLarge(f"the body is longer than {MAX_BODY_BYTES} bytes")
    return body
