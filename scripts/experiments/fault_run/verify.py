"""The proof: what training wrote, held against what the servers did and what the rules of the tasks say.

Three sources are compared: the trajectory files, the ledger that was kept between servers and training, and the
environments' rules, played once more in this process. The framework's own counters are checked, never believed.
"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentgym_rl.envs.registry import get_spec
from fault_run.ledger import Episode, Executed, LedgerContents
from fault_run.plan import RunPlan
from fault_run.prepare import TASKS

_FAULTS = ("env_error", "engine_error", "deadline")
_NO_ACTION = "No action found."
"""How a client begins its own answer to a turn that asks for nothing: the server is not called then."""
_SUCCESS_FROM = {"textcraft": 1.0, "babyai": 0.1}
_TOLERANCE = 1e-6
_HORIZONS, _STEPS_PER_HORIZON = (3, 5), 20
"""As the training command has them."""

Asked = tuple[str, int]
"""An item and the number of a sample of it."""


@dataclass
class Findings:
    """What was counted, and what was found wrong."""

    steps: int
    trajectories: int = 0
    sound: int = 0
    """Neither masked nor lost."""
    rewarded: int = 0
    """Sound ones of a score above 0."""
    masked: Counter[str] = field(default_factory=Counter)
    """By error type."""
    second_attempts: int = 0
    """Sound ones that a fault had struck once."""
    turns: int = 0
    client_retries: int = 0
    """Requests that clients sent again, as the metrics of the final history tell."""
    metrics_rows_lost: list[int] = field(default_factory=list)
    """Steps that were trained and whose metrics a full disk took, as the run itself said."""
    lost: list[str] = field(default_factory=list)
    """Asked for and not there, there twice, or there without having been asked for."""
    wrongly_rewarded: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    """Whatever else is not as it must be."""

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.wrongly_rewarded or self.other)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"masked": dict(self.masked)}


def verify(
    run: Path, plan: RunPlan, items: Mapping[str, Sequence[str]], ledger: LedgerContents, *, steps: int
) -> Findings:
    """Everything about the final history of a run of ``steps`` steps in the folder ``run``.

    ``items``: ids of each task's items, in the order of its file.
    """
    findings = Findings(steps)
    judge = Judge(ledger.episodes)
    findings.other += [f"executed twice: {what}" for what in ledger.contradictions]
    metrics = _metrics(run, findings)
    for step in range(1, steps + 1):
        rows = _rows_of(run / "trajectories" / f"step{step}", findings)
        _check_asked(step, rows, asked_for(step, plan, items), findings)
        for row in rows:
            _count(row, findings)
            _check_row(step, row, judge, findings)
        _check_record(run / "trajectories" / f"step{step}", step, rows, findings)
        if step in metrics:
            _check_metrics(step, rows, metrics[step], findings)
    _check_no_later(run, steps, findings)
    return findings


def asked_for(step: int, plan: RunPlan, items: Mapping[str, Sequence[str]]) -> list[Asked]:
    """What a step asks for: the tasks take turns, each goes through its file again and again."""
    share = plan.items_per_step // len(TASKS)
    wanted = [items[task][((step - 1) * share + place) % len(items[task])] for place in range(share) for task in TASKS]
    return [(item, sample) for item in wanted for sample in range(plan.samples)]


# ------------------------------------------------------------------------------------------------------------- one row


class Judge:
    """Says what a trajectory was truly worth: by what a server did, which the rules must bear out.

    Each episode on a server may stand behind one trajectory only.
    """

    def __init__(self, episodes: Iterable[Episode]) -> None:
        self._unused: dict[tuple[str, int, str], list[Episode]] = defaultdict(list)
        for episode in episodes:
            self._unused[episode.task, episode.index, episode.opening].append(episode)

    def objections(self, row: Mapping[str, Any]) -> Iterator[str]:
        """What is wrong with the reward of a sound trajectory; nothing where all is as it was."""
        episode = self._take(row)
        if episode is None:
            yield "no server played what it tells"
            return
        steps = tuple(episode.steps)
        if (replayed := replay(episode.task, episode.index, episode.opening, steps)) != "":
            yield f"the rules contradict the server: {replayed}"
        yield from _reward_objections(row, [step.reward for step in steps], _matched(row["turns"], steps) or [])
        yield from _ending_objections(row, steps)

    def _take(self, row: Mapping[str, Any]) -> Episode | None:
        """An episode that went as the trajectory says, action by action and answer by answer."""
        task, _, index = row["item_id"].rpartition("_")
        opening = row["conversations"][2]["value"]
        candidates = self._unused[task, int(index), opening]
        for place, episode in enumerate(candidates):
            if _matched(row["turns"], episode.steps) is not None:
                return candidates.pop(place)
        return None


def _matched(turns: Sequence[Mapping[str, Any]], steps: Sequence[Executed]) -> list[int] | None:
    """For each step the turn that it answers; None where turns and steps do not tell the same story."""
    places: list[int] = []
    for place, turn in enumerate(turns):
        if len(places) < len(steps) and _is_same(turn, steps[len(places)]):
            places.append(place)
        elif not turn["observation"].startswith(_NO_ACTION) or turn["reward"] != 0 or turn["done"]:
            return None
    return places if len(places) == len(steps) else None


def _is_same(turn: Mapping[str, Any], step: Executed) -> bool:
    said, asked = (" ".join(text.split()) for text in (turn["text"], step.action))
    return turn["observation"] == step.observation and turn["done"] == step.done and asked in said


@functools.cache
def replay(task: str, index: int, opening: str, steps: tuple[Executed, ...]) -> str:
    """Where a fresh environment of this process does otherwise than the server did; empty where it does the same."""
    environment = get_spec(task).environment()
    try:
        if environment.reset(index).observation != opening:
            return "another first observation"
        for number, step in enumerate(steps, 1):
            made = environment.step(step.action)
            if (made.observation, made.done) != (step.observation, step.done) or not _equal(made.reward, step.reward):
                return f"step {number}, {step.action!r}: reward {made.reward}, done {made.done}"
    finally:
        environment.close()
    return ""


def _reward_objections(row: Mapping[str, Any], rewards: Sequence[float], places: Sequence[int]) -> Iterator[str]:
    """``places``: the turn of each reward."""
    truth = sum(rewards)
    for name in ("score", "reward"):
        if row[name] is None or not _equal(row[name], truth):
            yield f"{name} is {row[name]}, and was {truth}"
    if row["success"] != (truth >= _SUCCESS_FROM[row["task"]] - _TOLERANCE):
        yield f"success is {row['success']} at a score of {truth}"
    by_turn = [0.0] * len(row["turns"])
    for place, reward in zip(places, rewards, strict=False):
        by_turn[place] = reward
    if not all(map(_equal, (turn["reward"] for turn in row["turns"]), by_turn)):
        yield f"turns are rewarded {[turn['reward'] for turn in row['turns']]}, and earned {by_turn}"
    expected = {position: reward for position, reward in zip(_last_sampled(row), by_turn, strict=True) if reward}
    found = dict(row["token_rewards"])
    if expected.keys() != found.keys() or not all(_equal(found[position], expected[position]) for position in found):
        yield f"tokens are rewarded {found}, and earned {expected}"


def _last_sampled(row: Mapping[str, Any]) -> list[int]:
    """Of each turn, the position of its last sampled token."""
    last: dict[int, int] = {}
    for position, (message, sampled) in enumerate(zip(row["sequence_ids"], row["loss_mask"], strict=True)):
        if sampled:
            last[message] = position
    return [last[message] for message in sorted(last)]


def _ending_objections(row: Mapping[str, Any], steps: Sequence[Executed]) -> Iterator[str]:
    is_done, reason = bool(steps) and steps[-1].done, row["stop_reason"]
    if (reason == "done") != is_done:
        yield f"it ended by {reason}, and the environment said done={is_done}"
    if reason == "max_rounds" and len(row["turns"]) != row["max_rounds"]:
        yield f"it ended by max_rounds after {len(row['turns'])} of {row['max_rounds']} turns"


def _check_row(step: int, row: Mapping[str, Any], judge: Judge, findings: Findings) -> None:
    name = f"step {step} {row['item_id']} sample {row['sample_index']}"
    if row["stop_reason"] in _FAULTS:
        if row["score"] is not None or row["reward"] is not None:
            findings.wrongly_rewarded.append(f"{name}: a fault ({row['error']}) has the score {row['score']}")
        if not row["error"] or row["attempt"] != 2:
            findings.other.append(f"{name}: masked in attempt {row['attempt']} with the reason {row['error']!r}")
        return
    findings.wrongly_rewarded += [f"{name}: {objection}" for objection in judge.objections(row)]
    horizon = _HORIZONS[min((step - 1) // _STEPS_PER_HORIZON, len(_HORIZONS) - 1)]
    for what, found, expected in (
        ("policy_version", row["policy_version"], step - 1),
        ("max_rounds", row["max_rounds"], horizon),
        ("uid", row["uid"], f"step{step}/{row['item_id']}"),
    ):
        if found != expected:
            findings.other.append(f"{name}: {what} is {found!r}, must be {expected!r}")


def _count(row: Mapping[str, Any], findings: Findings) -> None:
    findings.trajectories += 1
    if row["stop_reason"] in _FAULTS:
        findings.masked[row["error"].partition(":")[0]] += 1
        return
    findings.sound += 1
    findings.rewarded += bool(row["score"])
    findings.second_attempts += row["attempt"] == 2
    findings.turns += len(row["turns"])


# ------------------------------------------------------------------------------------------------------------ one step


def _rows_of(folder: Path, findings: Findings) -> list[dict[str, Any]]:
    rows = []
    for file in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(file.read_bytes().split(b"\n")[:-1], 1):
            try:
                rows.append(json.loads(line))
            except ValueError:
                findings.other.append(f"{file} line {number} is no JSON")
        if not file.read_bytes().endswith(b"\n") and file.stat().st_size:
            findings.other.append(f"{file}: its last row is torn")
    return rows


def _check_asked(step: int, rows: Sequence[Mapping[str, Any]], asked: Sequence[Asked], findings: Findings) -> None:
    found, wanted = Counter((row["item_id"], row["sample_index"]) for row in rows), Counter(asked)
    for what, names in (("is missing", wanted - found), ("was not asked for, or is there twice", found - wanted)):
        findings.lost += [f"step {step}: {item} sample {sample} {what}" for item, sample in names]


def _check_record(folder: Path, step: int, rows: Sequence[Mapping[str, Any]], findings: Findings) -> None:
    """``step.json`` names just what is there."""
    path = folder / "step.json"
    if not path.is_file():
        findings.lost.append(f"step {step}: no {path.name}, so the step was not finished")
        return
    named = Counter((uid, sample) for uid, sample, _ in json.loads(path.read_text())["samples"])
    if named != Counter((row["uid"], row["sample_index"]) for row in rows):
        findings.other.append(f"step {step}: {path.name} names other trajectories than are there")


def _check_metrics(
    step: int, rows: Sequence[Mapping[str, Any]], metrics: Mapping[str, Any], findings: Findings
) -> None:
    """The metrics tell of the sound trajectories alone, and count the others."""
    sound = [row for row in rows if row["stop_reason"] not in _FAULTS]
    expected = {
        "rollout/trajectories": len(rows),
        "rollout/masked": len(rows) - len(sound),
        "training/sampled_tokens": sum(sum(row["loss_mask"]) for row in sound),
    }
    if sound:
        expected["rollout/score_mean"] = sum(row["score"] for row in sound) / len(sound)
    for name, value in expected.items():
        if not _equal(metrics[name], value):
            findings.other.append(f"step {step}: {name} is {metrics[name]}, must be {value}")
    findings.client_retries += int(metrics["rollout/client_retries"])


# ------------------------------------------------------------------------------------------------------- the whole run


def _metrics(run: Path, findings: Findings) -> dict[int, dict[str, Any]]:
    """Rows by step. Each step must be there once, in order; see `explain_lost_metrics` for those that are not."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows]
    if steps != sorted(set(steps)):
        findings.other.append(f"metrics.jsonl has steps twice or out of order: {steps}")
    findings.metrics_rows_lost = sorted(set(range(1, findings.steps + 1)) - set(steps))
    return {row["step"]: row for row in rows}


def explain_lost_metrics(findings: Findings, logs: Iterable[str]) -> None:
    """Metrics that a full disk took are no fault of the run if it said so; ``logs`` is what its starts said."""
    said = "\n".join(logs)
    for step in findings.metrics_rows_lost:
        if f"lost the metrics of step {step}:" not in said:
            findings.other.append(f"step {step} has no metrics, and nobody said so")


def _check_no_later(run: Path, steps: int, findings: Findings) -> None:
    """Nothing is taken for whole beyond the last step that was saved."""
    numbers = [int(path.parent.name.removeprefix("step")) for path in run.glob("trajectories/step*/step.json")]
    later = sorted(number for number in numbers if number > steps)
    if later:
        findings.other.append(f"steps {later} are there beyond the last one that was saved, {steps}")


def _equal(found: float, expected: float) -> bool:
    return math.isclose(found, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
