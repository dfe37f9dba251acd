"""The tables of the documentation, from the benches' reports; they stand between markers in files written by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench import Curve, Report, Result

HEADLINES = (
    ("quickstart", "wall_0"),
    ("train", "plain"),
    ("train", "trl"),
    ("train", "packing"),
    ("train", "outside"),
    ("advantages", "gae"),
    ("rollout", "busy"),
    ("rollout", "cpu"),
    ("collector_latency", "collector"),
    ("envs", "fastapi"),
    ("soak", "sessions"),
    ("viewer", "trajectories_rows"),
)
"""Bench and name of what the short table shows, where it was measured; each is told by its phrase alone."""


def read_reports(file: Path) -> list[Report]:
    """Those in ``file``; none where there is no such file."""
    if not file.exists():
        return []
    return [Report.from_json(fields) for fields in json.loads(file.read_text())["reports"]]


def write_reports(file: Path, reports: Iterable[Report]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"reports": [report.to_json() for report in reports]}, indent=1) + "\n")


def merged(old: Iterable[Report], new: Iterable[Report], order: Sequence[str]) -> list[Report]:
    """The reports of both in the order of the benches' names; a new one replaces an old one of its bench."""
    by_bench = {report.bench: report for report in (*old, *new)}
    return [by_bench[name] for name in order if name in by_bench]


def results_table(reports: Iterable[Report]) -> str:
    """All results, by bench, and what they were measured on."""
    reports = list(reports)
    lines = ["| bench | what | measured | wanted | |", "|---|---|---|---|---|"]
    for report in reports:
        rows = [_row(result) for result in report.results]
        if not report.is_complete:
            rows.append("ended by an error | | | **failed** |")
        lines += [f"| {'' if index else f'`{report.bench}`'} | {row}" for index, row in enumerate(rows)]
    return "\n".join([*lines, "", *_circumstances(reports)])


def headline_table(reports: Iterable[Report]) -> str:
    """The results of `HEADLINES`, without notes."""
    found = {(report.bench, result.name): result for report in reports for result in report.results}
    lines = ["| what | measured | wanted | |", "|---|---|---|---|"]
    for key in HEADLINES:
        if result := found.get(key):
            cells = (result.what, result.measured_text, result.wanted_text, _verdict(result))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def curves_table(curves: Iterable[Curve]) -> str:
    """What grows how, a row per curve."""
    lines = ["| cost | against | from, to | exponent | between the last two |", "|---|---|---|---|---|"]
    for curve in curves:
        (first, low), (last, high) = curve.points[0], curve.points[-1]
        cost, _, unit = curve.cost.rpartition(", ")
        span = f"{first:,.0f}: {low:.2g} {unit}, {last:,.0f}: {high:.2g} {unit}"
        slopes = f"{curve.exponent:.2f} | {curve.last_exponent:.2f}"
        lines.append(f"| {cost}: {curve.label} | {curve.size} | {span} | {slopes} |")
    return "\n".join(lines)


def replaced(text: str, name: str, block: str) -> str:
    """``text`` with ``block`` between its markers of that name. Raises `ValueError` where they are missing."""
    begin, end = f"<!-- {name}: written by scripts/bench/all.sh -->", f"<!-- end of {name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"no {begin} ... {end} in the text")
    return f"{before}{begin}\n\n{block}\n\n{end}{after}"


def write_block(file: Path, name: str, block: str) -> None:
    """`replaced` in a file. Raises `ValueError` where its markers are missing."""
    file.write_text(replaced(file.read_text(), name, block))


def _row(result: Result) -> str:
    measured = f"{result.measured_text} ({result.note})" if result.note else result.measured_text
    return f"{result.what} | {measured} | {result.wanted_text} | {_verdict(result)} |"


def _verdict(result: Result) -> str:
    if result.wanted is None:
        return ""
    return "**missed**" if result.is_missed else "met"


def _circumstances(reports: Sequence[Report]) -> list[str]:
    """A sentence for each machine and day."""
    groups: dict[tuple[str, str], list[Report]] = {}
    for report in reports:
        groups.setdefault((report.date, str(report.machine)), []).append(report)
    return [
        f"Measured on {date}: {machine}. {_named(group) if len(groups) > 1 else 'All'} in "
        f"{sum(report.seconds for report in group) / 60:.0f} minutes; other programs used at most "
        f"{max(report.busy_before for report in group):.0%} of the cores before each bench."
        for (date, machine), group in groups.items()
    ]


def _named(reports: Iterable[Report]) -> str:
    return ", ".join(f"`{report.bench}`" for report in reports)
