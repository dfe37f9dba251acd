"""``agentgym-rl check``: each kind of fault is found by the check that is about it, with its first difference."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from support.dialect_b import QUIZ_SPEC, Quiz

from agentgym_rl.cli import main
from agentgym_rl.envs import registry
from agentgym_rl.envs.base import InvalidCall, ResetResult, StepResult
from agentgym_rl.envs.checking import Verdict, check_environment, sample_items, score_of, spread_items
from agentgym_rl.envs.registry import EnvSpec
from agentgym_rl.errors import ConfigError

pytestmark = pytest.mark.server

CALLS = itertools.count()


class Drifting(Quiz):
    """Says something else each time."""

    def reset(self, data_idx: int) -> ResetResult:
        super().reset(data_idx)
        self._seen += f" ({next(CALLS)})"
        return ResetResult(self._seen)


class Sticky(Quiz):
    """Remembers tries over a reset."""

    _steps = 0

    def step(self, action: str) -> Any:
        result = super().step(action)
        self._steps += 1
        self._seen = f"{self._seen} {self._steps}"
        return replace(result, observation=self._seen)


class Generous(Quiz):
    """Pays again after the end."""

    def step(self, action: str) -> Any:
        self._done = False
        return super().step(action)


class Rich(Quiz):
    """Pays more than the maximal score."""

    def step(self, action: str) -> Any:
        return replace(super().step(action), reward=2)


class Fragile(Quiz):
    """Breaks at what is no action."""

    def step(self, action: str) -> Any:
        if action.strip() == "":
            raise IndexError("list index out of range")
        return super().step(action)


class Gullible(Quiz):
    """Rewards a text that claims to have won."""

    def step(self, action: str) -> Any:
        return super().step(str(self._item) if "I win" in action else action)


class Tuples(Quiz):
    def step(self, action: str) -> Any:
        return super().step(action).observation, 0.0, False


class Numbered(Quiz):
    """Says with a number whether it is done."""

    def step(self, action: str) -> Any:
        result = super().step(action)
        return replace(result, done=int(result.done))


class Silent(Quiz):
    def step(self, action: str) -> Any:
        return replace(super().step(action), observation=None)


class Quitting(Quiz):
    """Ends the whole process."""

    def step(self, action: str) -> Any:
        if action.strip() == "":
            sys.exit("no action")
        return super().step(action)


class Bound(Quiz):
    """Works only where it was made, like a database's connection: a server's calls come from many threads."""

    def __init__(self) -> None:
        self._made_by = threading.get_ident()

    def step(self, action: str) -> Any:
        if threading.get_ident() != self._made_by:
            raise RuntimeError("made in another thread")
        return super().step(action)

    def reset(self, data_idx: int) -> ResetResult:
        if threading.current_thread().name.startswith("env-"):
            self._made_by = 0
        return super().reset(data_idx)


class Forgetful(Quiz):
    """Observes something else than it answered."""

    def observation(self) -> str:
        return "nothing"


class Shared(Quiz):
    """Keeps its state where all sessions find it."""

    _steps = 0

    def reset(self, data_idx: int) -> ResetResult:
        Shared._steps = 0
        return super().reset(data_idx)

    def step(self, action: str) -> Any:
        Shared._steps += 1
        result = super().step(action)
        self._seen = f"{self._seen} {Shared._steps}"
        return replace(result, observation=self._seen)


class Leaking(Quiz):
    """Never closes its file."""

    files: list[Any] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.files.append(open(__file__))  # noqa: SIM115 - the leak


def spec_of(environment: Callable[[], Any], **changes: Any) -> EnvSpec:
    return replace(QUIZ_SPEC, environment=environment, runs_inline=False, **changes)


def failures(spec: EnvSpec) -> dict[str, str]:
    results = check_environment(spec, [0, 7, 42], steps=6)
    return {result.name: result.detail for result in results if result.verdict == Verdict.FAILED}


@pytest.mark.parametrize(
    ("environment", "check", "difference"),
    [
        (Drifting, "determinism by index", "item 42: reset: observation from character 11"),
        (Sticky, "reset in the middle and after the end", "instead of"),
        (Generous, "a step after the end is refused", "done with reward 1, and another step was executed"),
        (Rich, "rewards", "item 0: score 2 is above max_score=1"),
        (Fragile, "bad actions", "IndexError: list index out of range"),
        (Gullible, "bad actions", "is rewarded with 1"),
        (Tuples, "types of answers", "Tuples.step must return a StepResult(observation, reward, done), not ("),
        (Numbered, "types of answers", "Numbered.step must return a Python bool as done, not 0"),
        (Silent, "types of answers", "Silent.step must return a str observation, not None"),
        (Quitting, "bad actions", "SystemExit: no action (test_checking.py, line "),
        (Bound, "the client plays over HTTP", "RuntimeError: made in another thread (test_checking.py, line "),
        (Forgetful, "types of answers", "observation() from character 0: 'nothing' instead of"),
        (Shared, "concurrency", "beside other sessions"),
        (Leaking, "leaks", " open files"),
    ],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_each_kind_of_fault_is_found_with_its_first_difference(environment: Any, check: str, difference: str) -> None:
    found = failures(spec_of(environment))
    Leaking.files.clear()
    assert check in found, found
    assert difference in found[check]


def test_an_expert_that_does_not_reach_the_goal_is_found() -> None:
    found = failures(spec_of(Quiz, expert=lambda environment: ["?"]))
    assert found["rewards"].startswith("item 0: the expert scores 0 with 1 actions, success is 1; 3 of 3 items")


class Stingy(Quiz):
    """Pays half for some items."""

    def step(self, action: str) -> Any:
        result = super().step(action)
        return replace(result, reward=result.reward / 2) if self._item in (31, 64) else result


def rewards_of(spec: EnvSpec, **options: Any) -> Any:
    results = check_environment(spec, [0, 7, 42], steps=6, **options)
    return next(result for result in results if result.name == "rewards")


def test_rewards_that_are_wrong_for_some_items_alone_are_found_by_the_experts_play_of_many() -> None:
    found = rewards_of(spec_of(Stingy), expert_items=spread_items(100), expert_s=60)
    assert found.verdict == Verdict.FAILED
    assert "the expert scores 0.5 with 1 actions, success is 1; 2 of 100 items are unsolved, 31, 64;" in found.detail
    assert found.detail.startswith(("item 31: ", "item 64: "))
    assert rewards_of(spec_of(Stingy)).detail == "the expert solves 3 of 3 items, scores 1..1"


def test_the_share_of_items_that_the_expert_solves_may_be_said() -> None:
    many: dict[str, Any] = {"expert_items": spread_items(100), "expert_s": 60}
    assert rewards_of(spec_of(Stingy, expert_success=0.98), **many).detail == (
        "the expert solves 98 of 100 items, scores 0.5..1"
    )
    refused = rewards_of(spec_of(Stingy, expert_success=0.99), **many)
    assert refused.detail.endswith("a share of 0.99 must be solved (EnvSpec.expert_success)")
    with pytest.raises(ConfigError, match=r"'quiz': expert_success=1.5, must be in 0..1"):
        spec_of(Quiz, expert_success=1.5)


def test_further_items_are_played_only_while_there_is_time() -> None:
    assert rewards_of(spec_of(Stingy), expert_items=[31, 64], expert_s=0).verdict == Verdict.PASSED


def test_the_command_has_the_expert_play_many_items_unless_some_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "_registered", {"quiz": spec_of(Stingy)})
    assert main(["check", "quiz"]) == 1
    assert "2 of 100 items are unsolved, 31, 64" in capsys.readouterr().out
    assert main(["check", "quiz", "--expert-success", "0.95"]) == 0
    assert main(["check", "quiz", "--items", "3", "5"]) == 0


def test_a_sound_environment_passes_and_what_does_not_apply_is_skipped() -> None:
    class Endless(Quiz):
        def available_actions(self) -> list[str]:
            return []

    results = list(check_environment(spec_of(Endless, expert=None), [0, 1], steps=3))
    assert {result.verdict for result in results} == {Verdict.PASSED, Verdict.SKIPPED}
    skipped = next(result for result in results if result.verdict == Verdict.SKIPPED)
    assert skipped.detail == "no episode ended within 3 random actions, and there is no expert"


def test_items_are_spread_over_all() -> None:
    assert sample_items(544) == [0, 136, 272, 407, 543]
    assert (sample_items(1), sample_items(2), sample_items(3, 3)) == ([0], [0, 1], [0, 1, 2])
    assert sorted(spread_items(3)) == [0, 1, 2]
    drawn = spread_items(1000, 50)
    assert drawn == spread_items(1000, 50)
    assert sorted(item // 20 for item in drawn) == list(range(50))
    assert len({item % 20 for item in drawn}) > 10


def test_the_command_prints_a_table_and_its_status_tells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "_registered", {"quiz": QUIZ_SPEC})
    assert main(["check", "quiz", "--items", "3", "5", "--steps", "4"]) == 0
    passed = capsys.readouterr().out.splitlines()
    assert passed[2].split() == ["passed", "determinism", "by", "index", "2", "items,", *passed[2].split()[6:]]
    assert passed[-1] == "Quiz: all checks passed"
    monkeypatch.setattr(registry, "_registered", {"quiz": spec_of(Rich)})
    assert main(["check", "quiz"]) == 1
    failed = capsys.readouterr().out.splitlines()
    assert any(line.startswith("failed   rewards") and "above max_score=1" in line for line in failed)
    assert failed[-1].endswith("checks failed")


def test_a_refused_step_before_the_end_is_reported_where_it_arises() -> None:
    class Refusing(Quiz):
        def step(self, action: str) -> StepResult:
            raise InvalidCall("not today")

    assert "InvalidCall: not today" in failures(spec_of(Refusing))["types of answers"]


class Unfinished(Quiz):
    """As a first draft often is."""

    def step(self, action: str) -> Any:
        return self._rules.apply(action)


def test_one_cause_is_told_once_with_its_line_and_the_server_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "_registered", {"quiz": spec_of(Unfinished)})
    assert main(["check", "quiz", "--items", "3", "5"]) == 1
    printed = capfd.readouterr()
    assert printed.out.count("AttributeError: 'Unfinished' object has no attribute '_rules'") == 1
    assert "(test_checking.py, line " in printed.out and ", in step)" in printed.out
    assert printed.out.count("as 'types of answers'") == 6
    assert "Traceback" not in printed.out + printed.err


def test_other_checks_tell_their_own_causes() -> None:
    class Twice(Fragile):
        def reset(self, data_idx: int) -> ResetResult:
            if data_idx == -1:
                raise KeyError(data_idx)
            return super().reset(data_idx)

    found = failures(spec_of(Twice))
    assert found.keys() == {"bad actions", "indices outside the data"}
    assert found["indices outside the data"].startswith("KeyError: -1 (")


def test_a_call_that_never_answers_fails_its_check_and_ends_the_iteration() -> None:
    released = threading.Event()

    class Hanging(Quiz):
        def step(self, action: str) -> Any:
            released.wait()
            return super().step(action)

    results = list(check_environment(spec_of(Hanging), [0], call_timeout_s=0.2))
    released.set()
    assert [(result.name, result.verdict) for result in results] == [("types of answers", Verdict.FAILED)]
    assert results[0].detail.startswith("no answer to step(")
    assert "within 0.2 s" in results[0].detail


def test_slow_calls_are_a_fault_only_where_every_session_would_wait_for_them() -> None:
    class Slow(Quiz):
        def step(self, action: str) -> Any:
            time.sleep(0.03)
            return super().step(action)

    for runs_inline in (True, False):
        spec = replace(spec_of(Slow), runs_inline=runs_inline)
        speed = next(result for result in check_environment(spec, [0], steps=1) if result.name == "speed")
        assert (speed.verdict == Verdict.FAILED) is runs_inline
        assert ("leave runs_inline out of the EnvSpec" in speed.detail) is runs_inline


@dataclass(frozen=True, slots=True)
class CountedStep(StepResult):
    score: int


def test_the_score_that_steps_tell_is_that_of_the_episode() -> None:
    """An episode may begin above 0, so that its rewards do not add up to it."""
    assert score_of(QUIZ_SPEC, [CountedStep("seen", 0, False, score=20), CountedStep("seen", 5, True, score=25)]) == 25
    assert score_of(QUIZ_SPEC, [StepResult("seen", 0.5, False), StepResult("seen", 0.25, True)]) == 0.75
    assert score_of(QUIZ_SPEC, []) == 0
