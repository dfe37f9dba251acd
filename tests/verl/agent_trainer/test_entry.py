"""How a run ends: exit status and what the user sees."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from agentgym_rl.errors import ConfigError, TooManyFailures
from verl.agent_trainer.entry import run
from verl.config import SFTConfig
from verl.single_controller.base import WorkerError

ARGUMENTS = ("data.train_file=x", "model.path=x")


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Entry points take over SIGTERM and the thread variables of their process."""
    handler = signal.getsignal(signal.SIGTERM)
    environment = dict(os.environ)
    yield
    signal.signal(signal.SIGTERM, handler)
    os.environ.clear()
    os.environ.update(environment)


def start(work: Callable[[SFTConfig], None], *arguments: str) -> int:
    return run([*ARGUMENTS, *arguments], work, SFTConfig, program="test", config_name="sft_trainer")


def raising(error: BaseException) -> Callable[[SFTConfig], None]:
    def work(config: SFTConfig) -> None:
        raise error

    return work


def test_a_run_that_succeeds_gets_its_config_and_ends_with_0() -> None:
    seen: list[SFTConfig] = []
    assert start(seen.append, "data.seed=4") == 0
    assert seen[0].data.seed == 4
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_show_config_prints_it_and_does_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert start(raising(AssertionError()), "--show-config") == 0
    assert "train_file: x" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ConfigError("key=1: must be\n2"), 2, "error: key=1: must be 2\n"),
        (TooManyFailures("9 of 9 failed"), 1, "error: 9 of 9 failed\n"),
        (WorkerError(1, 2, ConfigError("too long"), "Traceback ..."), 2, "error: too long\n"),
        (
            WorkerError(1, 2, ZeroDivisionError("oh"), "Traceback of the worker\n"),
            1,
            "Traceback of the worker\nerror: worker 1 of 2 failed: ZeroDivisionError: oh\n",
        ),
        (WorkerError(0, 2, None, "killed"), 1, "killed\nerror: worker 0 of 2 failed: its process died\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_errors_are_one_line_and_a_workers_own_traceback_comes_first(
    error: BaseException, status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(raising(error)) == status
    assert capsys.readouterr().err == text


def test_an_error_of_our_own_code_keeps_its_traceback() -> None:
    with pytest.raises(IndexError):
        start(raising(IndexError("a bug")))


def test_sigterm_unwinds_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    ended: list[str] = []

    def work(config: SFTConfig) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(60)
        finally:
            ended.append("cleaned up")

    assert start(work) == 128 + signal.SIGTERM and ended == ["cleaned up"]
    assert capsys.readouterr().err == "terminated\n"
