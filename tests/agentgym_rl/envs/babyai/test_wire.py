"""BabyAI over HTTP: forms of calls and answers, the client's score, the same episodes in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import pytest
import requests
from support.servers import serve

from agentgym_rl.agent.strategies import conversation_start
from agentgym_rl.envs import babyai
from agentgym_rl.envs.babyai import SPEC, BabyAIClient
from agentgym_rl.envs.babyai.environment import BabyAI
from agentgym_rl.envs.babyai.expert import plan
from agentgym_rl.envs.server import build_app
from agentgym_rl.errors import ConfigError, EnvServerError

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve(build_app(SPEC)) as address:
        yield address


def post(url: str, path: str, **fields: object) -> requests.Response:
    return requests.post(f"{url}/{path}", json=fields, timeout=30)


def get(url: str, path: str, handle: int) -> requests.Response:
    return requests.get(f"{url}/{path}", params={"id": handle}, timeout=30)


def created(url: str) -> int:
    answer = requests.post(f"{url}/create", timeout=30)
    assert answer.status_code == 200 and list(answer.json()) == ["id"]
    handle: int = answer.json()["id"]
    return handle


def expert(item: int) -> list[str]:
    environment = BabyAI()
    environment.reset(item)
    return plan(environment)


def test_an_episode_in_the_forms_of_the_protocol(url: str) -> None:
    handle = created(url)
    start = post(url, "reset", id=handle, data_idx=43).json()
    seen = start.pop("observation")
    assert start == {"reward": 0, "score": 0, "deleted": False, "done": False}
    assert seen.startswith("Your goal: go to ")
    actions = expert(43)
    steps = [post(url, "step", id=handle, action=action).json() for action in actions]
    assert all(list(step) == ["observation", "reward", "score", "done"] for step in steps)
    assert [(step["reward"], step["score"], step["done"]) for step in steps[:-1]] == [(0, 0, False)] * (len(steps) - 1)
    final = steps[-1]
    assert final["done"] is True and final["reward"] == final["score"] and 0.1 < final["score"] < 1
    assert get(url, "observation", handle).json() == {**final, "deleted": False}
    again = post(url, "step", id=handle, action=actions[-1])
    assert again.status_code == 200 and list(again.json()) == ["error"] and "has finished" in again.json()["error"]
    assert get(url, "observation", handle).json()["score"] == final["score"]
    assert [post(url, "close", id=handle).json() for _ in range(2)] == [True, False]


def test_reset_without_an_index_begins_item_0(url: str) -> None:
    handle = created(url)
    first = post(url, "reset", id=handle).json()
    assert post(url, "reset", id=handle, data_idx=0).json() == first
    post(url, "close", id=handle)


def test_rendering_is_a_bare_data_url(url: str) -> None:
    handle = created(url)
    post(url, "reset", id=handle, data_idx=0)
    assert post(url, "render", id=handle).json().startswith("data:image/png;base64,")
    post(url, "close", id=handle)


def test_errors_have_the_forms_of_the_protocol(url: str) -> None:
    handle = created(url)
    early = post(url, "step", id=handle, action="turn left")
    assert early.status_code == 200 and "reset it first" in early.json()["error"]
    refused = post(url, "reset", id=handle, data_idx=-1)
    assert refused.status_code == 200 and refused.json()["error"] == "data_idx -1: must be at least 0"
    assert post(url, "reset", id=handle, data_idx="soon").status_code == 422
    post(url, "reset", id=handle, data_idx=0)
    assert post(url, "step", id=handle, action=7).status_code == 422
    post(url, "close", id=handle)
    deleted = post(url, "step", id=handle, action="turn left")
    assert deleted.status_code == 200 and list(deleted.json()) == ["error"]


def test_available_actions_are_those_of_the_observation(url: str) -> None:
    with BabyAIClient(url) as client:
        seen = client.reset(4)
        listed = client.available_actions()
        assert "check available actions" in listed
        assert all(f'"{action}"' in seen for action in listed)


def test_the_client_reports_the_score_so_far_and_success_needs_no_full_score(url: str) -> None:
    with BabyAIClient(url) as client:
        client.reset(43)
        outputs = [client.step(f"Thought: on.\nAction: {action}") for action in expert(43)]
        assert [output.reward for output in outputs[:-1]] == [0] * (len(outputs) - 1)
        assert outputs[-1].done and BabyAIClient.succeeds_from() <= outputs[-1].reward < BabyAIClient.max_score
        with pytest.raises(EnvServerError, match=r"item babyai_43 .*has finished"):
            client.step("Action: turn left")


def test_the_client_reads_the_score_and_not_the_reward_of_the_step() -> None:
    """Which AgentGym's server reports both of; here they differ."""
    step = {"observation": "seen", "reward": 0.25, "score": 0.75, "done": False}
    spec = replace(SPEC, wire=replace(SPEC.wire, stepped=lambda result: step))
    with serve(build_app(spec)) as url, BabyAIClient(url) as client:
        client.reset(0)
        assert client.step("Action: turn left").reward == 0.75


def test_a_turn_without_an_action_costs_no_step_and_no_score(url: str) -> None:
    with BabyAIClient(url) as client:
        client.reset(0)
        output = client.step("I wonder.")
        assert "Action: check available actions" in output.state and (output.reward, output.done) == (0, False)


def test_the_instruction_names_every_kind_of_action() -> None:
    opening = conversation_start(BabyAIClient.task_description)[0].content
    words = (
        "turn left",
        "turn right",
        "move forward",
        "go to <color>",
        "pickup <color>",
        "drop",
        "toggle",
        "go through",
    )
    assert all(word in opening for word in (*words, "toggle and go through", "check available actions"))


_TRANSCRIPT = """
import hashlib
from agentgym_rl.envs.registry import get_spec
environment, digest = get_spec("babyai").environment(), hashlib.sha256()
for index in range(80):
    digest.update(environment.reset(index).observation.encode())
    for action in environment.available_actions()[-2:]:
        if not environment.done:
            digest.update(environment.step(action).observation.encode())
print(digest.hexdigest())
"""


def test_an_index_means_the_same_episode_in_every_process_and_nothing_else_is_printed() -> None:
    def transcript(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", _TRANSCRIPT]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout

    first = transcript("1")
    assert len(first) == 65
    assert transcript("2") == first


def test_clients_need_no_minigrid() -> None:
    program = (
        "import sys; sys.modules['minigrid'] = None; sys.modules['pygame'] = None; sys.modules['gymnasium'] = None\n"
        "from agentgym_rl.envs.registry import get_spec\nprint(get_spec('babyai').client.__name__)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout == "BabyAIClient\n"


def test_without_minigrid_the_server_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(babyai, "version", missing)
    with pytest.raises(ConfigError, match="pip install minigrid"):
        build_app(SPEC)
