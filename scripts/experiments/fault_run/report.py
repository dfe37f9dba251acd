"""The report of a fault run, as JSON and as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fault_run.conduct import Outcome
from fault_run.plan import FaultKind
from fault_run.training import Ending

_SHOWN = 20
"""Findings of a kind that the Markdown repeats."""


def as_json(outcome: Outcome) -> dict[str, Any]:
    """All counts; findings in full."""
    endings = outcome.endings
    return {
        "seed": outcome.plan.seed,
        "training_s": round(outcome.training_s),
        "disk_full": outcome.disk,
        "faults": {kind.name: outcome.injected[kind.name] for kind in FaultKind},
        "faults_total": outcome.injected.total(),
        "calls_spoiled_by_the_network": dict(sorted(outcome.mishaps.items())),
        "calls": outcome.ledger.num_calls,
        "calls_answered_again_under_their_id": outcome.ledger.repeated,
        "episodes_begun_on_servers": len(outcome.ledger.episodes),
        "starts": len(endings),
        "resumes": sum(ending.resumed_after > 0 for ending in endings),
        "endings": dict(Counter(how_ended(ending) for ending in endings)),
        "steps_trained_again": trained_again(endings),
        "checkpoints_checked": outcome.checkpoints_checked,
        "final_history": outcome.findings.as_json(),
        "lost": len(outcome.findings.lost),
        "wrongly_rewarded": len(outcome.findings.wrongly_rewarded),
        "otherwise_wrong": len(outcome.findings.other),
        "replay": outcome.replay_difference or "the same weights to the last bit",
        "processes_left": outcome.left_over,
        "sessions_left": outcome.sessions_left,
        "is_clean": outcome.is_clean,
    }


def as_markdown(report: Mapping[str, Any]) -> str:
    """The tables of a report that `as_json` made."""
    history = report["final_history"]
    masked = history["masked"]
    parts = [
        _table(("faults injected", ""), ((FaultKind[name].value, n) for name, n in report["faults"].items())),
        _table(
            ("the run", ""),
            (
                ("minutes of training", f"{report['training_s'] / 60:.1f}"),
                ("faults injected in all", report["faults_total"]),
                ("calls that servers answered", f"{report['calls']:,}"),
                ("calls spoiled on the way", f"{sum(report['calls_spoiled_by_the_network'].values()):,}"),
                ("starts of the command", report["starts"]),
                ("of these, resumed from a checkpoint", report["resumes"]),
                ("steps trained again after a resume", report["steps_trained_again"]),
                ("complete checkpoints looked at; all load", report["checkpoints_checked"]),
            ),
        ),
        _table(("how a start ended", ""), sorted(report["endings"].items(), key=lambda item: -item[1])),
        _table(
            ("the final history", ""),
            (
                ("steps", history["steps"]),
                ("trajectories asked for", f"{history['trajectories']:,}"),
                ("sound", f"{history['sound']:,}"),
                ("of these, on the second attempt", history["second_attempts"]),
                ("of these, with a reward above 0", f"{history['rewarded']:,}"),
                ("masked", sum(masked.values())),
                *((f"masked by `{kind}`", n) for kind, n in sorted(masked.items(), key=lambda item: -item[1])),
                ("requests sent again by clients", history["client_retries"]),
                ("calls answered again under their id, executed once", report["calls_answered_again_under_their_id"]),
                ("rows of metrics that a full disk took, as the run said", len(history["metrics_rows_lost"])),
                ("**lost**", f"**{report['lost']}**"),
                ("**wrongly rewarded**", f"**{report['wrongly_rewarded']}**"),
                ("otherwise wrong", report["otherwise_wrong"]),
                ("weights against an undisturbed training on the same trajectories", report["replay"]),
                ("training processes alive after the end", len(report["processes_left"])),
                ("sessions on servers after their lifetime", report["sessions_left"]),
            ),
        ),
    ]
    for name in ("lost", "wrongly_rewarded", "other"):
        if history[name]:
            parts.append("\n".join([f"{name}:", *(f"* {what}" for what in history[name][:_SHOWN])]))
    return "\n\n".join(parts) + "\n"


def how_ended(ending: Ending) -> str:
    """In words, with the error's first one where the run said one."""
    match ending.status:
        case -9:
            return "killed (SIGKILL)"
        case 143:
            has_saved = ending.last_line.startswith("terminated after step")
            return "ended by SIGTERM, saved" if has_saved else "ended by SIGTERM before it had trained"
        case 2:
            return f"refused to start: {_reason(ending)}"
        case _:
            return f"stopped with status {ending.status}: {_reason(ending)}"


def trained_again(endings: Sequence[Ending]) -> int:
    """Steps that were trained in one start, and once more in a later one that went on from an earlier checkpoint."""
    trained = [step for ending in endings for step in ending.steps]
    return len(trained) - len(set(trained))


_REASONS = {
    "No space left": "disk full",
    "File too large": "disk full",
    "no files can be written": "disk full",
    "failed twice": "too many trajectories failed",
    "the engine broke": "the engine broke",
    "raised by the fault run": "the engine broke",
    "died": "a worker died",
    "dead": "a worker died",
    "no environment server answers": "a server did not answer",
    "the connection broke": "a server did not answer",
    "no answer": "a server did not answer",
    "refused": "a server did not answer",
}


def _reason(ending: Ending) -> str:
    for sign, reason in _REASONS.items():
        if sign in ending.last_line:
            return reason
    return ending.last_line[:120]


def _table(head: tuple[str, str], rows: Iterable[tuple[str, Any]]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---:|"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in rows)])
