"""What the doctor is told of the machine, where a test is about something else."""

from __future__ import annotations

from typing import Any

import pytest

from agentgym_rl.doctor import machine
from agentgym_rl.doctor.findings import Finding, passed


def say_that_the_machine_is_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the disk, the ports or the GPU of the machine that the tests run on: its rows pass."""

    def sound(**options: Any) -> list[Finding]:
        return [passed("machine", "as the test says")]

    monkeypatch.setattr(machine, "examine_machine", sound)
