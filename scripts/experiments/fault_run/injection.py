"""Injects faults, each with its end, into servers, network and the training processes."""

from __future__ import annotations

import heapq
import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from fault_run.disk import Disk
from fault_run.gate import FAIR, Mishap, Weather
from fault_run.plan import FaultKind, RunPlan
from fault_run.servers import EnvServer
from fault_run.training import Training

_SLOW = (Mishap.DELAYED, Mishap.THROTTLED, Mishap.DRIPPING)
_CUT = (Mishap.CUT_UNSEEN, Mishap.ANSWER_LOST, Mishap.CUT_MIDWAY)
_BAD = (
    *(Mishap.ERROR_500_UNSEEN, Mishap.ERROR_502, Mishap.BUSY_UNSEEN),
    *(Mishap.NO_JSON, Mishap.HALF_JSON, Mishap.WRONG_TYPES),
)
_ENV_KINDS = tuple(kind for kind in FaultKind if not kind.strikes_run)
_RUN_KINDS = tuple(kind for kind in FaultKind if kind.strikes_run)
_EARLY_SHARE, _EARLY_S = 0.15, 20.0
"""Starts of training that are struck within so many seconds, most likely before they have begun to play."""


@dataclass(frozen=True)
class Injected:
    """A fault that was injected."""

    kind: str
    at_s: float
    """Seconds after the run's start."""
    lasted_s: float
    """0 for what has no end of its own, such as a kill of the driver."""
    target: str
    step: int
    """The last step that the metrics told of at that time."""


