"""Wall time, peak memory and gain of the quickstart for several seeds; 10 minutes and 4 GiB at most are wanted.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import bench
import psutil
from bench import PROJECT, Result

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


def measure(options: argparse.Namespace) -> Iterator[Result]:
    subprocess.run(["bash", "scripts/setup.sh", "train", "envs"], cwd=PROJECT, check=True)
    gains = []
    for seed in options.seeds:
        result = run(seed, options.out.resolve() / f"seed{seed}")
        gains.append(result.gain)
        yield Result(f"wall_{seed}", f"quickstart, seed {seed}, after installation", result.wall_s, "s", MOST_S)
        yield Result(f"memory_{seed}", "the same: memory of all its processes", result.peak_gib, "GiB", MOST_GIB)
        scores = f"held-out Avg@8 {result.before:.3f} before, {result.after:.3f} after"
        yield Result(f"gain_{seed}", "the same: gain by RL", result.gain, "points", note=scores)
    if len(gains) > 1:
        least = f"least {min(gains):+.1f}"
        yield Result("gain", f"gain, mean of {len(gains)} seeds", statistics.mean(gains), "points", note=least)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path("saves/bench/quickstart") / time.strftime("%Y%m%d-%H%M%S"))
    return bench.run("quickstart", measure, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
