"""The training run from outside: one command, started again whenever it has ended."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from fault_run.faulty_model import TRIGGER_VARIABLE
from fault_run.plan import RunPlan
from fault_run.prepare import ROOT, TASKS, Inputs, child_environment
from verl.agent_trainer.entry import EXIT_CONFIG
from verl.utils.tracking import METRICS_FILE, read_metrics

_MANY_STEPS = 100_000
"""More than any run gets to: it ends by SIGTERM."""
_LAST_WORDS_S = 1.0
_REPLAY_TRIES = 3
"""Of which Ray may fail to start some, on a machine that does much else."""
_RESUMED = re.compile(r"^resumed from \S+, after step (\d+)$", re.MULTILINE)
_TRAINED = re.compile(r"^step +(\d+) \|", re.MULTILINE)


@dataclass(frozen=True)
class Ending:
    """How one start of the command ended."""

    status: int
    """Negative: by this signal."""
    uptime_s: float
    resumed_after: int
    """The step that it went on after; 0 for a beginning."""
    last_step: int
    """The last one in its metrics."""
    steps: tuple[int, ...]
    """Those that it trained, as it said."""
    last_line: str
    log: Path
    """What it and its workers said."""


class Training:
    """The command of a run, and the process that runs it now."""

    def __init__(
        self, plan: RunPlan, inputs: Inputs, addresses: dict[str, list[str]], folder: Path, logs: Path
    ) -> None:
        """``addresses`` of each task's servers; ``folder`` is the run's own, ``logs`` are on another disk."""
        self.folder, self._logs, self._plan = folder, logs, plan
        self.trigger = logs / "engine_raises"
        self.command = self._command(inputs, addresses)
        self.endings: list[Ending] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._family: set[psutil.Process] = set()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def uptime_s(self) -> float:
        """Of all starts together, but for those that were refused, as for want of a server."""
        now = time.monotonic() - self._started if self._process is not None else 0.0
        return sum(ending.uptime_s for ending in self.endings if ending.status != EXIT_CONFIG) + now

    def start(self) -> None:
        self._started = time.monotonic()
        self._log = self._logs / f"driver.{len(self.endings) + 1}.log"
        # By a pipe: a limit on the size of files must not hit what it says.
        with self._log.open("wb") as log:
            self._writer = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=log, start_new_session=True)
        assert self._writer.stdin is not None
        environment = child_environment() | {TRIGGER_VARIABLE: str(self.trigger)}
        self._process = subprocess.Popen(
            self.command,
            stdout=self._writer.stdin,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
            # Ctrl-C in a terminal is for the conductor alone, who ends everything in order.
            start_new_session=True,
        )
        self._writer.stdin.close()

    def send(self, number: signal.Signals) -> None:
        """To the driver."""
        assert self._process is not None
        self._process.send_signal(number)

    def workers(self) -> list[psutil.Process]:
        """The processes of the training workers."""
        return [process for process in self.family() if _title(process).startswith("ray::_WorkerHost")]

    def family(self) -> list[psutil.Process]:
        """The driver and all that it has started and is alive; remembered for `left_over`."""
        if self._process is None:
            return []
        try:
            driver = psutil.Process(self._process.pid)
            family = [driver, *driver.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        self._family.update(family)
        return family

    def left_over(self, *, wait_s: float) -> list[str]:
        """What is alive, so long after the end, of all that was ever started."""
        end = time.monotonic() + wait_s
        while (alive := [process for process in self._family if _is_alive(process)]) and time.monotonic() < end:
            time.sleep(0.2)
        return [f"{process.pid} {_title(process)}" for process in alive]

    def note_ending(self) -> Ending:
        """Put down how the process, which has ended, did so."""
        assert self._process is not None
        status = self._process.wait()
        with suppress(subprocess.TimeoutExpired):  # others of its family may hold the pipe for some seconds more
            self._writer.wait(_LAST_WORDS_S)
        log = self._log.read_text(errors="replace")
        resumed = _RESUMED.findall(log)
        lines = [line for line in log.splitlines() if line.strip()]
        ending = Ending(
            status=status,
            uptime_s=time.monotonic() - self._started,
            resumed_after=int(resumed[-1]) if resumed else 0,
            last_step=self.last_step(),
            steps=tuple(map(int, _TRAINED.findall(log))),
            last_line=lines[-1] if lines else "",
            log=self._log,
        )
        self.endings.append(ending)
        self._process = None
        return ending

    def last_step(self) -> int:
        """The last one in the metrics."""
        path = self.folder / METRICS_FILE
        rows = read_metrics(path) if path.exists() else []
        return rows[-1]["step"] if rows else 0

    def replay(self, *, steps: int, into: Path) -> None:
        """Train once more, undisturbed, on the trajectories of the run's final history."""
        changed = {
            "trainer.replay": str(self.folder),
            "trainer.total_training_steps": str(steps),
            "trainer.default_local_dir": str(into),
            "trainer.save_freq": "-1",
        }
        kept = [argument for argument in self.command if argument.partition("=")[0] not in changed]
        command = [*kept, *(f"{key}={value}" for key, value in changed.items())]
        for _ in range(_REPLAY_TRIES):
            with (self._logs / "replay.log").open("wb") as log:
                ended = subprocess.run(command, stdout=log, stderr=log, env=child_environment(), cwd=ROOT)
            if ended.returncode == 0:
                return
        raise RuntimeError(f"the replay failed: see {self._logs / 'replay.log'}")

    def _command(self, inputs: Inputs, addresses: dict[str, list[str]]) -> list[str]:
        plan = self._plan
        servers = ",".join(f"[{','.join(addresses[task])}]" for task in TASKS)
        arguments = [
            "algorithm.adv_estimator=grpo",
            "algorithm.rounds_ctrl.type=scaling_inter_stepwise",
            "algorithm.rounds_ctrl.rounds=[3,5]",
            "algorithm.rounds_ctrl.steps_scaling_inter=20",
            f"data.train_file=[{','.join(str(inputs.item_files[task]) for task in TASKS)}]",
            "data.task_weights=[1,1]",
            "data.shuffle=False",
            f"data.train_batch_size={plan.items_per_step}",
            "data.max_prompt_length=1500",
            "data.max_response_length=2500",
            f"actor_rollout_ref.agentgym.task_name=[{','.join(TASKS)}]",
            f"actor_rollout_ref.agentgym.env_addr=[{servers}]",
            "actor_rollout_ref.agentgym.agent=fault_run.faulty_model:Act",
            f"actor_rollout_ref.agentgym.timeout={plan.trajectory_timeout_s}",
            f"actor_rollout_ref.agentgym.request_timeout={plan.request_timeout_s}",
            "actor_rollout_ref.agentgym.connect_timeout=1",
            "actor_rollout_ref.agentgym.max_retries=5",
            f"actor_rollout_ref.model.path={inputs.model}",
            "actor_rollout_ref.actor.optim.lr=1e-4",
            # Every step makes an update, also one whose groups are alike.
            "actor_rollout_ref.actor.entropy_coeff=0.02",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={plan.items_per_step}",
            f"actor_rollout_ref.rollout.n={plan.samples}",
            "actor_rollout_ref.rollout.max_tokens=24",
            "actor_rollout_ref.rollout.max_model_len=4000",
            f"trainer.total_training_steps={_MANY_STEPS}",
            f"trainer.default_local_dir={self.folder}",
            f"trainer.save_freq={plan.save_freq}",
            "trainer.max_actor_ckpt_to_keep=3",
            f"trainer.seed={plan.seed}",
            "trainer.logger=[console,jsonl]",
            "trainer.device=cpu",
            "trainer.num_threads=1",
            f"trainer.n_gpus_per_node={plan.num_workers}",
            f"trainer.worker_group={plan.worker_group}",
        ]
        return [sys.executable, "-m", "verl.agent_trainer.main_ppo", *arguments]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:80] or process.name()
    except psutil.Error:
        return ""


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
