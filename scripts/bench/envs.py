"""How environments are served: speeds as ratios within one run, memory per session.

    python scripts/bench/envs.py [textcraft workers ...] [--clients 64] [--seconds 5]

Server and load run on cores of their own where the machine has two.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import bench
import psutil
import requests
import uvloop
from bench import Result

from agentgym_rl.envs.benching import memory_bytes, served

ROUNDS = 3
"""Each speed is measured so often, in turn with what it is compared with; the best of each counts."""
_SERVER_CORE, _LOAD_CORE = 0, 1
_WARMUP_S = 0.5


@dataclass(frozen=True)
class Options:
    """What the command line chooses."""

    clients: int
    seconds: float


# ---------------------------------------------------------------------------------------------------------------- load


class _Client(asyncio.Protocol):
    """One kept-alive connection that sends its next request as soon as the last one is answered."""

    def __init__(self, requests_: Callable[[_Client], Iterator[bytes]], done: asyncio.Future[None]) -> None:
        self._requests, self._done = requests_(self), done
        self._received = b""
        self.body = b""
        """Of the latest answer."""
        self.answered = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(next(self._requests))

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator or len(body) < _content_length(head):
            return
        if not head.startswith(b"HTTP/1.1 200") or b'"error"' in body or b'"detail"' in body:
            self._done.set_exception(RuntimeError(f"{head!r} {body[:300]!r}"))
            self._transport.close()
            return
        self._received, self.body = b"", body
        self.answered += 1
        request = next(self._requests, None)
        if request is None:
            self._transport.close()
            self._done.set_result(None)
        else:
            self._transport.write(request)


def _content_length(head: bytes) -> int:
    return int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])


def post_bytes(path: str, fields: object) -> bytes:
    """A whole HTTP request."""
    body = json.dumps(fields).encode()
    head = f"POST /{path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


_Calls = list[tuple[str, dict[str, Any]]]
"""Paths and bodies of calls on one session; without its handle where the session is yet to be created."""


def requests_per_second(
    url: str, bodies: list[list[bytes]] | list[_Calls], seconds: float, *, pinned: bool = True
) -> float:
    """One connection per list of requests, which it repeats for ``seconds``; from a process of its own.

    For calls without handles each connection creates a session first.
    """
    initializer = (_pin, (_LOAD_CORE,)) if pinned else ()
    with multiprocessing.get_context("spawn").Pool(1, *initializer) as pool:
        return pool.apply(_load, (url, bodies, seconds))


def _load(url: str, bodies: list[list[bytes]] | list[_Calls], seconds: float) -> float:
    return uvloop.run(_load_async(url, bodies, seconds))


async def _load_async(url: str, bodies: list[list[bytes]] | list[_Calls], seconds: float) -> float:
    await _play(url, bodies, _WARMUP_S)
    return await _play(url, bodies, seconds)


async def _play(url: str, bodies: list[list[bytes]] | list[_Calls], seconds: float) -> float:
    address, loop = urlsplit(url), asyncio.get_running_loop()
    start = time.perf_counter()

    def until_the_end(own: list[bytes] | _Calls, client: _Client) -> Iterator[bytes]:
        return itertools.takewhile(lambda _: time.perf_counter() < start + seconds, _repeated(client, own))

    waiting, clients = [], []
    for own in bodies:
        done: asyncio.Future[None] = loop.create_future()
        make_client = functools.partial(_Client, functools.partial(until_the_end, own), done)
        _, client = await loop.create_connection(make_client, address.hostname, address.port)
        waiting.append(done)
        clients.append(client)
    await asyncio.gather(*waiting)
    return sum(client.answered for client in clients) / (time.perf_counter() - start)


def _repeated(client: _Client, own: list[bytes] | _Calls) -> Iterator[bytes]:
    """The requests over and over; calls on a session that the connection creates and leaves to the server's end."""
    whole = [request for request in own if isinstance(request, bytes)]
    calls = [request for request in own if not isinstance(request, bytes)]
    if calls:
        yield post_bytes("create", {})
        handle = json.loads(client.body)["id"]
        whole = [post_bytes(path, {"id": handle, **fields}) for path, fields in calls]
    yield from itertools.cycle(whole)


