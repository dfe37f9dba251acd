"""Messages between processes of one server over a private socket: many calls at once on one connection.

A frame is 4 bytes of length, a header (one line of JSON) and a payload of bytes. A call and its answer share the
header field ``n``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import struct
from typing import Any

_LENGTH = struct.Struct(">I")
_MAX_FRAME_BYTES = 256 * 2**20


class LinkBroken(Exception):
    """The other process is gone, or sent what is no frame."""


def pack(header: dict[str, Any], payload: bytes = b"") -> bytes:
    """One frame."""
    body = json.dumps(header, separators=(",", ":")).encode() + b"\n" + payload
    return _LENGTH.pack(len(body)) + body


def frame_length(prefix: bytes) -> int:
    """Bytes that follow the 4 of ``prefix``; raises `LinkBroken`."""
    (length,) = _LENGTH.unpack(prefix)
    if length > _MAX_FRAME_BYTES:
        raise LinkBroken(f"a frame of {length} bytes")
    return int(length)


def unpack(body: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and payload of a frame without its length."""
    header, _, payload = body.partition(b"\n")
    return json.loads(header), payload


async def read_frame(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    """The next frame; raises `LinkBroken` at the connection's end."""
    try:
        length = frame_length(await reader.readexactly(_LENGTH.size))
        return unpack(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, OSError) as error:
        raise LinkBroken("the connection ended") from error


class Link:
    """The calling side of a connection; used from one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[tuple[dict[str, Any], bytes]]] = {}
        self._reading = asyncio.create_task(self._read())
        self.broken = False

    async def call(self, header: dict[str, Any], payload: bytes = b"") -> tuple[dict[str, Any], bytes]:
        """Header and payload of the answer; raises `LinkBroken`."""
        if self.broken:
            raise LinkBroken("the connection ended")
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(pack({**header, "n": number}, payload))
            return await future
        finally:
            del self._waiting[number]

    def close(self) -> None:
        """End the connection; calls that wait raise `LinkBroken`."""
        self._break(LinkBroken("the connection was closed"))

    async def ended(self) -> None:
        """Return once the connection has ended, from either side."""
        await self._reading

    async def _read(self) -> None:
        try:
            while True:
                header, payload = await read_frame(self._reader)
                future = self._waiting.get(header["n"])
                if future is not None and not future.done():
                    future.set_result((header, payload))
        except LinkBroken as error:
            self._break(error)

    def _break(self, error: LinkBroken) -> None:
        self.broken = True
        self._writer.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
