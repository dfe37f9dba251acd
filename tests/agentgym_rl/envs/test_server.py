"""The wire protocol, byte for byte where AgentGym's clients look, over real HTTP."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from support.environments import Script, ScriptedEnvironment, scripted_spec
from support.servers import serve

from agentgym_rl.envs.base import InvalidCall
from agentgym_rl.envs.registry import EnvSpec
from agentgym_rl.envs.server import build_app
from agentgym_rl.envs.sessions import MAX_HANDLE
from agentgym_rl.envs.textcraft import SPEC
from agentgym_rl.envs.textcraft.environment import recipe_book

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve(build_app(SPEC)) as url:
        yield url


def post(url: str, path: str, body: Any = None, **headers: str) -> requests.Response:
    data = None if body is None else json.dumps(body)
    return requests.post(
        f"{url}/{path}", data=data, headers={"Content-Type": "application/json", **headers}, timeout=10
    )


def get(url: str, path: str, **query: Any) -> requests.Response:
    return requests.get(f"{url}/{path}", params=query, timeout=10)


def created(url: str) -> int:
    handle: int = post(url, "create").json()["id"]
    return handle


def start(url: str, goal: str) -> int:
    handle = created(url)
    post(url, "reset", {"id": handle, "data_idx": recipe_book().goals.index(goal)})
    return handle


class PublishedTextCraftClient:
    """What AgentGym's client for TextCraft sends and reads."""

    def __init__(self, url: str) -> None:
        self.url = url
        answer = requests.post(f"{url}/create", json={"commands": None, "goal": None}, timeout=10)
        assert answer.status_code == 200
        self.info = {key: answer.json()[key] for key in ("observation", "reward", "done")}
        self.handle = answer.json()["id"]

    def call(self, path: str, fields: dict[str, Any]) -> Any:
        answer = requests.post(f"{self.url}/{path}", json={**fields, "id": self.handle}, timeout=10)
        assert answer.status_code == 200
        return answer.json()


def test_a_client_written_for_agentgym_plays_an_episode(url: str) -> None:
    client = PublishedTextCraftClient(url)
    assert (client.info["reward"], client.info["done"]) == (0, False)
    assert client.info["observation"].startswith("Crafting commands:\n")
    reset = client.call("reset", {"data_idx": recipe_book().goals.index("acacia planks")})
    assert reset["observation"].endswith("\n\nGoal: craft acacia planks.")
    client.call("step", {"action": "get 1 acacia logs"})
    last = client.call("step", {"action": "craft 4 acacia planks using 1 acacia logs"})
    assert (last["observation"], last["reward"], last["done"]) == ("Crafted 4 minecraft:acacia_planks", 1, True)
    assert client.call("close", {}) is True


@pytest.mark.parametrize("body", [b"", b"{}", b'{"commands": null, "goal": null, "minecraft_dir": "x", "else": 1}'])
def test_create_accepts_an_empty_body_and_unknown_fields(url: str, body: bytes) -> None:
    answer = requests.post(f"{url}/create", data=body, timeout=10)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    fields = answer.json()
    assert fields.keys() == {"id", "observation", "done", "reward"}
    assert b'"done":false,"reward":0}' in answer.content
    assert isinstance(fields["id"], int)
    assert 0 < fields["id"] <= MAX_HANDLE


def test_answers_have_the_exact_json_types(url: str) -> None:
    handle = start(url, "acacia planks")
    assert post(url, "step", {"id": handle, "action": "get 1 acacia logs"}).content == (
        b'{"observation":"Got 1 acacia logs","reward":0,"done":false}'
    )
    assert get(url, "observation", id=handle).content == b'"Got 1 acacia logs"'
    assert get(url, "goal", id=handle).content == b'"acacia planks"'
    assert get(url, "commands", id=handle).json().startswith("craft ")
    assert get(url, "detail", id=handle).content == (
        b'{"observation":"Got 1 acacia logs","done":false,"reward":0,"deleted":false}'
    )
    assert post(url, "step", {"id": handle, "action": "craft 4 acacia planks using 1 acacia logs"}).content == (
        b'{"observation":"Crafted 4 minecraft:acacia_planks","reward":1,"done":true}'
    )
    reset = post(url, "reset", {"id": handle})
    assert reset.json() == {"id": handle, "observation": reset.json()["observation"], "done": False, "reward": 0}
    assert post(url, "close", {"id": handle}).content == b"true"
    assert post(url, "close", {"id": handle}).content == b"false"