def _pin(core: int, pid: int = 0) -> None:
    """Hold a process to one core, where there are two."""
    if hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) > 1:
        os.sched_setaffinity(pid, {sorted(os.sched_getaffinity(0))[core]})


# ----------------------------------------------------------------------------------------------------------- baseline


def serve_baseline(port: int) -> None:
    """An empty FastAPI endpoint with pydantic's validation on uvicorn's defaults."""
    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel

    class StepRequest(BaseModel):
        id: int
        action: str

    class StepAnswer(BaseModel):
        observation: str
        reward: float
        done: bool

    app = FastAPI()

    # Annotations of local classes cannot be resolved from text.
    async def step(request: StepRequest) -> StepAnswer:
        return StepAnswer(observation="Got 1 acacia logs", reward=0, done=False)

    step.__annotations__ = {"request": StepRequest, "return": StepAnswer}
    app.post("/step")(step)
    uvicorn.run(app, port=port)


@contextmanager
def baseline() -> Iterator[str]:
    """The URL of the empty FastAPI endpoint, in a process of its own."""
    from agentgym_rl.envs.serving import bind

    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, __file__, "--baseline", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _pin(_SERVER_CORE, process.pid)
        url = f"http://127.0.0.1:{port}"
        _wait_until_it_answers(url, process)
        yield url
    finally:
        process.terminate()
        process.wait()


def _wait_until_it_answers(url: str, process: subprocess.Popen[bytes]) -> None:
    while True:
        try:
            requests.post(f"{url}/step", json={"id": 1, "action": "x"}, timeout=5).raise_for_status()
            return
        except requests.ConnectionError:
            if process.poll() is not None:
                raise SystemExit("the FastAPI endpoint did not start: pip install 'agentgym-rl[dev]'") from None
            time.sleep(0.05)


# ---------------------------------------------------------------------------------------------------------- TextCraft


def bench_textcraft(options: Options) -> Iterator[Result]:
    """Steps over HTTP against an empty FastAPI endpoint, batches against single calls, a thousand sessions."""
    single, batched, empty = 0.0, 0.0, 0.0
    with served("textcraft") as (url, pid), baseline() as empty_url:
        _pin(_SERVER_CORE, pid)
        episodes = _episodes(url, options.clients)
        batches = [[post_bytes("batch", {"calls": _batch_calls(episode, 32)})] for episode in episodes]
        steps = [[post_bytes(path, fields) for path, fields in episode] for episode in episodes]
        nothing = [[post_bytes("step", {"id": 2**52, "action": "get 1 acacia logs"})] for _ in episodes]
        for _ in range(ROUNDS):
            empty = max(empty, requests_per_second(empty_url, nothing, options.seconds))
            single = max(single, requests_per_second(url, steps, options.seconds))
            batched = max(batched, 32 * requests_per_second(url, batches, options.seconds))
    yield Result(
        "fastapi",
        f"TextCraft calls/s, {options.clients} clients, over those of an empty FastAPI endpoint",
        single / empty,
        "x",
        1.2,
        at_least=True,
        note=f"{single:,.0f} against {empty:,.0f} calls/s",
    )
    yield Result(
        "batches", "TextCraft calls/s in batches of 32 over single ones", batched / single, "x", 5, at_least=True
    )
    yield many_sessions("textcraft", "TextCraft", max_kb=50)


def _episodes(url: str, clients: int) -> list[_Calls]:
    """For each client the calls of the planner's episode of an item: a reset and its steps."""
    from agentgym_rl.envs.textcraft.environment import recipe_book
    from agentgym_rl.envs.textcraft.planner import plan

    goals, calls = recipe_book().goals, []
    for number in range(clients):
        handle = requests.post(f"{url}/create", timeout=10).json()["id"]
        item = number * len(goals) // clients
        steps = [("step", {"id": handle, "action": action}) for action in plan(goals[item])]
        calls.append([("reset", {"id": handle, "data_idx": item}), *steps])
    return calls


def _batch_calls(episode: _Calls, count: int) -> list[dict[str, Any]]:
    """``count`` calls that begin with the episode's reset and repeat it as a whole as often as fits."""
    repeated = itertools.islice(itertools.cycle(episode), count)
    return [{"path": f"/{path}", "body": fields} for path, fields in repeated]


