"""Tasks in WebArena's own file format: a JSON list, the place in which is the task's index."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from agentgym_rl.errors import ConfigError

ALTERNATIVES = " |OR| "
START_TABS = " |AND| "


class Check(StrEnum):
    """What is looked at when the agent stops; all that a task names must hold."""

    STRING = "string_match"
    """The answer that the agent gave."""
    URL = "url_match"
    """The address of the page where it stopped."""
    PAGE = "program_html"
    """What pages show then."""


@dataclass(frozen=True)
class PageTarget:
    """One page to look at, and what must stand there."""

    url: str
    """``last`` for the page where the agent stopped, an address with placeholders, or ``func:...``."""
    locator: str
    """JavaScript or ``func:...`` whose value is looked at; empty for the page's whole HTML."""
    prep_actions: tuple[str, ...]
    """JavaScript to run before, such as the unfolding of a section."""
    exact_match: str | None
    must_include: tuple[str, ...]


@dataclass(frozen=True)
class Evaluation:
    """How a task is judged."""

    checks: tuple[Check, ...]
    exact_match: str | None
    must_include: tuple[str, ...]
    fuzzy_match: tuple[str, ...]
    """Answers whose meaning counts."""
    unachievable: bool
    """True when the right answer is that it cannot be done; `reason` says why."""
    reason: str
    url: str
    targets: tuple[PageTarget, ...]

    @property
    def needs_judge(self) -> bool:
        """True when a language model must compare meanings."""
        return Check.STRING in self.checks and (bool(self.fuzzy_match) or self.unachievable)


@dataclass(frozen=True)
class Task:
    """One task."""

    task_id: int
    sites: tuple[str, ...]
    intent: str
    start_url: str
    """With placeholders; several tabs are joined by `START_TABS`."""
    storage_state: str | None
    """The file with the cookies of a logged-in user."""
    geolocation: Mapping[str, float] | None
    evaluation: Evaluation
    text: str
    """All that names addresses, to see which sites the task needs."""


def read_tasks(path: Path) -> tuple[Task, ...]:
    """The tasks of a file; raises `ConfigError` that names the file, the task and what is wrong."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"task_file={str(path)!r}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"task_file={str(path)!r}: not JSON: {error}") from error
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"task_file={str(path)!r}: must be a JSON list of tasks")
    return tuple(_read_task(row, f"task_file={str(path)!r}: task {number}") for number, row in enumerate(rows))


def _read_task(row: Any, where: str) -> Task:
    try:
        return Task(
            task_id=row["task_id"],
            sites=tuple(row["sites"]),
            intent=row["intent"],
            start_url=row["start_url"],
            storage_state=row.get("storage_state") or None,
            geolocation=row.get("geolocation") or None,
            evaluation=_read_evaluation(row["eval"], where),
            text=json.dumps([row["start_url"], row["eval"]]),
        )
    except KeyError as error:
        raise ConfigError(f"{where}: lacks {error}") from error
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"{where}: not in WebArena's form: {error}") from error


def _read_evaluation(row: Mapping[str, Any], where: str) -> Evaluation:
    checks = _read_checks(row["eval_types"], where)
    answers = row.get("reference_answers") or {}
    if unknown := answers.keys() - {"exact_match", "must_include", "fuzzy_match"}:
        raise ConfigError(f"{where}: reference_answers has {', '.join(sorted(unknown))}")
    fuzzy = answers.get("fuzzy_match", [])
    if Check.URL in checks and (note := row.get("url_note") or "GOLD in PRED") != "GOLD in PRED":
        raise ConfigError(f"{where}: url_note={note!r}: must be 'GOLD in PRED'")
    return Evaluation(
        checks=checks,
        exact_match=answers.get("exact_match"),
        must_include=_strings(answers.get("must_include", [])),
        fuzzy_match=() if fuzzy == "N/A" else _strings(fuzzy),
        unachievable=fuzzy == "N/A",
        reason=row.get("string_note") or "",
        url=row.get("reference_url") or "",
        targets=tuple(_read_target(target, where) for target in row.get("program_html") or []),
    )


def _read_checks(names: Sequence[str], where: str) -> tuple[Check, ...]:
    if not names:
        raise ConfigError(f"{where}: eval_types is empty")
    for name in names:
        if name not in list(Check):
            raise ConfigError(f"{where}: eval_types has {name!r}, must be of {', '.join(Check)}")
    return tuple(Check(name) for name in names)


def _read_target(row: Mapping[str, Any], where: str) -> PageTarget:
    required = row["required_contents"]
    if required.keys() - {"exact_match", "must_include"} or not required:
        raise ConfigError(f"{where}: required_contents must have exact_match or must_include, has {sorted(required)}")
    return PageTarget(
        url=row["url"],
        locator=row.get("locator", ""),
        prep_actions=_strings(row.get("prep_actions") or []),
        exact_match=required.get("exact_match"),
        must_include=_strings(required.get("must_include", [])),
    )


def _strings(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)
