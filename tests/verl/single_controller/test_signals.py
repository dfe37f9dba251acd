"""SIGTERM is heeded wherever it strikes."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import Any

import pytest

from verl.single_controller.signals import stop_on_sigterm


class Struck(io.RawIOBase):
    """A terminal at which SIGTERM comes in the middle of each write."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return len(data)


def test_a_request_in_the_middle_of_a_print_is_noted_and_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler's own print cannot be made then, and neither print may fail for it."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(Struck()), write_through=True))
    asked: list[str] = []
    previous = signal.signal(signal.SIGTERM, lambda *_: asked.append("a second time"))
    try:
        with stop_on_sigterm(lambda: asked.append("to stop"), saying="saving") as stop:
            print("step 1", flush=True)
            is_made = stop.is_made
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert is_made and asked[0] == "to stop"


def test_what_is_said_and_what_a_second_signal_does(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []
    previous = signal.signal(signal.SIGTERM, lambda *_: asked.append("a second time"))
    try:
        with stop_on_sigterm(lambda: asked.append("to stop"), saying="saving"):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
        assert asked == ["to stop", "a second time"]
        assert capsys.readouterr().out == "SIGTERM: saving; a second SIGTERM ends the run at once\n"
    finally:
        signal.signal(signal.SIGTERM, previous)
