"""Runs a suite of experiments, what is missing of it, and writes down what came out.

    python scripts/experiments/run.py textcraft --jobs 2

Every run has its folder under ``--out``; what is done is not done again, and what was stopped goes on. ``docs/results/
<suite>.json`` gets the numbers, `report.py` makes figures and tables of them. ``--only grpo --seeds 0`` takes a part,
``--list`` prints the commands. Processes use one thread each; ``--jobs`` of them run at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from results import IncompleteEvaluationError, collect, write_results
from suites import SUITES, WARM_UP, Run, runs

from agentgym_rl.envs.benching import served
from agentgym_rl.errors import EnvServerError

PROJECT = Path(__file__).resolve().parents[2]
DONE_FILE, LOG_FILE, COMMANDS_FILE = "done.json", "log.txt", "commands.sh"
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
QUIET = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}


class RunFailedError(RuntimeError):
    """A command of a run ended with another status than 0."""


@dataclass(frozen=True)
class Spent:
    """What one start of a command took, and the status it ended with: a negative signal, or an exit status."""

    status: int
    wall_s: float
    cpu_s: float


class Programs:
    """The programs that run, so that a stop of the runner stops them, too: they save what they can."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def timed(self, argv: Sequence[str], log: Path) -> Spent:
        """Run a program to its end, its output at the end of ``log``. Raises `RunFailedError` after a `stop`."""
        began = time.monotonic()
        with open(log, "a") as output, self._lock:
            if self._stopped:
                raise RunFailedError("stopped before it began")
            process = subprocess.Popen(argv, env=environment(), stdout=output, stderr=output)
            self._running.add(process)
        _, status, usage = os.wait4(process.pid, 0)
        with self._lock:
            process.returncode = os.waitstatus_to_exitcode(status)
            self._running.discard(process)
        wall_s, cpu_s = time.monotonic() - began, usage.ru_utime + usage.ru_stime
        return Spent(process.returncode, round(wall_s, 1), round(cpu_s, 1))

    def stop(self) -> None:
        """Ask all to end, and let no other begin."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.terminate()


def environment() -> dict[str, str]:
    """This process's environment with one thread for all, and the project's programs first."""
    programs = str(Path(sys.executable).parent)
    return os.environ | ONE_THREAD | QUIET | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}


def perform(run: Run, task: str, programs: Programs) -> None:
    """Run the commands of ``run``, with a server of its own, and note their times; nothing where that is done.

    A command that finished before the run was stopped is not run again; the programs go on where they were stopped.
    The times of all starts are kept, those that failed too, so that a run that was stopped is not shown as a cheap one.
    Raises `RunFailedError`, and `EnvServerError` where the server does not start.
    """
    times_file, done_file = run.folder / "times.json", run.folder / DONE_FILE
    if done_file.exists():
        return
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / COMMANDS_FILE).write_text("".join(shlex.join(command.argv) + "\n" for command in run.commands))
    times = json.loads(times_file.read_text()) if times_file.exists() else []
    with served(task) as (url, _):
        for command in run.commands[sum(row.get("status", 0) == 0 for row in times) :]:
            argv = [part.replace("{url}", url) for part in command.argv]
            spent = programs.timed(argv, run.folder / LOG_FILE)
            times.append({"kind": command.kind} | asdict(spent))
            times_file.write_text(json.dumps(times))
            if spent.status:
                raise RunFailedError(
                    f"status {spent.status}: {shlex.join(argv)}\nwhat it said: {run.folder / LOG_FILE}"
                )
    done_file.write_text(json.dumps(times))


def perform_all(chosen: Sequence[Run], task: str, jobs: int) -> list[str]:
    """Run all of ``chosen``, warm-ups first, ``jobs`` at a time; what failed, of which nothing else depends."""
    failures, programs = [], Programs()
    for part in ([run for run in chosen if run.name == WARM_UP], [run for run in chosen if run.name != WARM_UP]):
        with ThreadPoolExecutor(jobs) as pool:
            pending = [(run, pool.submit(perform, run, task, programs)) for run in part]
            try:
                failures += [failure for run, future in pending if (failure := _outcome(run, future))]
            except (SystemExit, KeyboardInterrupt):
                programs.stop()
                raise
    return failures


def _outcome(run: Run, future: Future[None]) -> str:
    """Wait for a run, and say what came of it; why it failed, if it did."""
    name = f"{run.name}, seed {run.seed}"
    try:
        future.result()
    except (RunFailedError, EnvServerError) as error:
        print(f"FAILED {name}: {error}", flush=True)
        return f"{name}: {error}"
    print(f"{time.strftime('%H:%M:%S')} done: {name}", flush=True)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--out", type=Path, default=Path("saves/experiments"), help="below the project's root")
    parser.add_argument("--seeds", type=int, nargs="+", default=[], help="default: all of the suite")
    parser.add_argument("--only", nargs="+", default=[], help="names of runs; their warm-up is made, too")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--list", action="store_true", help="print the commands and end")
    options = parser.parse_args()

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    os.chdir(PROJECT)
    suite, out = SUITES[options.suite], options.out / options.suite
    planned = runs(suite, out, options.seeds or suite.seeds)
    unknown = set(options.only) - {run.name for run in planned}
    if unknown:
        parser.error(f"--only: no run named {', '.join(sorted(unknown))}; there are {', '.join(_names(planned))}")
    chosen = [run for run in planned if not options.only or run.name in options.only or run.name == WARM_UP]
    if options.list:
        for run in chosen:
            print(f"# {run.name}, seed {run.seed}")
            print("\n".join(shlex.join(command.argv) for command in run.commands))
        return 0

    failures = perform_all(chosen, suite.task, options.jobs)
    finished = [run for run in runs(suite, out, suite.seeds) if (run.folder / DONE_FILE).exists()]
    results = []
    for run in finished:
        try:
            results.append(collect(run))
        except IncompleteEvaluationError as error:
            failures.append(str(error))
            print(f"LEFT OUT {run.name}, seed {run.seed}: {error}", flush=True)
    print(f"results: {write_results(options.suite, results)}")
    return 1 if failures else 0


def _names(planned: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(run.name for run in planned))


if __name__ == "__main__":
    sys.exit(main())