def test_text_that_is_no_valid_unicode_is_answered(url: str) -> None:
    answer = post(url, "step", {"id": start(url, "acacia planks"), "action": "\ud800"})
    assert answer.json()["observation"].startswith("Could not understand '\ud800'")


def test_reset_without_an_index_starts_item_0(url: str) -> None:
    handle = created(url)
    assert post(url, "reset", {"id": handle}).json()["observation"].endswith(f"craft {recipe_book().goals[0]}.")


def test_what_the_environment_refuses_is_http_200_with_an_error(url: str) -> None:
    handle = start(url, "acacia planks")
    for action in ("get 1 acacia logs", "craft 4 acacia planks using 1 acacia logs"):
        post(url, "step", {"id": handle, "action": action})
    refused = [
        post(url, "step", {"id": handle, "action": "inventory"}),
        post(url, "reset", {"id": handle, "data_idx": -1}),
        post(url, "step", {"id": 1, "action": "inventory"}),
        post(url, "reset", {"id": 1}),
        get(url, "observation", id=1),
        get(url, "detail", id=1),
    ]
    assert [(answer.status_code, list(answer.json())) for answer in refused] == [(200, ["error"])] * len(refused)
    assert "has finished" in refused[0].json()["error"]
    assert "no session 1" in refused[2].json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        ("step", b"not json", "JSON"),
        ("step", b"[1]", "list"),
        ("step", b'{"id": ' + b"[" * 100_000, "JSON"),
        ("step", b'{"action": "inventory"}', "id=None"),
        ("step", b'{"id": true, "action": "inventory"}', "id=True"),
        ("step", b'{"id": "x", "action": "inventory"}', "id='x'"),
        ("step", b'{"id": 1.5, "action": "inventory"}', "id=1.5"),
        ("step", b'{"id": 0, "action": "inventory"}', "id=0"),
        ("step", b'{"id": 1}', "action=None"),
        ("step", b'{"id": 1, "action": 5}', "action=5"),
        ("reset", b'{"id": 1, "data_idx": "two"}', "data_idx='two'"),
        ("close", b"{}", "id=None"),
        ("batch", b"{}", "calls=None"),
    ],
)
def test_a_malformed_request_is_422_and_says_why(url: str, path: str, body: bytes, names: str) -> None:
    answer = requests.post(f"{url}/{path}", data=body, timeout=10)
    assert answer.status_code == 422
    assert names in answer.json()["detail"]


def test_unknown_paths_and_methods_are_told_apart(url: str) -> None:
    assert (get(url, "nowhere").status_code, get(url, "step").status_code) == (404, 405)
    assert get(url, "observation").status_code == 422


def test_the_root_names_the_environment(url: str) -> None:
    answer = get(url, "")
    assert (answer.status_code, "TextCraft" in answer.json()) == (200, True)


def test_health_and_metrics_report_the_server() -> None:
    with serve(build_app(SPEC, max_sessions=7)) as url:
        handle = created(url)
        health = get(url, "health").json()
        assert health["environment"] == "textcraft"
        assert health["data"] == "textcraft 0.0.3"
        assert (health["sessions"], health["capacity"], health["items"]) == (1, 7, 544)
        post(url, "close", {"id": handle})
        metrics = get(url, "metrics").text.splitlines()
        assert 'agentgym_sessions{environment="textcraft"} 0' in metrics
        assert 'agentgym_sessions_created_total{environment="textcraft"} 1' in metrics
        assert 'agentgym_requests_total{environment="textcraft",path="/close",status="200"} 1' in metrics


def test_available_actions_are_a_list_of_strings(url: str) -> None:
    assert get(url, "available_actions", id=start(url, "acacia planks")).json()[0] == "inventory"


# ------------------------------------------------------------------------------------------------------ sessions


