"""The built-in questions and their index, made once for the tests of a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentgym_rl.envs.registry import EnvSpec
from agentgym_rl.envs.searchqa import SearchQASettings, configured


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("searchqa")


@pytest.fixture(scope="session")
def settings(cache: Path) -> SearchQASettings:
    return SearchQASettings(cache=cache)


@pytest.fixture(scope="session")
def spec(settings: SearchQASettings) -> EnvSpec:
    return configured(settings)
