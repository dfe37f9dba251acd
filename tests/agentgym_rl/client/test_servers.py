"""Several servers: sessions are spread by live sessions and capacity, and one that is away is left out for a while."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest
import requests
from support.environments import Script, ScriptedClient, scripted_spec
from support.faults import http_answer, raw_server
from support.servers import serve

from agentgym_rl.client.base import EnvClient
from agentgym_rl.client.servers import Health, Servers, ask_health, client_factory
from agentgym_rl.envs.server import build_app
from agentgym_rl.errors import ConfigError, EnvServerError, EnvUnreachable

pytestmark = pytest.mark.server

A, B, C = "http://a", "http://b", "http://c"


class Session:
    """What `Servers` needs of a client."""

    def __init__(self, address: str) -> None:
        self.address, self.is_closed = address, False
        self.on_reset: Callable[[bool], None] = lambda succeeded: None


class World:
    """Servers of which a test says how they are; remembers who was asked."""

    def __init__(self, *addresses: str, first: int = 0, **health: Health) -> None:
        self.health = {address: health.get(address[-1], Health(is_up=True)) for address in addresses}
        self.asked: list[str] = []
        self.sessions: list[Session] = []
        self.now = 0.0
        self.servers = Servers(addresses, first=first, probe=self.probe, clock=lambda: self.now)

    def probe(self, address: str) -> Health:
        self.asked.append(address)
        return self.health[address]

    def open(self, times: int = 1) -> list[Session]:
        opened = [self.servers.open(Session) for _ in range(times)]
        self.sessions += opened
        return opened

    def fails(self, address: str) -> None:
        self.health[address] = Health(is_up=False)

    def works(self, address: str) -> None:
        self.health[address] = Health(is_up=True)


def addresses_of(sessions: list[Session]) -> Counter[str]:
    return Counter(session.address for session in sessions)


# ------------------------------------------------------------------------------------------------------------ balancing


def test_sessions_are_spread_evenly_and_a_closed_one_makes_room() -> None:
    world = World(A, B, C)
    sessions = world.open(9)
    assert addresses_of(sessions) == {A: 3, B: 3, C: 3}
    for session in sessions:
        session.is_closed = session.address == B
    assert addresses_of(world.open(3)) == {B: 3}
    assert world.servers.live_sessions() == {A: 3, B: 3, C: 3}


def test_a_session_that_is_gone_without_a_close_does_not_count() -> None:
    world = World(A, B)
    world.open(4)
    world.sessions = [session for session in world.sessions if session.address == A]
    assert world.servers.live_sessions() == {A: 2, B: 0}


def test_sessions_are_spread_by_capacity_where_every_server_tells_it() -> None:
    world = World(A, B, a=Health(is_up=True, capacity=10), b=Health(is_up=True, capacity=30))
    assert addresses_of(world.open(40)) == {A: 10, B: 30}
    world = World(A, B, b=Health(is_up=True, capacity=30))
    assert addresses_of(world.open(40)) == {A: 20, B: 20}


def test_each_worker_process_begins_at_another_server() -> None:
    firsts = [World(A, B, C, first=rank).open(3) for rank in range(4)]
    assert [sessions[0].address for sessions in firsts] == [A, B, C, A]
    assert all(addresses_of(sessions) == {A: 1, B: 1, C: 1} for sessions in firsts)


def test_a_full_server_is_passed_over_while_another_has_a_place() -> None:
    full = Health(is_up=True, capacity=4, is_full=True)
    world = World(A, B, a=full, b=Health(is_up=True, capacity=4))
    assert addresses_of(world.open(3)) == {B: 3}
    world.health[B] = full
    # Now there is nothing but to wait, which is the client's business, where this process holds the fewest sessions.
    assert addresses_of(world.open(1)) == {A: 1}


def test_sessions_opened_by_many_threads_are_counted_while_they_open() -> None:
    world, everyone = World(A, B, C), threading.Barrier(12, timeout=60)

    def connect(address: str) -> Session:
        everyone.wait()
        return Session(address)

    with ThreadPoolExecutor(12) as threads:
        opening = [threads.submit(world.servers.open, connect) for _ in range(12)]
    assert addresses_of([future.result() for future in opening]) == {A: 4, B: 4, C: 4}


def test_a_session_that_fails_to_open_does_not_count_and_says_why() -> None:
    world = World(A, B)

    def refuse(address: str) -> EnvClient:
        raise EnvServerError(f"{address}/create: HTTP 500")

    with pytest.raises(EnvServerError, match="http://a/create"):
        world.servers.open(refuse)
    assert world.servers.live_sessions() == {A: 0, B: 0}


# --------------------------------------------------------------------------------------------------------------- faults


def test_a_server_that_died_is_left_out_until_it_answers_again() -> None:
    world = World(A, B)
    world.open(2)
    world.fails(A)
    assert addresses_of(world.open(4)) == {B: 4}
    assert world.asked.count(A) == 1 + 1 + 1  # the survey, its session, and the question that it did not answer
    world.now = 10.0
    assert addresses_of(world.open(2)) == {B: 2}
    assert world.asked.count(A) == 4  # once more after its rest, and not again
    world.now = 20.0
    world.works(A)
    # It has one session and the other seven, so it gets all new ones until it has caught up.
    assert addresses_of(world.open(6)) == {A: 6}


def test_a_server_that_is_up_and_gives_no_session_is_left_out_although_it_has_the_fewest() -> None:
    world = World(A, B)
    world.open(4)
    for session in world.sessions:
        session.is_closed = session.address == A

    def connect(address: str) -> Session:
        if address == A:
            raise EnvServerError(f"{address}/create: HTTP 500")
        return Session(address)

    for _ in range(3):
        world.now += 10.0
        with pytest.raises(EnvServerError, match="http://a/create"):
            world.servers.open(connect)
        sessions = [world.servers.open(connect) for _ in range(4)]
        assert addresses_of(sessions) == {B: 4}
    world.now += 10.0
    assert addresses_of(world.open(1)) == {A: 1}


def test_a_server_that_fails_every_reset_is_left_out_longer_and_longer_until_one_succeeds() -> None:
    world = World(A, B)
    for _ in range(3):
        (session,) = world.open()
        assert session.address == A  # it has the fewest sessions each time
        session.on_reset(False)
        session.is_closed = True
    assert addresses_of(world.open(6)) == {B: 6}
    for rest_s in (2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
        world.now += rest_s
        tried = world.open(3)
        assert addresses_of(tried) == {A: 1, B: 2}  # one session finds out for all
        failing = next(session for session in tried if session.address == A)
        failing.on_reset(False)
        failing.is_closed = True
    world.now += 60.0
    (mended,) = world.open()
    mended.on_reset(True)
    assert addresses_of(world.open(4)) == {A: 4}


def test_many_sessions_that_fail_at_once_let_a_server_rest_no_longer_than_one_would() -> None:
    world = World(A, B)
    for session in world.open(64):
        if session.address == A:
            session.on_reset(False)
        session.is_closed = True
    assert addresses_of(world.open(2)) == {B: 2}
    world.now = 2.0
    assert addresses_of(world.open(1)) == {A: 1}


def test_single_failed_resets_say_nothing_of_a_server() -> None:
    world = World(A, B)
    for session in world.open(8):
        session.on_reset(False)
        session.on_reset(True)
    assert addresses_of(world.open(4)) == {A: 2, B: 2}


def test_when_all_servers_fail_their_resets_sessions_are_still_opened() -> None:
    world = World(A, B)
    for session in world.open(2):
        for _ in range(3):
            session.on_reset(False)
    assert addresses_of(world.open(4)) == {A: 2, B: 2}


def test_while_one_thread_asks_whether_a_server_is_back_no_other_waits_for_its_answer() -> None:
    world = World(A, B, a=Health(is_up=False))
    world.open(1)
    world.now = 10.0
    asking, answer = threading.Event(), threading.Event()

    def slow(address: str) -> Health:
        if address == A:
            asking.set()
            answer.wait(60)
        return Health(is_up=address == B)

    world.servers._probe = slow
    with ThreadPoolExecutor(1) as threads:
        patient = threads.submit(world.open)
        assert asking.wait(60)
        assert addresses_of(world.open(3)) == {B: 3}
        answer.set()
        assert addresses_of(patient.result(60)) == {B: 1}


def test_when_all_are_down_the_error_of_the_first_is_shown() -> None:
    with serve(build_app(scripted_spec())) as first, serve(build_app(scripted_spec())) as second:
        pass
    make_client = client_factory(ScriptedClient, [first, second], max_retries=0)
    for _ in range(2):
        with pytest.raises(EnvUnreachable, match=f"{first}/create: connection refused"):
            make_client()


# --------------------------------------------------------------------------------------------------------- real servers


@pytest.fixture
def urls() -> Iterator[list[str]]:
    """Two servers, of 8 and of 24 places."""
    with ExitStack() as stack:
        yield [stack.enter_context(serve(build_app(scripted_spec(), max_sessions=places))) for places in (8, 24)]


def sessions_at(url: str) -> int:
    sessions: int = requests.get(f"{url}/health", timeout=20).json()["sessions"]
    return sessions


@pytest.mark.parametrize("form", [list, ",".join])
def test_real_servers_are_filled_by_their_capacities(urls: list[str], form: object) -> None:
    make_client = client_factory(ScriptedClient, form(urls))
    clients = [make_client() for _ in range(16)]
    assert [sessions_at(url) for url in urls] == [4, 12]
    for client in clients:
        client.close()
    assert [sessions_at(url) for url in urls] == [0, 0]


def test_places_that_another_process_took_are_seen(urls: list[str]) -> None:
    others = [ScriptedClient(urls[0]) for _ in range(8)]
    make_client = client_factory(ScriptedClient, urls)
    clients = [make_client() for _ in range(6)]
    assert {client.env_server_base for client in clients} == {urls[1]}
    for client in (*others, *clients):
        client.close()


def test_a_server_that_comes_back_is_used_again() -> None:
    now = [0.0]
    with serve(build_app(scripted_spec())) as kept, ExitStack() as clients:
        with serve(build_app(scripted_spec())) as lost:
            servers = Servers([lost, kept], clock=lambda: now[0])

            def open_one() -> str:
                return clients.enter_context(servers.open(ScriptedClient)).env_server_base

            assert [open_one(), open_one()] == [lost, kept]
        assert [open_one(), open_one()] == [kept, kept]
        with serve(build_app(scripted_spec()), port=int(lost.rsplit(":", 1)[1])):
            assert open_one() == kept
            now[0] = 10.0
            assert open_one() == lost


def test_trajectories_reach_the_sound_server_beside_one_that_fails_every_reset() -> None:
    broken = Script(fails_at=dict.fromkeys(range(100), 0))
    with serve(build_app(scripted_spec(broken))) as bad, serve(build_app(scripted_spec())) as good:
        make_client, reset = client_factory(ScriptedClient, [bad, good]), []
        for item in range(12):
            with make_client() as client, suppress(EnvServerError):
                client.reset(item)
                reset.append(client.env_server_base)
        assert broken.faults == 3 and reset == [good] * 9


@pytest.mark.parametrize(
    ("answer", "health"),
    [
        (http_answer({"sessions": 2, "capacity": 3}), Health(is_up=True, capacity=3)),
        (http_answer({"sessions": 3, "capacity": 3}), Health(is_up=True, capacity=3, is_full=True)),
        (http_answer({"sessions": 0, "capacity": 0}), Health(is_up=True, capacity=0, is_full=True)),
        (http_answer({"sessions": "many", "capacity": None}), Health(is_up=True)),
        (http_answer({"status": "fine"}), Health(is_up=True)),
        (http_answer(["fine"]), Health(is_up=True)),
        (http_answer(b"fine"), Health(is_up=True)),
        (http_answer({"detail": "Not Found"}, 404), Health(is_up=True)),
        (http_answer(b"bad gateway", 502), Health(is_up=False)),
        (None, Health(is_up=False)),
    ],
)
def test_what_a_server_says_of_its_health_is_understood_whatever_its_make(answer: bytes | None, health: Health) -> None:
    with raw_server(lambda path, body, headers: answer) as url:
        assert ask_health(url) == health
    assert ask_health(url) == Health(is_up=False)


def test_one_server_is_not_asked_for_its_health() -> None:
    asked: list[str] = []

    def answer(path: str, body: object, headers: object) -> bytes:
        asked.append(path)
        return http_answer({"id": 1})

    with raw_server(answer) as url:
        client_factory(ScriptedClient, url)().close()
    assert asked == ["/create", "/close"]


@pytest.mark.parametrize("env_addr", ["", [], "http://a,http://a", ["a"]])
def test_what_is_no_address_is_refused_when_the_factory_is_made(env_addr: str | list[str]) -> None:
    with pytest.raises(ConfigError, match=r"agentgym\.env_addr"):
        client_factory(ScriptedClient, env_addr)