def test_finishing_one_session_does_not_touch_another(url: str) -> None:
    first, second = start(url, "acacia planks"), start(url, "acacia planks")
    post(url, "step", {"id": second, "action": "get 3 coal"})
    post(url, "step", {"id": first, "action": "get 1 acacia logs"})
    last = post(url, "step", {"id": first, "action": "craft 4 acacia planks using 1 acacia logs"})
    assert last.json()["done"] is True
    post(url, "close", {"id": first})
    assert post(url, "step", {"id": second, "action": "inventory"}).json() == {
        "observation": "Inventory: [coal] (3)",
        "reward": 0,
        "done": False,
    }


def test_200_create_close_cycles_leave_no_session_and_no_open_environment() -> None:
    script = Script()
    with serve(build_app(scripted_spec(script), max_sessions=3)) as url, requests.Session() as session:
        for _ in range(200):
            handle = session.post(f"{url}/create", timeout=10).json()["id"]
            assert session.post(f"{url}/close", json={"id": handle}, timeout=10).json() is True
        assert get(url, "health").json()["sessions"] == 0
    assert script.open == 0


def test_closing_twice_or_an_unknown_handle_is_harmless(url: str) -> None:
    handle = created(url)
    assert [post(url, "close", {"id": h}).json() for h in (handle, handle, 12345)] == [True, False, False]


def test_a_full_server_answers_503_until_a_place_is_free() -> None:
    with serve(build_app(scripted_spec(), max_sessions=2)) as url:
        handles = [created(url), created(url)]
        full = post(url, "create")
        assert (full.status_code, full.headers["Retry-After"]) == (503, "1")
        assert "2 sessions" in full.json()["detail"]
        post(url, "close", {"id": handles[0]})
        assert post(url, "create").status_code == 200


def test_a_client_that_died_frees_its_place_after_the_lifetime() -> None:
    now, script = [0.0], Script()
    with serve(build_app(scripted_spec(script), max_sessions=2, session_ttl_s=100, clock=lambda: now[0])) as url:
        dead, alive = created(url), created(url)
        now[0] = 60
        post(url, "step", {"id": alive, "action": "go"})
        now[0] = 101
        fresh = created(url)
        assert script.open == 2
        assert "expired after 100 s" in post(url, "step", {"id": dead, "action": "go"}).json()["error"]
        assert [post(url, "step", {"id": h, "action": "go"}).status_code for h in (alive, fresh)] == [200, 200]


def test_a_running_step_keeps_its_session_alive() -> None:
    now, script = [0.0], Script(hangs_at={5: 1})
    with serve(build_app(scripted_spec(script), max_sessions=1, session_ttl_s=100, clock=lambda: now[0])) as url:
        handle = created(url)
        post(url, "reset", {"id": handle, "data_idx": 5})
        answers: list[requests.Response] = []
        step = threading.Thread(target=lambda: answers.append(post(url, "step", {"id": handle, "action": "go"})))
        step.start()
        assert script.hanging.wait(10)
        now[0] = 1000
        assert post(url, "create").status_code == 503
        script.release.set()
        step.join()
        assert answers[0].json()["observation"] == "item 5 step 1"


def test_sessions_end_with_the_server() -> None:
    script = Script()
    with serve(build_app(scripted_spec(script))) as url:
        created(url)
        created(url)
        assert script.open == 2
    assert script.open == 0


def test_handles_cannot_be_guessed_from_one_another(url: str) -> None:
    handles = [created(url) for _ in range(8)]
    assert len(set(handles)) == 8
    assert min(abs(a - b) for a in handles for b in handles if a != b) > 1000


def test_two_requests_for_one_handle_run_one_after_the_other_and_handles_in_parallel() -> None:
    script = Script(turns=100, hangs_at={5: 1})
    with serve(build_app(scripted_spec(script))) as url:
        handle, other = created(url), created(url)
        post(url, "reset", {"id": handle, "data_idx": 5})
        seen: list[str] = []

        def step(action: str) -> None:
            seen.append(post(url, "step", {"id": handle, "action": action}).json()["observation"])

        threads = [threading.Thread(target=step, args=(str(number),)) for number in range(3)]
        for thread in threads:
            thread.start()
        assert script.hanging.wait(10)
        assert post(url, "step", {"id": other, "action": "go"}).json()["observation"] == "item 0 step 1"
        assert seen == []
        script.release.set()
        for thread in threads:
            thread.join()
        assert sorted(seen) == ["item 5 step 1", "item 5 step 2", "item 5 step 3"]