def many_sessions(task: str, title: str, *, count: int = 1000, max_kb: float) -> Result:
    """Memory of a session when ``count`` live in one server process; each is created, reset, stepped and closed."""
    from agentgym_rl.client.connection import Connection
    from agentgym_rl.envs.registry import get_spec

    spec = get_spec(task)
    handle_field, index_field = spec.wire.handle_field, spec.wire.index_field
    with served(task, ["--max-sessions", str(count + 1)]) as (url, pid):
        connection = Connection(url, timeout_s=300, max_retries=0)
        warm = connection.post("create", {}).content[handle_field]
        for item in range(count):  # what all sessions share is loaded before the count begins
            connection.post("reset", {handle_field: warm, index_field: item % spec.num_items})
        before, start = memory_bytes(pid), time.perf_counter()
        handles = [connection.post("create", {}).content[handle_field] for _ in range(count)]
        for number, handle in enumerate(handles):
            connection.post("reset", {handle_field: handle, index_field: number % spec.num_items})
            reply = connection.post("step", {handle_field: handle, "action": spec.client.example_action})
            assert reply.status == 200, reply
        grown_kb = (memory_bytes(pid) - before) / count / 1000
        for handle in [warm, *handles]:
            assert connection.post("close", {handle_field: handle}).content is True
        left = connection.get("health").content["sessions"]
        connection.close()
    assert left == 0, f"{left} sessions are left"
    seconds = time.perf_counter() - start
    return Result(
        f"{task}_memory",
        f"{title}: memory of a session, {count:,} live in one process",
        grown_kb,
        "kB",
        max_kb,
        note=f"all created, reset, stepped and closed in {seconds:.1f} s",
    )


def bench_workers(options: Options) -> Iterator[Result]:
    """TextCraft with two worker processes against one, nothing pinned: clients and servers share all cores."""
    with served("textcraft") as one, served("textcraft", ["--workers", "2"]) as two:
        calls = [
            [(path, {name: value for name, value in fields.items() if name != "id"}) for path, fields in episode]
            for episode in _episodes(one[0], options.clients)
        ]
        runs: list[list[tuple[float, float]]] = [[], []]
        for number, (url, pid) in list(enumerate((one, two))) * ROUNDS:
            before = _cpu_s(pid)
            rate = requests_per_second(url, calls, options.seconds, pinned=False)
            runs[number].append((rate, 1e6 * (_cpu_s(pid) - before) / (rate * (options.seconds + _WARMUP_S))))
    (rate, cpu), (rate_of_two, cpu_of_two) = map(max, runs)
    yield Result(
        "workers",
        "TextCraft calls/s with two server processes over one, clients on the same cores",
        rate_of_two / rate,
        "x",
        note=f"{rate_of_two:,.0f} against {rate:,.0f} calls/s, {cpu_of_two:.0f} and {cpu:.0f} us of the CPU each",
    )


def _cpu_s(pid: int) -> float:
    """CPU time of a process and all that it started."""
    process = psutil.Process(pid)
    return sum(sum(each.cpu_times()[:2]) for each in (process, *process.children(recursive=True)))


def bench_babyai(options: Options) -> Iterator[Result]:
    """A thousand sessions."""
    yield many_sessions("babyai", "BabyAI", max_kb=100)


def bench_webarena(options: Options) -> Iterator[Result]:
    """Steps per second and memory of 1, 4 and 8 sessions on the small sites, which share a browser."""
    from agentgym_rl.envs.benching import load
    from agentgym_rl.envs.registry import get_spec

    spec = get_spec("webarena")
    for clients in (1, 4, 8):
        with served("webarena", ["--started-ahead", "0"]) as (url, pid):
            alone = memory_bytes(pid)
            with spec.client(url) as first:  # which starts the browser that stays for the others
                first.reset(0)
            shared_mb = (memory_bytes(pid) - alone) / 1e6
            # Eight sessions that begin at once take seconds to do so.
            result = load(spec, url, clients=clients, seconds=4 * options.seconds, pid=pid)
        assert result.bytes_per_session is not None
        for call in result.calls:
            print(f"    {call.name:8} p50 {1000 * call.p50_s:7.0f} ms   p99 {1000 * call.p99_s:7.0f} ms")
        plural = "s" if clients > 1 else ""
        memory = f"{result.bytes_per_session / 1e6:.0f} MB a session, {shared_mb:.0f} MB shared"
        what = f"WebArena's small sites, {clients} session{plural}"
        yield Result(f"webarena_{clients}", what, result.steps_per_s, "steps/s", note=memory)


