"""One fault run from the first file to the report."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fault_run.checkpoints import CheckpointChecks, difference
from fault_run.disk import Disk, make_disk
from fault_run.injection import Injector
from fault_run.ledger import Ledger, LedgerContents, read_ledger
from fault_run.plan import RunPlan
from fault_run.prepare import TASKS, Inputs, prepare
from fault_run.servers import EnvServer
from fault_run.training import Ending, Training
from fault_run.verify import Findings, explain_lost_metrics, verify

_TICK_S = 0.1
_STANDSTILL_S = 300.0
"""So long without a call to a server and without an end, and the run hangs."""
_ORDERLY_ENDS = 5
"""Tries to end it by SIGTERM: the process may just fail of the last fault, and is then started again."""
_LEFT_OVER_WAIT_S = 30.0
_TERMINATED = 128 + signal.SIGTERM


@dataclass
class Outcome:
    """What a fault run came to."""

    plan: RunPlan
    disk: str
    findings: Findings
    injected: Counter[str]
    endings: list[Ending]
    mishaps: Counter[str]
    """Calls that the network spoiled, by kind."""
    ledger: LedgerContents
    checkpoints_checked: int
    training_s: float
    replay_difference: str
    """Between the run's last weights and those of an undisturbed training on its trajectories; empty: none."""
    left_over: list[str] = field(default_factory=list)
    """Processes of training that are alive after the end."""
    sessions_left: int = 0
    """On all servers, after the lifetime of a session."""

    @property
    def is_clean(self) -> bool:
        """True when nothing was lost, wrongly rewarded, or otherwise wrong."""
        return self.findings.is_clean and not (self.replay_difference or self.left_over or self.sessions_left)


