"""What the doctor says of a machine."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.environments import Script
from support.machines import say_that_the_machine_is_sound
from support.parity import TASK, parity_spec
from support.servers import serve

from agentgym_rl.cli import main
from agentgym_rl.doctor import machine
from agentgym_rl.doctor.findings import Finding, Verdict, failed, passed, table
from agentgym_rl.envs.registry import get_spec, register
from agentgym_rl.envs.sciworld import simulator
from agentgym_rl.envs.server import build_app
from agentgym_rl.errors import ConfigError


@pytest.fixture(autouse=True)
def torch_says(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Torch is looked at in a process of its own; tests say what comes of it. By default a sound one for a CPU."""

    def say(content: dict[str, Any] | None = None, *, error: str = "") -> None:
        printed = json.dumps({"version": "2.13.0", "built_for": None, "devices": []} | (content or {}))
        outcome = subprocess.CompletedProcess([], int(bool(error)), stdout=printed, stderr=error)
        monkeypatch.setattr(machine.subprocess, "run", lambda *arguments, **options: outcome)

    say()
    return say


def examine(*, trains: bool = False, tasks: tuple[str, ...] = (), folder: Path = Path()) -> dict[str, Finding]:
    return {finding.name: finding for finding in machine.examine_machine(trains=trains, tasks=tasks, folder=folder)}


def test_every_part_is_looked_at_and_what_lacks_has_a_remedy() -> None:
    findings = examine()
    assert list(findings) == [
        *("python", "agentgym-rl", "torch", "cuda", "transformers", "ray", "vllm", "flash-attn", "java", "chromium"),
        *("ports", "disk"),
    ]
    assert all(finding.seen for finding in findings.values())
    assert all(finding.remedy for finding in findings.values() if finding.verdict != Verdict.PASSED)


def test_what_is_not_installed_is_a_failure_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_version_of", lambda distribution: None)
    for trains, verdict in ((False, Verdict.NOT_APPLICABLE), (True, Verdict.FAILED)):
        findings = examine(trains=trains)
        for name in ("torch", "transformers", "ray"):
            assert findings[name].verdict == verdict and "bash scripts/setup.sh train" in findings[name].remedy
        assert findings["vllm"].verdict == findings["flash-attn"].verdict == Verdict.NOT_APPLICABLE


def test_torch_that_does_not_import_and_one_that_does_not_fit_the_driver_are_failures(
    torch_says: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_says(error="Traceback ...\nImportError: libcudart.so.12: cannot open shared object file")
    assert "does not import: ImportError: libcudart.so.12" in examine()["torch"].seen
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
    torch_says()
    assert examine()["cuda"].verdict == Verdict.FAILED and "built for CPUs, sees no GPU" in examine()["cuda"].seen
    torch_says({"built_for": "12.8", "devices": ["NVIDIA H200"] * 8})
    assert examine()["cuda"] == passed("cuda", "12.8: 8 x NVIDIA H200")


def test_simulators_are_needed_by_their_own_environments_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_java() -> str:
        raise ConfigError("JAVA_HOME=/nowhere has no bin/java")

    monkeypatch.setattr(simulator, "java_command", no_java)
    assert examine()["java"].verdict == Verdict.NOT_APPLICABLE
    java = examine(tasks=("sciworld",))["java"]
    assert java.verdict == Verdict.FAILED and "JAVA_HOME=/nowhere" in java.seen and "scripts/java.sh" in java.remedy


def test_a_port_that_something_else_has_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setattr(machine, "known_tasks", lambda: ["textcraft"])
        monkeypatch.setattr(machine, "_serves", lambda port, task: False)
        object.__setattr__(spec := get_spec("textcraft"), "default_port", port)
        try:
            ports = examine()["ports"]
        finally:
            object.__setattr__(spec, "default_port", 36001)
    assert f"0 free; taken by others: {port} (textcraft)" in ports.seen and "--port" in ports.remedy


@pytest.mark.parametrize(
    ("free_gib", "verdict", "said"), [(4.99, Verdict.FAILED, "4 GiB free"), (5, Verdict.PASSED, "5 GiB free")]
)
def test_a_full_disk_is_a_failure_and_what_is_free_is_not_rounded_up(
    free_gib: float, verdict: Verdict, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage = machine.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage._replace(free=int(free_gib * 2**30)))
    disk = examine(folder=tmp_path / "not" / "yet")["disk"]
    assert disk.verdict == verdict and f"{said} in {tmp_path}" in disk.seen


@pytest.mark.server
def test_servers_that_answer_tell_their_versions_and_others_what_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    say_that_the_machine_is_sound(monkeypatch)
    spec = parity_spec(Script(turns=1))
    register(spec)
    with serve(build_app(spec)) as url:
        [finding] = machine.examine_servers({TASK: (url,)})
        assert finding.verdict == Verdict.PASSED and f"{url}: agentgym-rl " in finding.seen
        [finding] = machine.examine_servers({"textcraft": (url,)})
        assert finding.verdict == Verdict.FAILED and "serves 'parity'" in finding.seen
        assert main(["doctor", "--task", TASK, "--env-addr", url]) == 0
    assert "server parity" in capsys.readouterr().out
    assert main(["doctor", "--task", TASK, "--env-addr", url]) == 1
    printed = capsys.readouterr().out
    assert f"no parity server at {url}" in " ".join(printed.split()) and "1 failed" in printed


def test_a_model_without_a_server_to_play_on_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", "m"]) == 1
    assert "doctor --model needs --task and --env-addr" in capsys.readouterr().err
    assert main(["doctor", "--env-addr", "http://127.0.0.1:1"]) == 1
    assert "doctor --env-addr needs --task" in capsys.readouterr().err


def test_the_table_puts_each_remedy_below_its_finding() -> None:
    lines = table([passed("python", "3.12"), failed("disk", "3 GiB free", "make room")]).splitlines()
    assert lines == [
        "python  passed  3.12",
        "disk    failed  3 GiB free",
        "                -> make room",
        "1 passed, 1 failed, 0 not applicable",
    ]
