"""How fast TextCraft is served: steps per second over HTTP and in process, and the share spent outside the rules.

64 clients play planner episodes against one server process. Two kinds of clients are timed: bare sockets, which show
what the server itself can do, and the project's own (``requests``, one thread each).

    python scripts/bench/textcraft_server.py [--clients 64] [--seconds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import bench
import psutil
from bench import Result

from agentgym_rl.envs.benching import served
from agentgym_rl.envs.textcraft.client import TextCraftClient
from agentgym_rl.envs.textcraft.environment import TextCraft, recipe_book
from agentgym_rl.envs.textcraft.planner import plan


def steps_per_second_in_process(seconds: float) -> float:
    """Planner episodes with the rules alone; resets count as time, not as steps."""
    plans = _plans()
    environment, steps, start = TextCraft(), 0, time.perf_counter()
    for index in itertools.cycle(range(len(plans))):
        environment.reset(index)
        for action in plans[index]:
            environment.step(action)
        steps += len(plans[index])
        if time.perf_counter() - start >= seconds:
            break
    return steps / (time.perf_counter() - start)


@dataclass(frozen=True)
class Load:
    """What clients achieved."""

    steps: int
    seconds: float

    @property
    def rate(self) -> float:
        """Steps per second."""
        return self.steps / self.seconds


def load_by_clients(url: str, clients: int, seconds: float) -> Load:
    """The project's clients, one thread each, in this process."""
    plans, end, counts = _plans(), time.perf_counter() + seconds, [0] * clients

    def play(number: int) -> None:
        with TextCraftClient(url) as client:
            for index in itertools.cycle(range(number, len(plans), clients)):
                client.reset(index)
                for action in plans[index]:
                    client.step(f"Action: {action}")
                    counts[number] += 1
                if time.perf_counter() >= end:
                    return

    threads = [threading.Thread(target=play, args=(number,)) for number in range(clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Load(sum(counts), time.perf_counter() - start)


def load_by_sockets(url: str, clients: int, seconds: float) -> Load:
    """Bare HTTP over asyncio sockets, from a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_socket_load, (url, clients, seconds))


def _socket_load(url: str, clients: int, seconds: float) -> Load:
    return asyncio.run(_play_sockets(url, clients, seconds))


async def _play_sockets(url: str, clients: int, seconds: float) -> Load:
    _plans()  # made before the clock starts
    start = time.perf_counter()
    steps = await asyncio.gather(*(_play_socket(url, number, clients, start + seconds) for number in range(clients)))
    return Load(sum(steps), time.perf_counter() - start)


async def _play_socket(url: str, number: int, clients: int, end: float) -> int:
    plans, address, steps = _plans(), urlsplit(url), 0
    reader, writer = await asyncio.open_connection(address.hostname, address.port)

    async def post(path: str, **fields: object) -> dict[str, object]:
        body = json.dumps(fields).encode()
        writer.write(b"POST /%s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body)) + body)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        answer: dict[str, object] = json.loads(await reader.readexactly(length))
        return answer

    handle = (await post("create"))["id"]
    for index in itertools.cycle(range(number, len(plans), clients)):
        await post("reset", id=handle, data_idx=index)
        for action in plans[index]:
            await post("step", id=handle, action=action)
            steps += 1
        if time.perf_counter() >= end:
            break
    writer.close()
    return steps


@functools.cache
def _plans() -> list[list[str]]:
    return [plan(goal) for goal in recipe_book().goals]


def _cpu_s(pid: int) -> float:
    """CPU time that a process has used."""
    return sum(psutil.Process(pid).cpu_times()[:2])


def measure(options: argparse.Namespace) -> Iterator[Result]:
    in_process = steps_per_second_in_process(options.seconds)
    yield Result("in_process", "TextCraft in process", in_process, "steps/s")
    with served("textcraft") as (url, pid):
        for name, load, what in (
            ("sockets", load_by_sockets, "bare sockets"),
            ("clients", load_by_clients, "`EnvClient`s in one process"),
        ):
            before_s = _cpu_s(pid)
            result = load(url, options.clients, options.seconds)
            cpu_s = _cpu_s(pid) - before_s
            # The rules' own time is taken from the run in process: a clock in the server would count its waiting too.
            outside = 1 - result.steps / in_process / cpu_s
            yield Result(
                name,
                f"TextCraft over HTTP, {options.clients} {what}",
                result.rate,
                "steps/s",
                note=f"{outside:.0%} of the server's CPU time outside the rules",
            )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    return bench.run("textcraft_server", measure, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
