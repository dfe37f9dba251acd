"""Several servers of one environment, as one worker process sees them.

A new session goes to the server with the fewest of this process's live sessions for its capacity, after one question
whether it is there and has a place. One that does not answer, gives no session, or fails one reset after the other is
left out for a while: with no sessions it would be first in turn for every new one.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from agentgym_rl.client.addresses import parse_addresses
from agentgym_rl.client.base import EnvClient
from agentgym_rl.client.connection import CONNECT_TIMEOUT_S, Connection
from agentgym_rl.errors import EnvError, EnvProtocolError

_PROBE_TIMEOUT_S = 5.0
_PROBE_CONNECT_S = 2.0
_REST_S = 2.0
"""How long a server that did not answer is left alone."""
_FAILED_RESETS = 3
"""So many in a row, and a server is left alone as well: twice as long after each further one."""
_LONGEST_REST_S = 60.0


def client_factory(
    client_class: type[EnvClient],
    env_addr: str | Sequence[str],
    *,
    timeout_s: float = 60.0,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    max_retries: int = 10,
    first: int = 0,
) -> Callable[[], EnvClient]:
    """What makes clients of the server, or spread over the servers, at ``env_addr``; may be called by many threads.

    ``first``: number of the server that gets the first session, so that worker processes which share the servers begin
    at different ones. Raises `ConfigError` for what `parse_addresses` refuses.
    """
    addresses = parse_addresses(env_addr)

    def connect(address: str) -> EnvClient:
        return client_class(address, timeout=timeout_s, connect_timeout=connect_timeout_s, max_retries=max_retries)

    if len(addresses) == 1:
        return lambda: connect(addresses[0])
    servers = Servers(addresses, first=first)
    return lambda: servers.open(connect)


@dataclass(frozen=True, slots=True)
class Health:
    """What a server said of itself."""

    is_up: bool
    capacity: int | None = None
    """Sessions it can hold; None where it does not say."""
    is_full: bool = False


@dataclass(eq=False)
class _Server:
    address: str
    health: Health = Health(is_up=True)
    opening: int = 0
    """Sessions that are being created."""
    rests_until: float = 0.0
    """Clock time before which a server that did not answer, or fails its resets, is left out."""
    failed_resets: int = 0
    """Since the last one that succeeded; while it is left alone, only that of the session that tries it counts."""
    is_tried: bool = False
    """True while a session finds out whether a server that was left alone is sound again."""
    clients: weakref.WeakSet[EnvClient] = field(default_factory=weakref.WeakSet)

    @property
    def is_sound(self) -> bool:
        """True unless it is down or fails its resets."""
        return self.health.is_up and self.failed_resets < _FAILED_RESETS

    def rest_s(self) -> float:
        """How long it is left alone once it is not sound."""
        return min(_REST_S * 2.0 ** min(max(0, self.failed_resets - _FAILED_RESETS), 16), _LONGEST_REST_S)

    def live_sessions(self) -> int:
        """This process's sessions: a client that is closed or gone has none."""
        return self.opening + sum(not client.is_closed for client in self.clients)