# ------------------------------------------------------------------------------------------ exactly once, faults, batch


def test_a_repeated_request_id_answers_again_without_running_again() -> None:
    script = Script()
    with serve(build_app(scripted_spec(script))) as url:
        handle = created(url)
        step = {"id": handle, "action": "go"}
        first = post(url, "step", step, **{"X-Request-Id": "a"})
        again = post(url, "step", step, **{"X-Request-Id": "a"})
        other = post(url, "step", step, **{"X-Request-Id": "b"})
        assert first.content == again.content != other.content
        assert first.headers["X-Request-Id"] == "a"
        assert [step for _, step, _ in script.executed] == [1, 2]


def test_a_repeated_create_gives_the_same_session() -> None:
    with serve(build_app(scripted_spec(), max_sessions=1)) as url:
        first = post(url, "create", **{"X-Request-Id": "a"})
        assert post(url, "create", **{"X-Request-Id": "a"}).json() == first.json()


def test_a_create_turned_away_may_succeed_under_the_same_id_later() -> None:
    with serve(build_app(scripted_spec(), max_sessions=1)) as url:
        handle = created(url)
        assert post(url, "create", **{"X-Request-Id": "a"}).status_code == 503
        post(url, "close", {"id": handle})
        assert post(url, "create", **{"X-Request-Id": "a"}).status_code == 200


def test_a_repeated_fault_is_not_run_again() -> None:
    script = Script(fails_at={5: 1})
    with serve(build_app(scripted_spec(script))) as url:
        handle = created(url)
        post(url, "reset", {"id": handle, "data_idx": 5})
        statuses = [
            post(url, "step", {"id": handle, "action": "go"}, **{"X-Request-Id": "a"}).status_code for _ in "12"
        ]
        assert statuses == [500, 500]
        assert len(script.executed) == 1


def test_a_fault_in_the_environment_is_500_and_never_a_reward() -> None:
    with serve(build_app(scripted_spec(fails_at={5: 1}))) as url:
        handle = created(url)
        post(url, "reset", {"id": handle, "data_idx": 5})
        answer = post(url, "step", {"id": handle, "action": "go"})
        assert answer.status_code == 500
        assert answer.json().keys() == {"detail"}
        assert "RuntimeError: scripted fault of item 5 at step 1" in answer.json()["detail"]
        assert 'agentgym_environment_faults_total{environment="scripted"} 1' in get(url, "metrics").text


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1", True, None])
def test_a_reward_that_is_no_finite_number_is_a_fault(reward: Any) -> None:
    with serve(build_app(scripted_spec(rewards=(reward,)))) as url:
        assert post(url, "step", {"id": created(url), "action": "go"}).status_code == 500


def test_a_batch_is_answered_in_order_each_call_with_its_own_status() -> None:
    with serve(build_app(scripted_spec(turns=2, fails_at={5: 1}), max_sessions=1)) as url:
        handle = created(url)
        step = {"path": "/step", "body": {"id": handle, "action": "go"}}
        calls = [
            {"path": "/create"},
            {"path": "/reset", "body": {"id": handle, "data_idx": 1}},
            {**step, "request_id": "a"},
            {**step, "request_id": "a"},
            step,
            step,
            {"path": "/reset", "body": {"id": handle, "data_idx": 5}},
            step,
            {"path": "/step", "body": {}},
            {"path": "/batch", "body": {"calls": []}},
            {"path": "/close", "body": {"id": handle}},
        ]
        answers = post(url, "batch", {"calls": calls}).json()
        assert [answer["status"] for answer in answers] == [503, 200, 200, 200, 200, 200, 200, 500, 422, 422, 200]
        assert answers[2] == answers[3]
        assert [answers[n]["body"].get("observation") for n in (2, 4)] == ["item 1 step 1", "item 1 step 2"]
        assert answers[5]["body"] == {"error": "the episode has finished"}
        assert answers[-1]["body"] is True


