"""What is wrong with a run's inputs is found within seconds, in one line, before any model loads."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from support.environments import scripted_spec
from support.faults import http_answer, raw_server
from support.servers import serve

from agentgym_rl.envs.server import build_app
from agentgym_rl.errors import ConfigError
from verl.agent_trainer import checks
from verl.agent_trainer.checks import check_environment, check_model_path, report_beyond_context
from verl.config import AgentGymConfig, DataConfig, ModelConfig, RolloutConfig

pytestmark = pytest.mark.server


# -------------------------------------------------------------------------------------------------------------- servers


def test_no_server_is_one_line_with_its_url_and_the_command_that_starts_it() -> None:
    with serve(build_app(scripted_spec())) as there, serve(build_app(scripted_spec())) as gone:
        pass
    with serve(build_app(scripted_spec()), port=int(there.rsplit(":", 1)[1])):
        check_environment(AgentGymConfig("scripted", [there]))
        with pytest.raises(ConfigError) as caught:
            check_environment(AgentGymConfig("scripted", [there, gone], max_retries=0))
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"no scripted server at {gone}: ")
    assert f"agentgym-rl serve scripted --host 127.0.0.1 --port {gone.rsplit(':', 1)[1]}" in message


def test_a_server_that_is_about_to_come_up_is_waited_for() -> None:
    with serve(build_app(scripted_spec())) as url:
        pass
    failures: list[Exception] = []

    def check() -> None:
        try:
            check_environment(AgentGymConfig("scripted", url, max_retries=300))
        except ConfigError as error:
            failures.append(error)

    waiting = threading.Thread(target=check)
    waiting.start()
    with serve(build_app(scripted_spec()), port=int(url.rsplit(":", 1)[1])):
        waiting.join(60)
    assert not waiting.is_alive()
    assert failures == []


# ------------------------------------------------------------------------------------------------------------ the model


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Sets the hub's address; its cache is empty, and nothing of the user's settings holds."""

    def at(url: str, *, offline: bool = False) -> None:
        template = huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE
        template = template.replace(huggingface_hub.constants.ENDPOINT, url)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    return at


def test_a_hub_that_never_answers_is_waited_for_a_few_seconds_at_most(
    hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checks._HUB_WAIT_S < 5
    monkeypatch.setattr(checks, "_HUB_WAIT_S", 0.2)
    asked, release = threading.Event(), threading.Event()

    def hang(path: str, body: dict[str, Any], headers: dict[str, str]) -> bytes | None:
        asked.set()
        release.wait(60)
        return None

    with raw_server(hang) as url:
        hub(url)
        with pytest.raises(ConfigError) as caught:
            check_model_path(ModelConfig("owner/name"))
        release.set()
    assert str(caught.value) == (
        "model.path='owner/name': no such folder, and not found on the hub: no answer within 0.2 s; "
        "download the model, and give its folder"
    )


@pytest.mark.parametrize("offline", [True, False])
def test_what_the_hub_says_against_a_name_is_repeated_in_one_line(hub: Any, offline: bool) -> None:
    missing = http_answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
    with raw_server(lambda path, body, headers: missing) as url:
        hub(url, offline=offline)
        with pytest.raises(ConfigError) as caught:
            check_model_path(ModelConfig("owner/name"))
    message = str(caught.value)
    assert message.startswith("model.path='owner/name': no such folder, and not found on the hub: ")
    assert "\n" not in message
    assert "no answer within" not in message


def test_a_hub_that_hangs_up_is_one_line_at_once(hub: Any) -> None:
    with raw_server(lambda path, body, headers: None) as url:
        hub(url)
        with pytest.raises(ConfigError) as caught:
            check_model_path(ModelConfig("owner/name"))
    message = str(caught.value)
    assert message.startswith("model.path='owner/name': no such folder, and not found on the hub: ")
    assert "\n" not in message
    assert "no answer within" not in message


def test_a_name_that_the_hub_knows_passes(hub: Any) -> None:
    commit = "0123456789" * 4
    known = {"X_Repo_Commit": commit, "ETag": f'"{commit}"', "Connection": "close"}
    with raw_server(lambda path, body, headers: http_answer({}, **known)) as url:
        hub(url)
        check_model_path(ModelConfig("owner/name"))


@pytest.mark.parametrize("path", ["./model", "/no/such/model", "a/b/c"])
def test_what_can_only_be_a_folder_is_not_looked_up(path: str) -> None:
    with pytest.raises(ConfigError, match=r"no such folder$"):
        check_model_path(ModelConfig(path))


@pytest.mark.parametrize(
    ("model", "max_model_len", "is_beyond"),
    [
        ({"max_position_embeddings": 512}, 600, True),
        ({"max_position_embeddings": 512}, 512, False),
        ({"max_position_embeddings": 512}, 32768, True),  # 500 + 100 tokens
        ({"max_position_embeddings": 600}, 32768, False),
        ({"max_position_embeddings": 150, "rope_parameters": {"factor": 4.0}}, 32768, False),
        ({"max_position_embeddings": 149, "rope_scaling": {"factor": 4.0}}, 32768, True),
        ({}, 32768, False),
    ],
)
def test_sequences_beyond_what_the_model_reads_are_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: dict[str, Any], max_model_len: int, is_beyond: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    data = DataConfig(train_file="x", max_prompt_length=100, max_response_length=500)
    report_beyond_context(ModelConfig(str(tmp_path)), data, RolloutConfig(max_model_len=max_model_len))
    assert ("sequences may have 600 tokens" in capsys.readouterr().out) is is_beyond
