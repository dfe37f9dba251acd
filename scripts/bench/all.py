"""Runs the benches one after another and writes what they measured into the documentation. See ``all.sh``.

Each bench is a process of its own that leaves a report; one that misses a target or ends by an error holds up no other.
Figures, table and ``results.json`` hold the latest report of every bench, so that some of them can be measured anew.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import PROJECT, Report, busy_share
from curves import draw
from tables import (
    curves_table,
    headline_table,
    merged,
    read_reports,
    results_table,
    write_block,
    write_reports,
)
from trl_loop import python_with_trl

HERE = Path(__file__).resolve().parent
DOCUMENT, README = PROJECT / "docs" / "performance.md", PROJECT / "README.md"
FOLDER = PROJECT / "docs" / "performance"
QUICK_FOLDER = PROJECT / "saves" / "bench" / "quick"
QUIET = 0.1
"""Share of the cores that other programs may use without a warning."""
MOST_S = 3600.0
"""After which a bench is ended."""


@dataclass(frozen=True, slots=True)
class Bench:
    """One of the programs beside this one."""

    name: str
    quick: tuple[str, ...] = ()
    """Arguments of a smaller run."""
    only_on_demand: bool = False
    """Left out unless named, or asked for by an option of its own."""


BENCHES = (
    Bench("quickstart", ("--seeds", "0"), only_on_demand=True),
    Bench("startup", ("--repeats", "1")),
    Bench("handler_append", ("--repeats", "10")),
    Bench("collector_latency"),
    Bench("rollout", ("--trajectories", "48", "--sessions", "64", "--turns", "4")),
    Bench("soak", ("--trajectories", "2000", "--steps", "8")),
    Bench("textcraft_server", ("--seconds", "1")),
    Bench("envs", ("textcraft", "babyai", "--seconds", "1")),
    Bench("advantages", ("--trajectories", "128", "--repeats", "3")),
    Bench("train", ("--only", "sharing", "logits", "outside")),
    Bench("scaling", ("--quick",)),
    Bench("viewer", ("--repeats", "1")),
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    folder = options.out or (QUICK_FOLDER if options.quick else FOLDER)
    reports = [run_bench(bench, arguments_of(bench, options)) for bench in chosen(options)]
    everything = merged(read_reports(folder / "results.json"), reports, [bench.name for bench in BENCHES])
    write(everything, folder, into_documents=folder == FOLDER)
    return summarise(reports, folder)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bash scripts/bench/all.sh", description="Run the benches")
    names = [bench.name for bench in BENCHES]
    parser.add_argument("benches", nargs="*", metavar="BENCH", help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--quick", action="store_true", help="smaller runs, which reach no document")
    parser.add_argument("--quickstart", action="store_true", help="the quickstart as well: several minutes")
    trl_help = "an interpreter that has TRL, to compare with, and this project"
    parser.add_argument("--trl-python", metavar="PYTHON", type=python_with_trl, help=trl_help)
    parser.add_argument("--out", type=Path, help="where results and figures go instead, and no document changes")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.benches if name not in names]:
        parser.error(f"no bench named {', '.join(unknown)}: choose among {', '.join(names)}")
    return options


def chosen(options: argparse.Namespace) -> list[Bench]:
    """In the order of `BENCHES`, whatever the order of the names."""
    if options.benches:
        return [bench for bench in BENCHES if bench.name in options.benches]
    return [bench for bench in BENCHES if options.quickstart or not bench.only_on_demand]


def arguments_of(bench: Bench, options: argparse.Namespace) -> list[str]:
    arguments = list(bench.quick) if options.quick else []
    if bench.name == "train" and options.trl_python:
        arguments += ["--trl-python", options.trl_python]
    return arguments


def run_bench(bench: Bench, arguments: Sequence[str]) -> Report:
    """Its report; an incomplete one where it ended by an error or took too long. What it prints is seen as it comes."""
    print(f"\n=== {bench.name} {' '.join(arguments)}".rstrip(), flush=True)
    if (busy := busy_share()) > QUIET:
        print(f"WARNING: other programs use {busy:.0%} of the cores: times will be too long", flush=True)
    with tempfile.TemporaryDirectory() as made:
        file = Path(made) / "report.json"
        command = [sys.executable, str(HERE / f"{bench.name}.py"), *arguments, "--json", str(file)]
        status = run_in_group(command)
        if file.exists():
            return Report.from_json(json.loads(file.read_text()))
    print(f"{bench.name}: ended with status {status} before it measured anything", flush=True)
    return Report.begin(bench.name)


def run_in_group(command: Sequence[str]) -> int:
    """Exit status of a command that takes all that it started along, after `MOST_S` at the latest."""
    process = subprocess.Popen(command, cwd=PROJECT, start_new_session=True)
    try:
        return process.wait(MOST_S)
    except subprocess.TimeoutExpired:
        print(f"ended after {MOST_S:.0f} s", flush=True)
        return -signal.SIGKILL
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def write(reports: Sequence[Report], folder: Path, *, into_documents: bool) -> None:
    write_reports(folder / "results.json", reports)
    curves = [curve for report in reports for curve in report.curves]
    for figure in draw(curves, folder):
        print(f"wrote {figure}")
    if into_documents:
        write_block(DOCUMENT, "results", results_table(reports))
        write_block(DOCUMENT, "curves", curves_table(curves))
        write_block(README, "speed", headline_table(reports))


def summarise(reports: Sequence[Report], folder: Path) -> int:
    """Say what was missed; the exit status."""
    print(f"\nwrote {folder / 'results.json'}; {sum(report.seconds for report in reports) / 60:.1f} minutes in all")
    failed = [report.bench for report in reports if not report.is_complete]
    missed = [(report.bench, result) for report in reports for result in report.missed]
    print(
        f"{sum(len(report.results) for report in reports)} results; {len(missed)} targets missed, {len(failed)} failed"
    )
    for name, result in missed:
        print(f"MISSED {name}: {result}")
    for name in failed:
        print(f"FAILED {name}")
    return int(bool(missed or failed))


if __name__ == "__main__":
    sys.exit(main())