@pytest.mark.parametrize(
    "call",
    [
        17,
        {"path": ["/step"], "body": {}},
        {"path": "/step", "body": []},
        {"path": "/step", "body": {"id": 1, "action": "go"}, "request_id": 5},
    ],
)
def test_a_call_of_a_wrong_form_in_a_batch_is_refused_alone(call: Any) -> None:
    with serve(build_app(scripted_spec())) as url:
        step = {"path": "/step", "body": {"id": created(url), "action": "go"}}
        answers = post(url, "batch", {"calls": [step, call, step]}).json()
    assert [answer["status"] for answer in answers] == [200, 422, 200]


def test_an_environment_that_fails_to_close_does_not_keep_the_others_from_being_closed() -> None:
    now, refusing = [0.0], [InvalidCall("not now"), RuntimeError("stuck")]

    class Stubborn(ScriptedEnvironment):
        def close(self) -> None:
            super().close()
            if refusing:
                raise refusing.pop()

    script = Script()
    spec = replace(scripted_spec(script), environment=lambda: Stubborn(script))
    app = build_app(spec, max_sessions=3, session_ttl_s=100, clock=lambda: now[0])
    with serve(app) as url:
        for _ in range(3):
            created(url)
        now[0] = 101
        assert post(url, "create").status_code == 200
        assert script.open == 1


def test_a_create_that_breaks_off_before_its_bodys_end_leaves_no_session() -> None:
    script = Script()
    with serve(build_app(scripted_spec(script))) as url:
        address = urlsplit(url)
        with socket.create_connection((address.hostname, address.port)) as connection:
            connection.sendall(b"POST /create HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n")
        time.sleep(0.05)
        assert get(url, "health").json()["sessions"] == script.open == 0


class SlowStart:
    """Environments that take as long to be made as the test wants."""

    def __init__(self) -> None:
        self.script = Script()
        self.begun, self.may_go_on = threading.Semaphore(0), threading.Semaphore(0)

    def environment(self) -> ScriptedEnvironment:
        self.begun.release()
        assert self.may_go_on.acquire(timeout=20)
        return ScriptedEnvironment(self.script)

    def spec(self, **changes: Any) -> EnvSpec:
        return replace(scripted_spec(), environment=self.environment, runs_inline=False, **changes)

    def ask(self, url: str, request_id: str) -> socket.socket:
        """Send ``/create``, and return when the environment is being made."""
        address = urlsplit(url)
        connection = socket.create_connection((address.hostname, address.port), timeout=20)
        head = f"POST /create HTTP/1.1\r\nHost: x\r\nX-Request-Id: {request_id}\r\nContent-Length: 2\r\n\r\n"
        connection.sendall(head.encode() + b"{}")
        return connection


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    "created", [lambda handle, start: {"id": handle}, lambda handle, start: handle], ids=["object", "bare"]
)
def test_a_session_whose_client_left_before_it_was_made_is_closed(created: Any) -> None:
    slow = SlowStart()
    spec = slow.spec(wire=replace(scripted_spec().wire, created=created))
    with serve(build_app(spec, max_sessions=1)) as url:
        slow.ask(url, "a").close()
        assert slow.begun.acquire(timeout=20)
        slow.may_go_on.release(2)
        wait_until(lambda: 'sessions_created_total{environment="scripted"} 1' in get(url, "metrics").text)
        wait_until(lambda: get(url, "health").json()["sessions"] == 0)
        assert slow.script.open == 0
        again = post(url, "create", **{"X-Request-Id": "a"}).json()  # too late for the first session
        handle = again["id"] if isinstance(again, dict) else again
        assert post(url, "reset", {"id": handle}).json()["observation"]


def test_a_client_that_asks_again_while_its_session_is_made_gets_it() -> None:
    slow = SlowStart()
    with serve(build_app(slow.spec(), max_sessions=1)) as url:
        left = slow.ask(url, "a")
        assert slow.begun.acquire(timeout=20)
        with slow.ask(url, "a") as waiting:
            get(url, "health")  # the server has read what came before
            left.close()
            get(url, "health")
            slow.may_go_on.release()
            assert waiting.recv(1000).startswith(b"HTTP/1.1 200")
            assert get(url, "health").json()["sessions"] == slow.script.open == 1
        assert not slow.begun.acquire(timeout=0)


def test_a_body_beyond_the_limit_is_refused(url: str) -> None:
    assert requests.post(f"{url}/step", data=b" " * (5 * 2**20), timeout=10).status_code == 413
