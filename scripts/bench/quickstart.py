"""Wall time, peak memory and gain of the quickstart for several seeds; fails beyond 10 minutes or 4 GiB.

Memory is the sum of the proportional set sizes of all processes that the quickstart starts, sampled every two seconds,
so that pages which processes share count once. The installation is done before the clock starts.

``python scripts/bench/quickstart.py --seeds 0 1 2 [--out saves/bench/quickstart]``
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

PROJECT = Path(__file__).resolve().parents[2]
SAMPLE_S = 2.0
MOST_S, MOST_GIB = 600.0, 4.0


@dataclass(frozen=True)
class Run:
    """One quickstart."""

    seed: int
    wall_s: float
    peak_gib: float
    before: float
    """Avg@8 on held-out goals."""
    after: float

    @property
    def gain(self) -> float:
        """Points of Avg@8."""
        return 100 * (self.after - self.before)


def run(seed: int, folder: Path) -> Run:
    """Run the quickstart into ``folder``; its output goes to ``<folder>.log``. Raises `CalledProcessError`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = ["bash", "examples/quickstart.sh"]
    environment = os.environ | {"SEED": str(seed), "OUT": str(folder)}
    began, peak = time.monotonic(), 0.0
    with open(f"{folder}.log", "w") as log:
        process = subprocess.Popen(command, cwd=PROJECT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            peak = max(peak, memory_gib(process.pid))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SAMPLE_S)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Run(seed, time.monotonic() - began, peak, score(folder / "eval_before"), score(folder / "eval_after"))


def memory_gib(pid: int) -> float:
    """Proportional set size of a process and all below it, GiB; processes that end meanwhile count 0."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [parent := psutil.Process(pid), *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += process.memory_full_info().pss
    return total / 2**30


def score(folder: Path) -> float:
    overall: float = json.loads((folder / "report.json").read_text())["overall"]["avg"]
    return overall


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path("saves/bench/quickstart") / time.strftime("%Y%m%d-%H%M%S"))
    options = parser.parse_args()

    subprocess.run(["bash", "scripts/setup.sh", "train", "envs"], cwd=PROJECT, check=True)
    runs = []
    print(f"{'seed':>5}{'wall s':>9}{'peak GiB':>10}{'before':>9}{'after':>8}{'gain':>7}")
    for seed in options.seeds:
        result = run(seed, options.out.resolve() / f"seed{seed}")
        runs.append(result)
        print(
            f"{seed:>5}{result.wall_s:>9.0f}{result.peak_gib:>10.2f}{result.before:>9.3f}{result.after:>8.3f}"
            f"{result.gain:>+7.1f}",
            flush=True,
        )
    gains = [result.gain for result in runs]
    print(f"gain in points: mean {statistics.mean(gains):+.1f}, least {min(gains):+.1f}")
    within = all(result.wall_s <= MOST_S and result.peak_gib <= MOST_GIB for result in runs)
    print(f"{'within' if within else 'BEYOND'} {MOST_S:.0f} s and {MOST_GIB:g} GiB")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
