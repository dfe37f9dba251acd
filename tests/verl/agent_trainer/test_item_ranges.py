"""Items that an environment does not have are refused before a run, by what is registered or what the server says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.environments import ScriptedClient, scripted_spec
from support.servers import serve

from agentgym_rl.data.items import ItemList
from agentgym_rl.envs import registry
from agentgym_rl.envs.registry import EnvSpec
from agentgym_rl.envs.server import build_app
from agentgym_rl.errors import ConfigError
from agentgym_rl.hosted.endpoint import HostedModel
from agentgym_rl.hosted.evaluation import HostedEvaluation, evaluate_hosted
from verl.agent_trainer import checks
from verl.agent_trainer.loading import load_config, parse_command_line
from verl.config import AgentEvolConfig, AgentGymConfig, GenerationConfig, PPOConfig, SFTConfig

TASK = "agentgym.task_name=scripted"
PPO = (f"actor_rollout_ref.{TASK}", "data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2")
RUNS: dict[str, tuple[Any, str, Any, tuple[str, ...]]] = {
    "training": (PPOConfig, "ppo_trainer", checks.check_ppo_settings, (*PPO, "data.train_file=wrong.json")),
    "validation in training": (
        *(PPOConfig, "ppo_trainer", checks.check_ppo_settings),
        (*PPO, "data.train_file=right.json", "data.val_file=wrong.json"),
    ),
    "evaluation": (
        *(GenerationConfig, "generation", checks.check_generation_settings),
        (TASK, "data.path=wrong.json", "model.path=model", "rollout.rollout_log_dir=out"),
    ),
    "validation in supervised training": (
        *(SFTConfig, "sft_trainer", checks.check_sft_settings),
        (TASK, "data.train_file=right.json", "data.val_file=wrong.json", "model.path=model", "trainer.test_freq=1"),
    ),
    "exploration in AgentEvol": (
        *(AgentEvolConfig, "agentevol", checks.check_agentevol_settings),
        (TASK, "data.train_file=wrong.json", "data.val_file=right.json", "model.path=model"),
    ),
}


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EnvSpec:
    """A registered environment of 10 items, and lists of them in the current folder, one with two ids that are not."""
    monkeypatch.chdir(tmp_path)
    spec = replace(scripted_spec(), num_items=10)
    monkeypatch.setattr(registry, "_registered", {"scripted": spec})
    (tmp_path / "right.json").write_text(json.dumps([f"scripted_{index}" for index in range(10)]))
    (tmp_path / "wrong.json").write_text(json.dumps(["scripted_9", "scripted_3", {"item_id": "scripted_10"}, 500]))
    return spec


@pytest.mark.parametrize("run", RUNS)
def test_every_run_names_file_row_and_item_and_what_is_allowed(run: str, spec: EnvSpec) -> None:
    root, name, check, overrides = RUNS[run]
    address = "actor_rollout_ref.agentgym.env_addr" if root is PPOConfig else "agentgym.env_addr"
    model = ("actor_rollout_ref.model.path=model",) if root is PPOConfig else ()
    argv = (*overrides, f"{address}=http://127.0.0.1:9", *model)
    config = load_config(root, parse_command_line(argv, program="test", config_name=name))
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert str(caught.value).split(": ", 1)[1] == (
        "wrong.json row 3: item_id 'scripted_10' does not exist: the environment has scripted_0 to scripted_9 "
        "(2 of 4 items are outside)"
    )


@pytest.mark.server
def test_what_the_server_says_counts_where_settings_choose_the_items(
    spec: EnvSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(build_app(spec)) as url, serve(build_app(replace(spec, num_items=501))) as larger:
        chosen = replace(spec, settings="any", configure=lambda settings: spec)
        monkeypatch.setattr(registry, "_registered", {"scripted": chosen})
        listed = ItemList.load("data.train_file", "wrong.json", ("scripted",))
        checks.check_environment(AgentGymConfig("scripted", larger), listed)
        for addresses in (url, [larger, url]):
            with pytest.raises(ConfigError, match=rf"the server at .*{url} has scripted_0 to scripted_9 \(2 of 4"):
                checks.check_environment(AgentGymConfig("scripted", addresses), listed)
        with pytest.raises(ConfigError, match=r"^--data: wrong.json row 3: item_id 'scripted_10' does not exist"):
            evaluate_hosted(
                HostedEvaluation(
                    HostedModel("http://127.0.0.1:9", "any"), {"scripted": (url,)}, ("wrong.json",), Path("out")
                )
            )


def test_where_every_index_is_an_item_none_is_refused(spec: EnvSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {"scripted": replace(spec, is_endless=True)})
    listed = ItemList.load("data.train_file", "wrong.json", ("scripted",))
    listed.check_range("scripted", 10, owner="the server")
    assert [item.index for item in listed.items] == [9, 3, 10, 500]


@pytest.mark.parametrize("task", ["textcraft", "babyai"])
def test_the_environments_that_say_so_take_every_index(task: str) -> None:
    spec = registry.get_spec(task)
    assert spec.is_endless
    environment = spec.environment()
    assert environment.reset(spec.num_items).observation
    environment.close()


def test_of_several_tasks_and_folders_the_right_file_is_named(
    spec: EnvSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OtherClient(ScriptedClient):
        task = "other"

    other = replace(spec, name="other", client=OtherClient, num_items=5)
    monkeypatch.setattr(registry, "_registered", {"scripted": spec, "other": other})
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "hard.json").write_text('["other_2", "other_7"]')
    with pytest.raises(ConfigError, match=r"data.val_file: folder/hard.json row 2: item_id 'other_7' .* to other_4"):
        ItemList.load("data.val_file", ["right.json", "folder"], ("scripted", "other"))
