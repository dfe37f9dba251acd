"""A run fits its trajectories to the servers' room, or says at the start what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.environments import ScriptedClient, scripted_spec
from support.faults import Fault, faulty_proxy
from support.models import tiny_tokenizer
from support.servers import serve

from agentgym_rl.client.capacity import Capacity, read_capacity
from agentgym_rl.envs.registry import register
from agentgym_rl.envs.server import build_app
from agentgym_rl.errors import ConfigError
from verl.agent_trainer.capacity import hold_to_capacity
from verl.agent_trainer.checks import check_ppo_inputs
from verl.agent_trainer.loading import load_config, parse_command_line
from verl.config import AgentGymConfig, PPOConfig

pytestmark = pytest.mark.server


@contextmanager
def servers(*places: int) -> Iterator[list[str]]:
    """A server for each number of places."""
    with ExitStack() as stack:
        yield [stack.enter_context(serve(build_app(scripted_spec(), max_sessions=count))) for count in places]


def hold(urls: list[str], *, num_workers: int, at_once: int) -> int:
    """The concurrency of each worker, which was 256."""
    config = AgentGymConfig(task_name="scripted", env_addr=urls)
    hold_to_capacity(config, num_workers=num_workers, at_once=at_once)
    return config.max_concurrency


def test_where_there_is_room_nothing_is_changed_or_said(capsys: pytest.CaptureFixture[str]) -> None:
    with servers(20) as urls:
        assert hold(urls, num_workers=2, at_once=20) == 256
    assert capsys.readouterr().err == ""


def test_workers_share_the_places_that_there_are_and_the_run_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with servers(20) as urls:
        assert hold(urls, num_workers=3, at_once=64) == 6
    assert "room for 20 sessions, where 64 trajectories could run at once" in capsys.readouterr().err


@pytest.mark.parametrize(("estimator", "concurrency"), [("grpo", 256), ("remax", 4)])
def test_greedy_baselines_need_places_too(tmp_path: Path, estimator: str, concurrency: int) -> None:
    """2 items x n 2 are 4 trajectories, and with baselines 6."""
    spec = scripted_spec()
    register(spec)
    (tmp_path / "items.json").write_text("[0, 1]")
    (tmp_path / "config.json").write_text("{}")
    tiny_tokenizer().save_pretrained(tmp_path)
    with servers(4) as urls:
        argv = [
            *(f"algorithm.adv_estimator={estimator}", "data.train_batch_size=2", "actor_rollout_ref.rollout.n=2"),
            *(f"data.train_file={tmp_path}/items.json", "data.max_prompt_length=64", "data.max_response_length=64"),
            *(f"actor_rollout_ref.model.path={tmp_path}", "actor_rollout_ref.actor.ppo_mini_batch_size=2"),
            *(f"actor_rollout_ref.agentgym.task_name={spec.name}", f"actor_rollout_ref.agentgym.env_addr={urls}"),
            *(f"trainer.default_local_dir={tmp_path}/out", "trainer.device=cpu", "trainer.n_gpus_per_node=1"),
        ]
        config = load_config(PPOConfig, parse_command_line(argv, program="test", config_name="ppo_trainer"))
        check_ppo_inputs(config)
    assert config.actor_rollout_ref.agentgym.max_concurrency == concurrency


def test_fewer_places_than_workers_are_an_error() -> None:
    with servers(3) as urls, pytest.raises(ConfigError, match=r"room for 3 sessions for 4 workers.*--max-sessions 64"):
        hold(urls, num_workers=4, at_once=64)


def test_places_that_others_hold_are_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    with servers(20) as urls, ScriptedClient(urls[0]):
        assert hold(urls, num_workers=2, at_once=20) == 256
    assert "others hold 1 of its 20 sessions" in capsys.readouterr().err


def test_sessions_are_spread_evenly_so_the_smallest_server_counts() -> None:
    with servers(20, 8) as urls, ScriptedClient(urls[0]), ScriptedClient(urls[1]):
        assert read_capacity(urls) == Capacity(total=16, taken=2)


@pytest.mark.parametrize("fault", [Fault.RESET_UNSEEN, Fault.RESET, Fault.RESET_IN_BODY])
def test_a_connection_that_breaks_while_capacities_are_asked_does_not_end_the_run(fault: Fault) -> None:
    with servers(3) as (upstream,):
        with faulty_proxy(upstream, lambda call: fault if call.tries == 1 else None) as proxy:
            assert hold([proxy.url], num_workers=1, at_once=64) == 3
        assert [call.path for call in proxy.calls] == ["/health", "/health"]


def test_a_server_that_is_gone_when_it_is_asked_is_an_error_of_its_key() -> None:
    with servers(3) as urls:
        pass
    with pytest.raises(ConfigError, match=rf"agentgym\.env_addr={urls[0]}: GET .*/health: connection refused"):
        hold(urls, num_workers=1, at_once=4)


def test_a_server_that_does_not_tell_is_taken_as_it_is() -> None:
    async def agentgym(scope, receive, send) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b'{"detail": "Not Found"}'})

    with serve(agentgym) as url, servers(3) as urls:
        assert read_capacity(url) is None and read_capacity([url, *urls]) is None
        assert hold([url], num_workers=4, at_once=64) == 256
