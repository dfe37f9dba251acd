"""How calls look where an environment departs from TextCraft: dialect B, bare values, calls of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import requests
from support.dialect_b import QUIZ_SPEC, QuizClient
from support.environments import Script, ScriptedEnvironment, scripted_spec
from support.servers import serve

from agentgym_rl.envs.base import ResetResult, StepResult
from agentgym_rl.envs.server import build_app
from agentgym_rl.envs.wire import DIALECT_A, DIALECT_B
from agentgym_rl.errors import EnvServerError

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve(build_app(QUIZ_SPEC)) as url:
        yield url


def post(url: str, path: str, **fields: Any) -> requests.Response:
    return requests.post(f"{url}/{path}", json=fields, timeout=10)


def get(url: str, path: str, **query: Any) -> requests.Response:
    return requests.get(f"{url}/{path}", params=query, timeout=10)


def test_bare_values_stay_bare(url: str) -> None:
    created = post(url, "create", id=7)
    handle = created.json()
    assert created.content == str(handle).encode()
    assert get(url, "observation", env_idx=handle).content == b'"Question: which number is 7?"'
    assert post(url, "reset", env_idx=handle, id=3).content == b'"Question: which number is 3?"'
    assert post(url, "step", env_idx=handle, action="2").content == (
        b'{"observation":"wrong","reward":0,"done":false,"info":{"tries":1}}'
    )
    assert post(url, "step", env_idx=handle, action="3").content == (
        b'{"observation":"right","reward":1,"done":true,"info":{"tries":2}}'
    )
    assert post(url, "close", env_idx=handle).content == b"true"


@pytest.mark.parametrize("body", [None, {}, {"id": None}, {"id": 0}])
def test_an_item_in_create_may_be_absent(url: str, body: Any) -> None:
    handle = requests.post(f"{url}/create", json=body, timeout=10).json()
    assert get(url, "observation", env_idx=handle).json() == "Question: which number is 0?"


def test_refusals_are_not_200_and_carry_a_detail(url: str) -> None:
    handle = post(url, "create").json()
    post(url, "step", env_idx=handle, action="0")
    for answer, status, text in (
        (post(url, "step", env_idx=handle, action="0"), 400, "the question is answered"),
        (post(url, "reset", env_idx=handle, id=100), 400, "must be in 0..99"),
        (post(url, "create", id=100), 400, "must be in 0..99"),
        (post(url, "step", env_idx=1, action="0"), 404, "no session 1"),
        (get(url, "observation", env_idx=1), 404, "no session 1"),
        (post(url, "step", id=handle, action="0"), 422, "env_idx=None: must be an integer"),
        (post(url, "reset", env_idx=handle, id="x"), 422, "id='x': must be an integer"),
        (post(url, "create", id="x"), 422, "id='x': must be an integer"),
    ):
        assert (answer.status_code, list(answer.json())) == (status, ["detail"])
        assert text in answer.json()["detail"]


def test_a_refused_create_takes_no_place() -> None:
    with serve(build_app(QUIZ_SPEC, max_sessions=1)) as url:
        assert post(url, "create", id=100).status_code == 400
        assert post(url, "create", id="x").status_code == 422
        assert post(url, "create").status_code == 200


def test_calls_of_its_own_ask_command_and_step(url: str) -> None:
    handle = post(url, "create").json()
    assert post(url, "hint", env_idx=handle, **{"for": "me"}).json() == {"hint": "0", "asked": "me"}
    assert get(url, "hint", env_idx=handle).status_code == 405
    seen = post(url, "step_visual", env_idx=handle, action="?")
    assert seen.json() == {"image": "wrong", "tries": 1}
    assert post(url, "step_visual", env_idx=handle).status_code == 422
    assert get(url, "detail", env_idx=handle).json()["observation"] == "wrong"


def test_every_environment_can_be_rendered_by_get_and_post(url: str) -> None:
    handle = post(url, "create").json()
    assert get(url, "render", env_idx=handle).json() == post(url, "render", env_idx=handle).json()


def test_the_client_of_dialect_b_plays_and_sees_refusals(url: str) -> None:
    with QuizClient(url) as client:
        client.reset(5)
        assert client.step("Action: 5").reward == 1
        with pytest.raises(EnvServerError, match=r"HTTP 400.*the question is answered"):
            client.step("Action: 5")


def test_a_batch_speaks_the_dialect_too(url: str) -> None:
    handle = post(url, "create").json()
    calls = [
        {"path": "/reset", "body": {"env_idx": handle, "id": 2}},
        {"path": "/step", "body": {"env_idx": handle, "action": "2"}},
        {"path": "/step", "body": {"env_idx": handle, "action": "2"}},
        {"path": "/close", "body": {"env_idx": handle}},
    ]
    answers = post(url, "batch", calls=calls).json()
    assert [answer["status"] for answer in answers] == [200, 200, 400, 200]
    assert answers[0]["body"] == "Question: which number is 2?"


def test_where_create_begins_no_episode_only_reset_and_close_are_allowed_at_first() -> None:
    wire = replace(DIALECT_A, starts_on_create=False, created=lambda handle, start: {"id": handle})
    script = Script()
    with serve(build_app(replace(scripted_spec(script), wire=wire))) as url:
        created = post(url, "create").json()
        assert list(created) == ["id"]
        refused = [post(url, "step", id=created["id"], action="go"), get(url, "observation", id=created["id"])]
        assert ["reset it first" in answer.json()["error"] for answer in refused] == [True, True]
        assert script.executed == []
        post(url, "reset", id=created["id"], data_idx=4)
        assert post(url, "step", id=created["id"], action="go").json()["observation"] == "item 4 step 1"
        assert post(url, "close", id=post(url, "create").json()["id"]).json() is True


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (("seen", 0.0, False), "must return a StepResult(observation, reward, done), not ('seen', 0.0, False)"),
        (StepResult(5, 0, False), "must return a str observation, not 5"),  # type: ignore[arg-type]
        (StepResult("seen", 0, 1), "must return a Python bool as done, not 1"),  # type: ignore[arg-type]
        (StepResult("seen", "1", False), "must return a Python int or float as reward, not '1'"),  # type: ignore[arg-type]
        (StepResult("seen", float("nan"), False), "must return a finite reward, not nan"),
        (None, "must return a StepResult(observation, reward, done), not None"),
    ],
)
def test_a_step_of_a_wrong_type_names_the_class_and_what_is_expected(returned: Any, expected: str) -> None:
    class Sloppy(ScriptedEnvironment):
        def step(self, action: str) -> StepResult:
            return returned  # type: ignore[no-any-return]

    spec = replace(scripted_spec(), environment=lambda: Sloppy(Script()))
    with serve(build_app(spec)) as url:
        answer = post(url, "step", id=post(url, "create").json()["id"], action="go")
        assert answer.status_code == 500
        assert f"Sloppy.step {expected}" in answer.json()["detail"]


def test_a_reset_of_a_wrong_type_names_the_class_and_what_is_expected() -> None:
    class Sloppy(ScriptedEnvironment):
        def reset(self, data_idx: int) -> ResetResult:
            return "seen"  # type: ignore[return-value]

    spec = replace(scripted_spec(), environment=lambda: Sloppy(Script()))
    with serve(build_app(spec)) as url:
        answer = post(url, "create")
        assert answer.status_code == 500
        assert "Sloppy.reset must return a ResetResult with a str observation, not 'seen'" in answer.json()["detail"]


def test_what_json_cannot_say_is_a_fault_of_the_environment() -> None:
    spec = replace(QUIZ_SPEC, queries={"odd": lambda environment: {"it": object()}})
    with serve(build_app(spec)) as url:
        assert get(url, "odd", env_idx=post(url, "create").json()).status_code == 500


def test_the_openapi_document_lists_every_call(url: str) -> None:
    document = get(url, "openapi.json").json()
    assert {"/create", "/reset", "/step", "/close", "/batch", "/hint", "/step_visual", "/health"} <= document[
        "paths"
    ].keys()
    step = document["paths"]["/step"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert step["required"] == ["env_idx", "action"]


def test_dialects_differ_in_refusals() -> None:
    assert DIALECT_A.refusal("no") == (200, {"error": "no"})
    assert DIALECT_B.refusal("no") == (400, {"detail": "no"})
    assert DIALECT_B.refusal("no", known_session=False) == (404, {"detail": "no"})


# ---------------------------------------------------------------------------------------------- token, limits, logging


def test_with_a_token_every_request_must_carry_it() -> None:
    with serve(build_app(QUIZ_SPEC, token="secret")) as url:
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "secret"}):
            answer = requests.post(f"{url}/create", headers=headers, timeout=10)
            assert answer.status_code == 401
            assert "AGENTGYM_TOKEN" in answer.json()["detail"]
            assert "secret" not in answer.text
        assert requests.get(f"{url}/health", timeout=10).status_code == 401
        allowed = {"Authorization": "Bearer secret"}
        assert requests.post(f"{url}/create", headers=allowed, timeout=10).status_code == 200


def test_the_token_of_the_environment_variable_serves_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTGYM_TOKEN", "secret")
    with serve(build_app(QUIZ_SPEC)) as url:
        assert requests.get(f"{url}/health", timeout=10).status_code == 401
        with QuizClient(url) as client:
            assert client.reset(1) == "Question: which number is 1?"


def test_a_batch_beyond_the_limit_is_refused(url: str) -> None:
    answer = post(url, "batch", calls=[{"path": "/create"}] * 1025)
    assert (answer.status_code, "calls=a list of 1025" in answer.json()["detail"]) == (422, True)


def test_a_request_is_one_line_of_the_log_at_level_info(url: str, caplog: pytest.LogCaptureFixture) -> None:
    get(url, "health")
    assert caplog.messages == []
    with caplog.at_level("INFO", "agentgym_rl.requests"):
        get(url, "health")
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("GET /health 200 ")