class Servers:
    """Chooses a server for every new session. For any number of threads."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        first: int = 0,
        probe: Callable[[str], Health] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``first``: index, modulo their number, of the server that comes first among equals."""
        turn = first % len(addresses)
        self._servers = [_Server(address) for address in (*addresses[turn:], *addresses[:turn])]
        self._probe, self._clock = probe or ask_health, clock
        self._lock, self._survey_lock = Lock(), Lock()
        self._is_surveyed = False

    def open(self, connect: Callable[[str], EnvClient]) -> EnvClient:
        """``connect(address)`` of a server that is up and has a place.

        When none has, ``connect`` is left to wait for one that is up; when none is up, it says in its own words what is
        wrong with the first one. An error of ``connect`` travels up, and the next sessions go to others. So they do
        after several resets in a row that failed: a server may give sessions and lack the data that they need.
        """
        self._survey_once()
        server, opened = self._choose(), weakref.WeakSet[EnvClient]()
        try:
            client = connect(server.address)
            client.on_reset = functools.partial(self._note_reset, server)
            opened.add(client)
        except EnvError:
            with self._lock:
                self._note(server, Health(is_up=False))
            raise
        finally:
            with self._lock:
                server.opening -= 1
                server.clients |= opened
        return client

    def live_sessions(self) -> dict[str, int]:
        """This process's live sessions by address."""
        with self._lock:
            return {server.address: server.live_sessions() for server in self._servers}

    def _survey_once(self) -> None:
        """Ask all servers side by side before the first session, for their capacities."""
        with self._survey_lock:
            if self._is_surveyed:
                return
            with ThreadPoolExecutor(len(self._servers)) as threads:
                answers = list(threads.map(self._probe, [server.address for server in self._servers]))
            with self._lock:
                for server, health in zip(self._servers, answers, strict=True):
                    self._note(server, health)
            self._is_surveyed = True

    def _choose(self) -> _Server:
        """The best server, one session reserved on it."""
        passed_over: list[_Server] = []
        while (server := self._reserve(passed_over)) is not None:
            health = self._probe(server.address)
            with self._lock:
                self._note(server, health)
                if health.is_up and not health.is_full:
                    return server
                server.opening -= 1
            passed_over.append(server)
        return self._reserve_anyway()

    def _reserve(self, passed_over: Sequence[_Server]) -> _Server | None:
        """The least loaded of the servers that may be asked now; one that rested goes to the first who comes."""
        with self._lock:
            now = self._clock()
            allowed = [s for s in self._servers if s not in passed_over and (s.is_sound or s.rests_until <= now)]
            if not allowed:
                return None
            server = min(allowed, key=self._load)
            server.opening += 1
            server.rests_until, server.is_tried = now + server.rest_s(), not server.is_sound
            return server

    def _reserve_anyway(self) -> _Server:
        """A server to wait for: the least loaded that is sound, else that is up, else the first."""
        with self._lock:
            up = [server for server in self._servers if server.health.is_up]
            choice = [server for server in up if server.is_sound] or up
            server = min(choice, key=self._load) if choice else self._servers[0]
            server.opening += 1
            return server

    def _load(self, server: _Server) -> float:
        """Share of the capacity in use with one more session; plain numbers unless every server told its capacity."""
        capacities = [s.health.capacity for s in self._servers if s.health.is_up]
        weight = server.health.capacity if None not in capacities else None
        return (server.live_sessions() + 1) / (weight or 1)

    def _note_reset(self, server: _Server, succeeded: bool) -> None:
        with self._lock:
            if succeeded:
                server.failed_resets, server.is_tried = 0, False
            elif server.is_sound or server.is_tried:
                server.failed_resets, server.is_tried = server.failed_resets + 1, False
                server.rests_until = self._clock() + server.rest_s()

    def _note(self, server: _Server, health: Health) -> None:
        """Keep what a server said; of one that does not answer, the capacity it had is kept."""
        if health.is_up:
            server.health = health
        else:
            server.health = Health(is_up=False, capacity=server.health.capacity)
            server.rests_until = self._clock() + server.rest_s()


def ask_health(address: str) -> Health:
    """Whether a server answers, and what it says of its capacity; a server of another make says nothing of it."""
    connection = Connection(address, timeout_s=_PROBE_TIMEOUT_S, max_retries=0, connect_timeout_s=_PROBE_CONNECT_S)
    try:
        reply = connection.get("health")
    except EnvProtocolError:  # an answer, if not of JSON
        return Health(is_up=True)
    except EnvError:
        return Health(is_up=False)
    finally:
        connection.close()
    return _read_health(reply.content) if reply.status == 200 else Health(is_up=reply.status < 500)


def _read_health(content: Any) -> Health:
    fields = content if isinstance(content, dict) else {}
    sessions, capacity = fields.get("sessions"), fields.get("capacity")
    if not isinstance(sessions, int) or not isinstance(capacity, int):
        return Health(is_up=True)
    return Health(is_up=True, capacity=capacity, is_full=sessions >= capacity)
