"""The session pool: whoever waits for a session gets one, whatever happens to the others."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from types import SimpleNamespace
from typing import ClassVar

import pytest

from agentgym_rl.errors import EnvFull, EnvServerError
from agentgym_rl.rollout import sessions
from agentgym_rl.rollout.sessions import EnvClientError, SessionPool


class _Client:
    def close(self) -> None:
        pass


class _Gated:
    """Clients that open one by one, when the test says so."""

    def __init__(self) -> None:
        self.gates: list[threading.Event] = []

    def __call__(self) -> _Client:
        gate = threading.Event()
        self.gates.append(gate)
        gate.wait()
        return _Client()

    async def begun(self, count: int) -> None:
        while len(self.gates) < count:
            await asyncio.sleep(0.001)

    def open_all(self) -> None:
        for gate in self.gates:
            gate.set()


def test_a_session_that_opens_while_a_fresh_one_is_awaited_goes_to_who_waits_for_it():
    async def scenario() -> None:
        make_client = _Gated()
        pool = SessionPool(make_client)
        first = asyncio.create_task(pool.acquire())
        await make_client.begun(1)
        fresh = asyncio.create_task(pool.acquire(fresh=True))
        await make_client.begun(2)
        make_client.gates[0].set()
        try:
            session = await asyncio.wait_for(first, timeout=10)
            assert session.client is not None
        finally:
            make_client.open_all()
            pool.put_back(await fresh)
            await pool.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(30))
def test_every_acquire_ends_in_any_order_of_openings_faults_and_retries(seed):
    """Some clients fail to open; some trajectories end in a fault and ask for a fresh session, as in the collector."""
    dice, counter = random.Random(seed), itertools.count()
    delays = [dice.choice((0.0, 0.001, 0.003)) for _ in range(200)]
    fails = [dice.random() < 0.2 for _ in range(200)]

    def make_client() -> _Client:
        number = next(counter)
        threading.Event().wait(delays[number])
        if fails[number]:
            raise EnvServerError("no place")
        return _Client()

    async def trajectory(pool: SessionPool, number: int) -> str:
        for fresh in (False, True):
            try:
                session = await pool.acquire(fresh=fresh)
            except EnvServerError:
                continue
            await asyncio.sleep(delays[-1 - number])
            if number % 3:
                pool.put_back(session)
                return "done"
            pool.discard(session)
        return "fault"

    async def scenario() -> list[str]:
        pool = SessionPool(make_client)
        try:
            return await asyncio.wait_for(asyncio.gather(*(trajectory(pool, i) for i in range(12))), timeout=20)
        finally:
            await pool.close()

    assert len(asyncio.run(scenario())) == 12


@pytest.mark.parametrize("ends_in_order", [True, False])
def test_a_full_server_is_no_fault_as_long_as_the_pool_has_a_session_that_may_be_put_back(monkeypatch, ends_in_order):
    monkeypatch.setattr(sessions, "_FULL_PAUSE_S", 0.001)
    asked = itertools.count()

    def make_client() -> _Client:
        if next(asked):
            raise EnvFull("no place")
        return _Client()

    async def scenario() -> None:
        pool = SessionPool(make_client)
        only = await pool.acquire()
        waiting = [asyncio.create_task(pool.acquire()) for _ in range(2)]
        while next(asked) < 20:
            await asyncio.sleep(0.001)
        assert not any(task.done() for task in waiting)
        if ends_in_order:
            pool.put_back(only)
            assert await waiting[0] is only and not waiting[1].done()
            pool.put_back(only)
            assert await waiting[1] is only
        else:
            pool.discard(only)
            assert all(isinstance(e, EnvFull) for e in await asyncio.gather(*waiting, return_exceptions=True))
        await pool.close()

    asyncio.run(asyncio.wait_for(scenario(), timeout=30))


# ------------------------------------------------------------------------------------- clients that need no thread


class _Local(_Client):
    """Notes the thread of every call."""

    threads: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.threads.append(threading.get_ident())

    def work(self) -> str:
        self.threads.append(threading.get_ident())
        return "done"

    def fail(self) -> None:
        raise KeyError("a user's mistake")

    def close(self) -> None:
        self.threads.append(threading.get_ident())


def test_an_inline_session_runs_every_call_where_it_is_made_and_is_handed_on_like_any_other():
    async def scenario() -> None:
        pool = SessionPool(_Local, inline=True)
        first = await pool.acquire()
        assert await first.call(_Local.work) == "done"
        with pytest.raises(EnvClientError, match="KeyError"):
            await first.call(_Local.fail)
        waiting = await pool.acquire()
        pool.put_back(first)
        assert await pool.acquire() is first and waiting is not first
        pool.discard(waiting)
        pool.put_back(first)
        await pool.close()

    _Local.threads.clear()
    asyncio.run(scenario())
    assert _Local.threads == [threading.get_ident()] * 5


def test_an_inline_client_that_cannot_be_made_fails_its_trajectory_only():
    def broken() -> _Client:
        raise EnvServerError("no world")

    async def scenario() -> None:
        pool = SessionPool(broken, inline=True)
        with pytest.raises(EnvServerError, match="no world"):
            await pool.acquire()
        await pool.close()

    asyncio.run(scenario())


def test_a_session_whose_call_is_just_being_answered_is_closed_before_the_pool_is():
    answered, closed = threading.Event(), []

    class Client(_Client):
        def close(self) -> None:
            closed.append("closed")

    async def scenario() -> None:
        pool = SessionPool(Client)
        session = await pool.acquire()
        call = asyncio.create_task(session.call(lambda client: answered.wait()))
        await asyncio.sleep(0)
        call.cancel()
        pool.discard(session)
        closing = asyncio.create_task(pool.close())
        await asyncio.sleep(0)
        answered.set()
        await closing
        assert closed == ["closed"]
        assert (pool.usage.peak, pool.usage.retries) == (1, 0)

    asyncio.run(scenario())


def test_sessions_and_their_retries_are_counted():
    async def scenario() -> None:
        pool = SessionPool(lambda: SimpleNamespace(close=lambda: None, retries=3))
        first, second = await pool.acquire(), await pool.acquire()
        pool.put_back(first)
        assert await pool.acquire() is first
        pool.discard(second)
        third = await pool.acquire()
        for session in (first, third):
            pool.put_back(session)
        await pool.close()
        assert (pool.usage.peak, pool.usage.retries) == (2, 9)

    asyncio.run(scenario())