def bench_sciworld(options: Options) -> Iterator[Result]:
    """Steps of gold actions over HTTP against those of the bare package; how long a session takes to begin."""
    from agentgym_rl.client.connection import Connection
    from agentgym_rl.envs.sciworld.environment import SciWorld

    environment = SciWorld()
    try:
        episodes = []
        for item in _SCIWORLD_ITEMS:
            start = environment.reset(item)
            episodes.append((item, start.task_name, start.var_num, environment.gold_actions()))
    finally:
        environment.close()
    with served("sciworld") as (url, _):
        connection = Connection(url, timeout_s=300, max_retries=0)
        handle = connection.post("create", {}).content["id"]
        times = []
        for _ in range(3):  # the other places of the first session's simulator
            began = time.perf_counter()
            connection.post("create", {})
            times.append(time.perf_counter() - began)

        def play_served(item: int, task: str, variation: int, actions: list[str]) -> int:
            connection.post("reset", {"id": handle, "data_idx": item})
            for number, action in enumerate(actions, start=1):
                if connection.post("step", {"id": handle, "action": action}).content["done"]:
                    return number
            return len(actions)

        ours = max(_steps_per_s(episodes, play_served) for _ in range(ROUNDS))
        connection.close()
    bare = _bare_sciworld(episodes)
    yield Result(
        "sciworld",
        "SciWorld steps/s over HTTP, one session, over those of the bare package",
        ours / bare,
        "x",
        1,
        at_least=True,
        note=f"{ours:.0f} against {bare:.0f} steps/s",
    )
    yield Result("sciworld_start", "SciWorld: a session begins, slowest of 3", 1000 * max(times), "ms", 100)


_SCIWORLD_ITEMS = (1396, 2936, 3836, 4136, 4168, 4615)
_Episode = tuple[int, str, int, list[str]]


def _steps_per_s(episodes: list[_Episode], play: Callable[[int, str, int, list[str]], int]) -> float:
    began = time.perf_counter()
    steps = sum(play(*episode) for episode in episodes)
    return steps / (time.perf_counter() - began)


def _bare_sciworld(episodes: list[_Episode]) -> float:
    """Steps per second of the package's own environment, in this process."""
    from scienceworld import ScienceWorldEnv

    bare = ScienceWorldEnv()

    def play(item: int, task: str, variation: int, actions: list[str]) -> int:
        bare.load(task, variation)
        bare.reset()
        for number, action in enumerate(actions, start=1):
            if bare.step(action)[2]:
                return number
        return len(actions)

    try:
        return max(_steps_per_s(episodes, play) for _ in range(ROUNDS))
    finally:
        bare.close()


TASKS: dict[str, Callable[[Options], Iterator[Result]]] = {
    "textcraft": bench_textcraft,
    "workers": bench_workers,
    "babyai": bench_babyai,
    "sciworld": bench_sciworld,
    "webarena": bench_webarena,
}


def measure(arguments: argparse.Namespace) -> Iterator[Result]:
    options = Options(arguments.clients, arguments.seconds)
    for task in arguments.tasks or TASKS:
        yield from TASKS[task](options)


def _task(name: str) -> str:
    if name not in TASKS:
        raise argparse.ArgumentTypeError(f"no bench for {name}: choose among {', '.join(TASKS)}")
    return name


def main(arguments: Sequence[str] | None = None) -> int:
    if arguments is None and sys.argv[1:2] == ["--baseline"]:
        serve_baseline(int(sys.argv[2]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tasks", nargs="*", type=_task, metavar="TASK", help=f"of {', '.join(TASKS)}; default: all")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    return bench.run("envs", measure, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
