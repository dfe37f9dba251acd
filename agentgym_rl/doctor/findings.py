"""What the doctor finds, and how it is shown."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

_WIDTH = 116


class Verdict(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    """Something that was asked for does not work."""
    NOT_APPLICABLE = "not applicable"
    """Nothing that was asked for needs it, or it cannot be told here."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check."""

    name: str
    verdict: Verdict
    seen: str
    """What was found; of a comparison that failed, the first difference."""
    remedy: str = ""
    """What to do about it; empty where nothing is wrong."""


def passed(name: str, seen: str) -> Finding:
    return Finding(name, Verdict.PASSED, seen)


def failed(name: str, seen: str, remedy: str) -> Finding:
    return Finding(name, Verdict.FAILED, seen, remedy)


def not_applicable(name: str, seen: str, remedy: str = "") -> Finding:
    return Finding(name, Verdict.NOT_APPLICABLE, seen, remedy)


def lacking(name: str, seen: str, remedy: str, *, is_needed: bool) -> Finding:
    """Something is not there: a failure where it is needed."""
    return Finding(name, Verdict.FAILED if is_needed else Verdict.NOT_APPLICABLE, seen, remedy)


def table(findings: Sequence[Finding]) -> str:
    """All findings, each with its remedy, and their number by verdict."""
    widths = [max(len(getattr(finding, column)) for finding in findings) for column in ("name", "verdict")]
    indent = " " * (sum(widths) + 4)
    lines = []
    for finding in findings:
        head = f"{finding.name:<{widths[0]}}  {finding.verdict:<{widths[1]}}  "
        lines += textwrap.wrap(head + finding.seen, _WIDTH, subsequent_indent=indent, drop_whitespace=True)
        if finding.remedy:
            lines += textwrap.wrap(
                f"-> {finding.remedy}", _WIDTH, initial_indent=indent, subsequent_indent=indent + "   "
            )
    counts = ", ".join(f"{sum(finding.verdict == verdict for finding in findings)} {verdict}" for verdict in Verdict)
    return "\n".join([*lines, counts])
