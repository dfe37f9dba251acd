"""What a machine without a fitting Java is told, before anything is served."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentgym_rl.envs.sciworld.simulator import java_command
from agentgym_rl.errors import ConfigError


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    java_command.cache_clear()
    yield
    java_command.cache_clear()


def put_java(folder: Path, script: str) -> None:
    (folder / "bin").mkdir()
    (folder / "bin" / "java").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bin" / "java").chmod(0o755)


def test_without_java_the_server_does_not_start_and_names_the_command(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"} | {"PATH": str(tmp_path)}
    command = [sys.executable, "-m", "agentgym_rl.cli", "serve", "sciworld", "--port", "0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "SciWorld needs Java 8 or later, and there is no `java` on the PATH" in done.stderr
    assert "apt-get install default-jre-headless" in done.stderr


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("exit 1", "does not run: .* status 1"),
        ("""echo 'java version "1.7.0_80"' >&2""", "is Java 7; install one"),
    ],
)
def test_a_java_that_does_not_serve_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, problem: str
):
    put_java(tmp_path, script)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=f"{tmp_path}/bin/java {problem}"):
        java_command()


def test_the_java_of_java_home_comes_before_that_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_java(tmp_path, """echo 'openjdk version "21.0.1" 2023-10-17' >&2""")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert java_command() == str(tmp_path / "bin" / "java")


def test_a_java_home_without_java_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=f"JAVA_HOME={tmp_path} has no bin/java"):
        java_command()