class Injector:
    """Begins faults when they are due and ends them in time; `tick` does both, in the caller's thread.

    One that strikes the run itself waits until training has made progress since its last start, so that the run gets
    somewhere at all.
    """

    def __init__(
        self,
        plan: RunPlan,
        servers: Sequence[EnvServer],
        training: Training,
        disk: Disk,
        progress: Callable[[], int],
        record: Path,
    ) -> None:
        """``progress`` counts the steps that servers have executed; ``record`` gets a line for each fault."""
        self._plan, self._servers, self._training, self._disk = plan, servers, training, disk
        self._progress, self._record = progress, record
        self._dice = random.Random(plan.seed)
        self._began = time.monotonic()
        self._ends: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._busy: set[str] = set()
        """Targets under a fault that has not ended."""
        self._given = list(plan.faults)
        self._decks: dict[FaultKind, list[FaultKind]] = {}
        self._next_env = self._began + self._gap(plan.env_gap_s)
        self._next_run: float | None = None
        self.counts: Counter[FaultKind] = Counter()

    @property
    def is_through(self) -> bool:
        """All faults that were given are injected, and none goes on."""
        return not self._given and not self._ends

    @property
    def strikes_servers(self) -> bool:
        """True while a server is down or hangs."""
        return any(server.name in self._busy for server in self._servers)

    def tick(self) -> None:
        """End what is due to end, and begin what is due to begin."""
        self._end_due(time.monotonic())
        if self._plan.faults:
            self._begin_given()
            return
        now = time.monotonic()
        if now >= self._next_env:
            self._begin(self._draw(_ENV_KINDS))
            self._next_env = now + self._gap(self._plan.env_gap_s)
        self._note_progress()
        if self._training.is_running and self._next_run is not None and now >= self._next_run:
            self._begin(self._draw(_RUN_KINDS))
            self._next_run = None

    def training_started(self) -> None:
        """Training begins anew: nothing has come of it yet. Now and then it is struck before anything does."""
        self._progress_at_start = self._progress()
        is_early = not self._plan.faults and self._dice.random() < _EARLY_SHARE
        self._next_run = time.monotonic() + self._dice.uniform(0, _EARLY_S) if is_early else None

    def end_all(self) -> None:
        """Let everything be sound again."""
        self._end_due(float("inf"))
        self._training.trigger.unlink(missing_ok=True)

    # ------------------------------------------------------------------------------------------------------------- when

    def _gap(self, mean_s: float) -> float:
        return self._dice.uniform(0.2, 1.8) * mean_s

    def _draw(self, kinds: Sequence[FaultKind]) -> FaultKind:
        """One of ``kinds``, none a second time before all have come."""
        deck = self._decks.setdefault(kinds[0], [])
        if not deck:
            deck += self._dice.sample(kinds, len(kinds))
        return deck.pop()

    def _note_progress(self) -> bool:
        """True once the present start of training has played; then the next fault of the run itself becomes due."""
        if not self._training.is_running or self._progress() == self._progress_at_start:
            return False
        if self._next_run is None:
            self._next_run = time.monotonic() + self._gap(self._plan.run_gap_s)
        return True

    def _begin_given(self) -> None:
        """The next one in the list, when training plays and the last one is over."""
        if self._given and not self._ends and self._note_progress():
            kind = self._given[0]
            due = self._next_run if kind.strikes_run else self._next_env
            if due is not None and time.monotonic() >= due and self._begin(kind):
                self._given.pop(0)
                self._next_run, self._next_env = None, time.monotonic() + self._gap(self._plan.env_gap_s)

    def _end_due(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            heapq.heappop(self._ends)[2]()

    # ------------------------------------------------------------------------------------------------------------- what

    def _begin(self, kind: FaultKind) -> bool:
        """Inject a fault where something is there to strike; whether it was."""
        match kind:
            case FaultKind.SERVER_KILLED:
                return self._strike_servers(kind, EnvServer.kill, EnvServer.start, (0.0, 4.0))
            case FaultKind.SERVER_HUNG_BRIEFLY:
                most_s = self._plan.request_timeout_s / 2
                return self._strike_servers(kind, EnvServer.hang, EnvServer.wake, (0.2, most_s))
            case FaultKind.SERVER_HUNG_LONG:
                least_s = self._plan.request_timeout_s + 1
                return self._strike_servers(kind, EnvServer.hang, EnvServer.wake, (least_s, 4 * least_s))
            case FaultKind.ALL_SERVERS_HUNG:
                least_s = self._plan.request_timeout_s + 1
                return self._strike_servers(
                    kind, EnvServer.hang, EnvServer.wake, (least_s, 2 * least_s), whole_task=True
                )
            case FaultKind.SLOW_NETWORK:
                most_s = 1.5 * self._plan.request_timeout_s
                return self._change_weather(kind, Weather(_SLOW, 0.25, (0.05, most_s)))
            case FaultKind.BROKEN_NETWORK:
                return self._change_weather(kind, Weather(_CUT, 0.15))
            case FaultKind.BAD_ANSWERS:
                return self._change_weather(kind, Weather(_BAD, 0.15))
            case FaultKind.WORKER_KILLED:
                return self._strike_worker(kind, signal.SIGKILL, None)
            case FaultKind.WORKER_PAUSED:
                return self._strike_worker(kind, signal.SIGSTOP, signal.SIGCONT)
            case FaultKind.DRIVER_KILLED:
                return self._strike_driver(kind, signal.SIGKILL)
            case FaultKind.DRIVER_TERMINATED:
                return self._strike_driver(kind, signal.SIGTERM)
            case FaultKind.DISK_FULL:
                return self._fill_disk(kind)
            case FaultKind.ENGINE_RAISES:
                self._training.trigger.touch()
                self._note(kind, "an engine")
                return True

    def _strike_servers(
        self,
        kind: FaultKind,
        strike: Callable[[EnvServer], None],
        heal: Callable[[EnvServer], None],
        span_s: tuple[float, float],
        *,
        whole_task: bool = False,
    ) -> bool:
        free = [server for server in self._servers if server.name not in self._busy]
        if not free:
            return False
        chosen = self._dice.choice(free)
        targets = [server for server in free if server is chosen or (whole_task and server.task == chosen.task)]
        lasts_s = self._dice.uniform(*span_s)
        for server in targets:
            strike(server)

        def end() -> None:
            for server in targets:
                heal(server)

        names = [server.name for server in targets]
        self._until(lasts_s, end, names)
        self._note(kind, " ".join(names), lasts_s)
        return True

    def _change_weather(self, kind: FaultKind, weather: Weather) -> bool:
        fair = [server for server in self._servers if server.gate.weather == FAIR]
        if not fair:
            return False
        gate, lasts_s = self._dice.choice(fair).gate, self._dice.uniform(*self._plan.weather_s)
        gate.weather = weather

        def end() -> None:
            gate.weather = FAIR

        self._until(lasts_s, end, [])
        self._note(kind, gate.name, lasts_s)
        return True

    def _strike_worker(self, kind: FaultKind, number: signal.Signals, undo: signal.Signals | None) -> bool:
        workers = self._training.workers()
        if not workers:
            return False
        worker = self._dice.choice(workers)
        lasts_s = 0.0 if undo is None else self._dice.uniform(1, 8)
        with suppress(psutil.NoSuchProcess):
            worker.send_signal(number)

        def end() -> None:
            with suppress(psutil.NoSuchProcess):
                if undo is not None:
                    worker.send_signal(undo)

        if undo is not None:
            self._until(lasts_s, end, [])
        self._note(kind, f"process {worker.pid}", lasts_s)
        return True

    def _strike_driver(self, kind: FaultKind, number: signal.Signals) -> bool:
        if not self._training.is_running:
            return False
        self._training.send(number)
        self._note(kind, "driver")
        return True

    def _fill_disk(self, kind: FaultKind) -> bool:
        if "disk" in self._busy:
            return False
        room_bytes, lasts_s = self._dice.randrange(0, 400_000), self._dice.uniform(*self._plan.disk_full_s)
        self._disk.fill(self._processes(), room_bytes=room_bytes)
        self._until(lasts_s, lambda: self._disk.free(self._processes()), ["disk"])
        self._note(kind, f"{room_bytes} bytes of room", lasts_s)
        return True

    def _processes(self) -> list[int]:
        return [process.pid for process in self._training.family()]

    def _until(self, lasts_s: float, end: Callable[[], None], targets: Sequence[str]) -> None:
        self._busy.update(targets)

        def end_and_free() -> None:
            end()
            self._busy.difference_update(targets)

        heapq.heappush(self._ends, (time.monotonic() + lasts_s, next(self._order), end_and_free))

    def _note(self, kind: FaultKind, target: str, lasted_s: float = 0.0) -> None:
        self.counts[kind] += 1
        at_s = time.monotonic() - self._began
        injected = Injected(kind.name, round(at_s, 1), round(lasted_s, 1), target, self._training.last_step())
        with self._record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(injected)) + os.linesep)