class Conductor:
    """Keeps servers, training and faults going until the plan is fulfilled."""

    def __init__(self, plan: RunPlan, folder: Path) -> None:
        """``folder`` is made."""
        self._plan, self._folder = plan, folder
        self._logs = folder / "logs"
        self._logs.mkdir(parents=True)
        self.inputs: Inputs = prepare(folder / "inputs", plan)
        self.ledger = Ledger(folder / "ledger.jsonl")
        self.servers = [
            EnvServer(
                task, number, self._logs, self.ledger, session_ttl_s=plan.session_ttl_s, seed=plan.seed * 100 + place
            )
            for place, (task, number) in enumerate(
                (task, number) for task in TASKS for number in range(plan.servers_per_task)
            )
        ]
        self.disk: Disk = make_disk(folder / "run")
        addresses = {task: [server.gate.url for server in self.servers if server.task == task] for task in TASKS}
        self.training = Training(plan, self.inputs, addresses, self.disk.folder, self._logs)
        self.checks = CheckpointChecks(self.disk.folder)
        self.injector = Injector(
            plan,
            self.servers,
            self.training,
            self.disk,
            lambda: self.ledger.num_steps,
            folder / "faults.jsonl",
        )
        self._furthest = 0
        """The last step that any start of the command has got to."""

    def run(self) -> Outcome:
        """All of it. Whatever happens, nothing that was started outlives this."""
        try:
            for server in self.servers:
                server.start()
            self._train_under_faults()
            self._end_in_order()
            left_over = self.training.left_over(wait_s=_LEFT_OVER_WAIT_S)
            sessions_left = self._sessions_left()
        finally:
            self._end_everything()
        return self._judge(left_over, sessions_left)

    # --------------------------------------------------------------------------------------------------------- the run

    def _train_under_faults(self) -> None:
        watch = _Standstill()
        self._start_training()
        while not self._is_enough():
            if not self.training.is_running:
                self._note_ending()
                self._start_training()
            self.injector.tick()
            self.training.family()
            watch.look((self.ledger.num_calls, len(self.training.endings)))
            time.sleep(_TICK_S)
        self.injector.end_all()

    def _is_enough(self) -> bool:
        plan = self._plan
        if self.training.uptime_s < plan.training_s or (plan.faults and not self.injector.is_through):
            return False
        # Not before what is trained again has gone beyond all that there was.
        return self.training.is_running and self.training.last_step() > max(plan.least_steps - 1, self._furthest)

    def _end_in_order(self) -> None:
        """SIGTERM, after which the last finished step is saved."""
        for _ in range(_ORDERLY_ENDS):
            self._furthest = max(self._furthest, self.training.last_step())
            self.training.send(signal.SIGTERM)
            if self._wait_for_end().status == _TERMINATED:
                return
            self._start_training()
            watch = _Standstill()
            while self.training.is_running and self.training.last_step() <= self._furthest:
                watch.look(self.ledger.num_calls)
                time.sleep(_TICK_S)
        raise RuntimeError(
            f"the run does not end in order; the last time it said: {self.training.endings[-1].last_line}"
        )

    def _wait_for_end(self) -> Ending:
        watch = _Standstill()
        while self.training.is_running:
            self.training.family()
            watch.look(0)
            time.sleep(_TICK_S)
        return self._note_ending()

    def _start_training(self) -> None:
        # Whoever looks after a run starts it when its servers are there; some are struck while it starts all the same.
        while self.injector.strikes_servers:
            self.injector.tick()
            time.sleep(_TICK_S)
        self.training.start()
        self.injector.training_started()
        print(f"{_now()} start {len(self.training.endings) + 1}", flush=True)

    def _note_ending(self) -> Ending:
        ending = self.training.note_ending()
        self._furthest = max(self._furthest, ending.last_step)
        print(
            f"{_now()} ended with status {ending.status} after step {ending.last_step}, "
            f"{ending.uptime_s:.0f} s: {ending.last_line[:200]}",
            flush=True,
        )
        self.checks.look()
        return ending

    def _sessions_left(self) -> int:
        """Sessions of clients that died end with their lifetime; those of others have been closed."""
        end = time.monotonic() + 1.5 * self._plan.session_ttl_s + 10
        while (left := sum(server.sessions() for server in self.servers)) and time.monotonic() < end:
            time.sleep(0.5)
        return left

    def _end_everything(self) -> None:
        if self.training.is_running:
            self.training.send(signal.SIGKILL)
            self.training.note_ending()
        self.injector.end_all()
        for server in self.servers:
            server.end()
        self.ledger.close()
        self.disk.close()

    # ------------------------------------------------------------------------------------------------------- the proof

    def _judge(self, left_over: list[str], sessions_left: int) -> Outcome:
        run, ledger = self.training.folder, read_ledger(self._folder / "ledger.jsonl")
        self.checks.look()
        steps = self.training.endings[-1].last_step
        items = {task: json.loads(file.read_text()) for task, file in self.inputs.item_files.items()}
        saved = max((int(path.name.removeprefix("global_step_")) for path in run.glob("global_step_*")), default=0)
        findings = verify(run, self._plan, items, ledger, steps=saved)
        explain_lost_metrics(findings, [ending.log.read_text(errors="replace") for ending in self.training.endings])
        findings.other += self.checks.problems
        if saved < steps:
            findings.lost.append(f"the last checkpoint is of step {saved}, and {steps} steps were trained")
        return Outcome(
            plan=self._plan,
            disk=self.disk.how,
            findings=findings,
            injected=Counter({kind.name: count for kind, count in self.injector.counts.items()}),
            endings=self.training.endings,
            mishaps=sum((server.gate.mishaps for server in self.servers), Counter[str]()),
            ledger=ledger,
            checkpoints_checked=self.checks.num_checked,
            training_s=self.training.uptime_s,
            replay_difference=self._replay(f"global_step_{saved}", saved),
            left_over=left_over,
            sessions_left=sessions_left,
        )

    def _replay(self, last: str, steps: int) -> str:
        """How the last checkpoint differs from that of an undisturbed training on the same trajectories."""
        try:
            self.training.replay(steps=steps, into=self._folder / "replayed")
        except RuntimeError as error:
            return str(error)
        return difference(self.training.folder / last, self._folder / "replayed" / last)


class _Standstill:
    """Raises when nothing changes for too long: then something hangs, which is what a fault must never lead to."""

    def __init__(self) -> None:
        self._last: Any = None
        self._since = time.monotonic()

    def look(self, state: Any) -> None:
        now = time.monotonic()
        if state != self._last:
            self._last, self._since = state, now
        elif now - self._since > _STANDSTILL_S:
            raise RuntimeError(f"the run hangs: nothing has happened for {_STANDSTILL_S:.0f} s")


def _now() -> str:
    return time.strftime("%H:%M:%S")
