"""How the worker processes of one server reach each other's sessions.

A connection lands on any worker (the kernel shares them out); a session stays in the worker that made it, whose number
is ``handle % num_workers``. A client that keeps its connection, as ours does, is served without a detour; a request
that lands elsewhere is passed on over a Unix socket. A create that a client repeats over a new connection may reach
another worker, and the first session then ends by its lifetime.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentgym_rl.envs.link import Link, LinkBroken, pack, read_frame
from agentgym_rl.envs.server import Answer, EnvApp, Request
from agentgym_rl.envs.wire import encode

_SUMMARY_S = 2.0
"""Seconds that a worker gets to tell its counts; one that is being replaced is left out."""


class WorkerPeers:
    """Worker ``worker`` of ``num_workers``, whose sockets lie in ``folder``."""

    def __init__(self, app: EnvApp, worker: int, num_workers: int, folder: Path) -> None:
        self._app = app
        self.worker = worker
        self._num_workers = num_workers
        self._folder = folder
        self._links: dict[int, Link] = {}
        self._connecting = asyncio.Lock()
        self._answering: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Be reachable for the other workers."""
        path = self._socket(self.worker)
        path.unlink(missing_ok=True)  # left by a worker that died
        self._server = await asyncio.start_unix_server(self._serve, path)

    async def stop(self) -> None:
        """Leave the other workers."""
        if self._server is not None:
            self._server.close()
        for link in self._links.values():
            link.close()
            await link.ended()

    # --------------------------------------------------------------------------------------------- the calling side

    def owner_of(self, handle: Any) -> int | None:
        """The worker that has the session; None when it is this one, or when ``handle`` is no handle."""
        if isinstance(handle, str) and handle.isascii() and handle.isdigit() and len(handle) < 20:
            handle = int(handle)
        if not isinstance(handle, int) or isinstance(handle, bool) or handle <= 0:
            return None
        owner = handle % self._num_workers
        return None if owner == self.worker else owner

    async def forward(self, worker: int, method: str, path: str, request: Request) -> Answer:
        """Another worker's answer to a call."""
        header = {"method": method, "path": path, "id": request.request_id}
        try:
            link = await self._link(worker)
            answer, body = await link.call(header, json.dumps(request.fields).encode())
        except (LinkBroken, OSError):
            detail = f"{path}: worker {worker} of this server died, and its sessions with it; create a new one"
            return Answer(encode({"detail": detail}), 500)
        return Answer(body, answer["status"], answer["type"].encode(), answer["retry"])

    async def create_elsewhere(self, request: Request) -> Answer | None:
        """A session of the first other worker that has room; None when none has."""
        for distance in range(1, self._num_workers):
            worker = (self.worker + distance) % self._num_workers
            answer = await self.forward(worker, "POST", "/create", request)
            if answer.status == 200:
                return answer
        return None

    async def summaries(self) -> dict[int, dict[str, Any]]:
        """`EnvApp.summary` of the other workers that answer."""
        others = [worker for worker in range(self._num_workers) if worker != self.worker]
        found = await asyncio.gather(*(self._summary(worker) for worker in others))
        return {worker: summary for worker, summary in zip(others, found, strict=True) if summary is not None}

    async def _summary(self, worker: int) -> dict[str, Any] | None:
        with suppress(LinkBroken, OSError, TimeoutError):
            async with asyncio.timeout(_SUMMARY_S):
                link = await self._link(worker)
                summary, _ = await link.call({"summary": True})
                return summary
        return None

    async def _link(self, worker: int) -> Link:
        async with self._connecting:
            link = self._links.get(worker)
            if link is None or link.broken:
                reader, writer = await asyncio.open_unix_connection(self._socket(worker))
                link = self._links[worker] = Link(reader, writer)
            return link

    def _socket(self, worker: int) -> Path:
        return self._folder / f"worker-{worker}"

    # ------------------------------------------------------------------------------------------- the answering side

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Cancelled when the server ends; Python 3.11 would log that as an error of the connection.
        with suppress(LinkBroken, asyncio.CancelledError):
            while True:
                header, payload = await read_frame(reader)
                # A call that blocks must not hold up the others of that worker.
                task = asyncio.create_task(self._answer(header, payload, writer))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
        writer.close()

    async def _answer(self, header: dict[str, Any], payload: bytes, writer: asyncio.StreamWriter) -> None:
        if header.get("summary"):
            writer.write(pack({"n": header["n"], **self._app.summary()}))
            return
        request = Request(json.loads(payload), header["id"])
        answer = await self._app.call_here(header["method"], header["path"], request)
        told = {"status": answer.status, "type": answer.content_type.decode(), "retry": answer.retry_after_s}
        writer.write(pack({"n": header["n"], **told}, answer.body))
