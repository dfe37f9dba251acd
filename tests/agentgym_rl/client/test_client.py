"""EnvClient against the real server, and against servers that do less or fail."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from support.environments import CumulativeClient, Script, ScriptedClient, scripted_spec
from support.faults import Fault, faulty_proxy, http_answer, raw_server
from support.servers import serve

from agentgym_rl.agent.strategies import conversation_start
from agentgym_rl.client.base import EnvClient
from agentgym_rl.client.check import check_server
from agentgym_rl.envs.server import build_app
from agentgym_rl.envs.textcraft import SPEC, TextCraftClient
from agentgym_rl.errors import ConfigError, EnvFull, EnvProtocolError, EnvServerError, EnvTimeout, EnvUnreachable
from agentgym_rl.types import Role, StepOutput

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve(build_app(SPEC)) as url:
        yield url


def published_textcraft(path: str, body: dict[str, Any], headers: dict[str, str]) -> bytes | None:
    """The calls of an AgentGym server that its own client needs, and no others."""
    answers = {
        "/create": {"id": 0, "observation": "start", "done": False, "reward": 0},
        "/reset": {"id": 0, "observation": f"item {body.get('data_idx')}", "done": False, "reward": 0},
        "/step": {"observation": f"did {body.get('action')}", "reward": 1, "done": True},
        "/": "This is environment TextCraft.",
    }
    return http_answer(answers[path]) if path in answers else http_answer({"detail": "Not Found"}, 404)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


# --------------------------------------------------------------------------------------------------------- the contract


def test_an_episode_through_the_client(url: str) -> None:
    with TextCraftClient(url, data_len=544) as client:
        assert len(client) == 544
        assert client.observe().startswith("Crafting commands:")
        assert client.reset(0) == client.observation() == client.observe()
        assert client.step("Thought: wood\nAction: get 1 acacia logs") == StepOutput("Got 1 acacia logs", 0.0, False)
        assert client.available_actions()[0] == "inventory"
        last = client.step("Action: craft 4 acacia planks using 1 acacia logs")
        assert last == StepOutput("Crafted 4 minecraft:acacia_planks", 1.0, True)
        assert client.info == {"observation": last.state, "reward": 1.0, "done": True}


def test_a_text_without_an_action_costs_no_call_and_tells_the_agent() -> None:
    script = Script()
    with serve(build_app(scripted_spec(script))) as url, ScriptedClient(url) as client:
        client.reset(1)
        output = client.step("I do not know.")
        assert (output.reward, output.done) == (0.0, False)
        assert "Action: go" in output.state
        assert script.executed == []
        assert client.step("Action: go").state == "item 1 step 1"


def test_without_an_action_a_cumulative_score_stays() -> None:
    with serve(build_app(scripted_spec(rewards=(0.2, 0.5, 1.0)))) as url, CumulativeClient(url) as client:
        client.reset(1)
        assert [client.step(text).reward for text in ("Action: go", "hm", "Action: go", "hm")] == [0.2, 0.2, 0.5, 0.5]
        client.reset(2)
        assert client.step("hm").reward == 0.0


def test_the_conversation_starts_with_a_short_instruction_and_an_acknowledgement(url: str) -> None:
    with TextCraftClient(url) as client:
        instruction, acknowledgement = client.conversation_start
        assert (instruction.role, acknowledgement.role) == (Role.USER, Role.ASSISTANT)
        assert len(instruction.content.split()) < 90
        assert client.conversation_start == conversation_start(client)


def test_two_interleaved_clients_do_not_touch_each_other(url: str) -> None:
    with TextCraftClient(url) as first, TextCraftClient(url) as second:
        first.reset(0)
        second.reset(0)
        second.step("Action: get 2 coal")
        first.step("Action: get 1 acacia logs")
        assert first.step("Action: craft 4 acacia planks using 1 acacia logs").done
        first.close()
        assert second.step("Action: inventory") == StepOutput("Inventory: [coal] (2)", 0.0, False)


def test_200_clients_leave_no_session() -> None:
    script = Script()
    with serve(build_app(scripted_spec(script), max_sessions=2)) as url:
        for _ in range(200):
            with ScriptedClient(url) as client:
                client.close()
    assert script.open == 0


def test_an_agentgym_server_is_enough() -> None:
    with raw_server(published_textcraft) as url, TextCraftClient(url) as client:
        assert client.reset(7) == "item 7"
        assert client.available_actions() == list(TextCraftClient.action_forms)
        assert client.step("Action: get 1 coal") == StepOutput("did get 1 coal", 1.0, True)


def test_close_never_raises_even_when_the_server_is_gone() -> None:
    with serve(build_app(scripted_spec())) as url:
        client = ScriptedClient(url)
    client.close()
    client.close()


# --------------------------------------------------------------------------------------------------------------- errors


def test_no_server_is_unreachable() -> None:
    port = free_port()
    with pytest.raises(EnvUnreachable, match=rf"POST http://127.0.0.1:{port}/create: connection refused \(tries: 2\)"):
        TextCraftClient(f"http://127.0.0.1:{port}", max_retries=1)


def test_a_fault_of_the_environment_names_task_item_step_and_url() -> None:
    with serve(build_app(scripted_spec(fails_at={5: 2}))) as url, ScriptedClient(url) as client:
        client.reset(5)
        client.step("Action: go")
        with pytest.raises(EnvServerError) as caught:
            client.step("Action: go")
    message = str(caught.value)
    assert message.startswith(f"scripted item scripted_5 step 2: {url}/step: HTTP 500: ")
    assert "scripted fault of item 5 at step 2" in message


def test_what_the_environment_refuses_is_a_server_error() -> None:
    refused = pytest.raises(EnvServerError, match=r"item scripted_9 step 0.*data_idx 9 does not exist")
    with serve(build_app(scripted_spec(invalid_items={9}))) as url, ScriptedClient(url) as client, refused:
        client.reset(9)


def test_no_answer_in_time_is_a_timeout() -> None:
    script = Script(hangs_at={5: 1})
    with serve(build_app(scripted_spec(script))) as url, ScriptedClient(url) as client:
        client.reset(5)
        client._connection.timeout_s = 0.3
        with pytest.raises(EnvTimeout, match=r"item scripted_5 step 1: POST .*/step: no answer within 0.3 s"):
            client.step("Action: go")
        script.release.set()


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"<html>", "not JSON"),
        ([], "no 'observation' in the answer"),
        ({"observation": "x", "done": False}, "no 'reward' in the answer"),
        ({"observation": None, "reward": 0, "done": False}, "observation=None is not a string"),
        ({"observation": "x", "reward": "1", "done": False}, "reward='1' is not a finite number"),
        ({"observation": "x", "reward": True, "done": False}, "reward=True is not a finite number"),
        (b'{"observation": "x", "reward": NaN, "done": false}', "reward=nan is not a finite number"),
        ({"observation": "x", "reward": 0, "done": "no"}, "done='no' is not true or false"),
    ],
)
def test_an_answer_of_another_form_is_a_protocol_error(answer: Any, problem: str) -> None:
    def serve_it(path: str, body: dict[str, Any], headers: dict[str, str]) -> bytes | None:
        return http_answer(answer) if path == "/step" else published_textcraft(path, body, headers)

    refused = pytest.raises(EnvProtocolError, match=problem)
    with raw_server(serve_it) as url, TextCraftClient(url) as client, refused:
        client.step("Action: inventory")


# -------------------------------------------------------------------------------------------------------------- retries


def test_a_server_that_comes_up_late_is_waited_for() -> None:
    port = free_port()
    clients: list[EnvClient] = []
    thread = threading.Thread(target=lambda: clients.append(ScriptedClient(f"http://127.0.0.1:{port}")))
    thread.start()
    with serve(build_app(scripted_spec()), port=port):
        thread.join()
        assert clients[0].reset(1) == "item 1 step 0"
        clients[0].close()


def test_a_full_server_is_waited_for_until_the_timeout() -> None:
    with serve(build_app(scripted_spec(), max_sessions=1)) as url:
        first = ScriptedClient(url)
        # Less than the second after which the server wants to be asked again.
        with pytest.raises(EnvFull, match=r"HTTP 503.* the limit of 0.9 s: .*1 sessions are alive"):
            ScriptedClient(url, timeout=0.9)
        threading.Timer(0.2, first.close).start()
        ScriptedClient(url).close()


def breaking(echo: bool) -> tuple[list[str], Callable[[str, dict[str, Any], dict[str, str]], bytes | None]]:
    """A server that breaks the connection instead of answering the first step, and the ids of the steps it has seen."""
    step_ids: list[str] = []

    def answer(path: str, body: dict[str, Any], headers: dict[str, str]) -> bytes | None:
        if path == "/step":
            step_ids.append(headers["x-request-id"])
            if len(step_ids) == 1:
                return None
        plain = published_textcraft(path, body, headers)
        assert plain is not None
        return plain.replace(b"\r\n", f"\r\nX-Request-Id: {headers['x-request-id']}\r\n".encode(), 1) if echo else plain

    return step_ids, answer


def test_after_a_broken_connection_a_server_that_knows_request_ids_is_asked_again_under_the_same_id() -> None:
    step_ids, answer = breaking(echo=True)
    with raw_server(answer) as url, TextCraftClient(url) as client:
        assert client.step("Action: inventory").state == "did inventory"
    assert len(step_ids) == 2
    assert step_ids[0] == step_ids[1]


def torn(whole: bytes, **headers: str) -> bytes:
    """An answer of which the last byte is missing."""
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return whole.replace(b"\r\n", f"\r\n{lines}".encode(), 1)[:-1]


def test_an_answer_that_breaks_off_is_asked_for_again_under_the_same_id() -> None:
    step_ids: list[str] = []

    def answer(path: str, body: dict[str, Any], headers: dict[str, str]) -> bytes | None:
        whole = published_textcraft(path, body, headers)
        assert whole is not None
        if path != "/step":
            return whole.replace(b"\r\n", f"\r\nX-Request-Id: {headers['x-request-id']}\r\n".encode(), 1)
        step_ids.append(headers["x-request-id"])
        return torn(whole, Connection="close") if len(step_ids) == 1 else whole

    with raw_server(answer) as url, TextCraftClient(url) as client:
        assert client.step("Action: inventory").state == "did inventory"
    assert len(step_ids) == 2
    assert step_ids[0] == step_ids[1]


def test_an_answer_that_begins_and_never_ends_is_a_timeout() -> None:
    def answer(path: str, body: dict[str, Any], headers: dict[str, str]) -> bytes | None:
        whole = published_textcraft(path, body, headers)
        return torn(whole) if path == "/step" and whole is not None else whole

    late = pytest.raises(EnvTimeout, match=r"/step: no whole answer within 0.5 s")
    with raw_server(answer) as url, TextCraftClient(url) as client, late:
        client._connection.timeout_s = 0.5
        client.step("Action: inventory")


def test_a_server_that_says_come_back_at_once_is_not_flooded() -> None:
    calls: list[str] = []

    def answer(path: str, body: dict[str, Any], headers: dict[str, str]) -> bytes | None:
        calls.append(path)
        return http_answer({"detail": "full"}, 503, Retry_After="0")

    with raw_server(answer) as url, pytest.raises(EnvServerError, match=r"HTTP 503.* the limit of 0.5 s"):
        TextCraftClient(url, timeout=0.5)
    assert len(calls) <= 10


@pytest.mark.parametrize(("retry_after", "is_long"), [("3600", True), ("in a while", None), ("-1", None)])
def test_a_full_server_that_asks_for_too_much_patience_or_names_no_time_is_not_waited_for(
    retry_after: str, is_long: bool | None
) -> None:
    calls: list[str] = []

    def answer(path: str, body: dict[str, Any], headers: dict[str, str]) -> bytes | None:
        calls.append(path)
        return http_answer({"detail": "full"}, 503, Retry_After=retry_after)

    problem = "to be asked again in 3600 s, which is beyond the limit of 60 s" if is_long else "/create: HTTP 503: "
    with raw_server(answer) as url, pytest.raises(EnvServerError, match=re.escape(problem)):
        TextCraftClient(url, timeout=60)
    assert calls == ["/create"]


@pytest.mark.parametrize("zone", ["GMT", "-0000"])
def test_a_date_in_retry_after_is_waited_for(zone: str) -> None:
    """HTTP's dates have whole seconds, so one that is two seconds away lies between one and two in the future."""
    times: list[float] = []

    def answer(path: str, body: dict[str, Any], headers: dict[str, str]) -> bytes | None:
        times.append(time.time())
        if len(times) > 1:
            return published_textcraft(path, body, headers)
        date = formatdate(times[0] + 2, usegmt=True).replace("GMT", zone)
        return http_answer({"detail": "full"}, 503, Retry_After=date)

    with raw_server(answer) as url:
        client = TextCraftClient(url, timeout=60)
    assert times[1] - times[0] > 0.9
    assert client.retries == 1


def test_a_date_in_the_past_means_now() -> None:
    calls: list[str] = []

    def answer(path: str, body: dict[str, Any], headers: dict[str, str]) -> bytes | None:
        calls.append(path)
        if len(calls) > 1:
            return published_textcraft(path, body, headers)
        return http_answer({"detail": "full"}, 503, Retry_After="Sun, 06 Nov 1994 08:49:37 GMT")

    with raw_server(answer) as url:
        TextCraftClient(url, timeout=60)
    assert calls == ["/create", "/create"]


def test_a_host_that_takes_no_connection_is_given_up_long_before_the_time_for_an_answer() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        # The kernel drops what comes when the queue is full, as a firewall would.
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(EnvUnreachable, match=rf"POST {url}/create: no connection within 0.1 s \(tries: 3\)"):
            TextCraftClient(url, timeout=3600, connect_timeout=0.1, max_retries=2)


def test_a_name_that_does_not_resolve_is_called_so() -> None:
    with pytest.raises(EnvUnreachable, match=r"/create: .*(name|resolution).* \(tries: 1\)") as caught:
        TextCraftClient("http://no-such-host.invalid:1", max_retries=0)
    assert "refused" not in str(caught.value)


def test_a_question_is_asked_again_also_of_a_server_that_knows_no_request_ids() -> None:
    asked: list[str] = []

    def answer(path: str, body: dict[str, Any], headers: dict[str, str]) -> bytes | None:
        if path.startswith("/available_actions"):
            asked.append(path)
            return http_answer(["go"]) if len(asked) > 1 else None
        return published_textcraft(path, body, headers)

    with raw_server(answer) as url, TextCraftClient(url) as client:
        assert client.available_actions() == ["go"]
        assert client.retries == 1


# --------------------------------------------------------------------------------------------------------------- access


def test_the_token_goes_with_every_call_to_the_server_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AGENTGYM_TOKEN", " s3cret \n")
    netrc = tmp_path / "netrc"
    netrc.write_text("default login someone password else\n")
    monkeypatch.setenv("NETRC", str(netrc))
    seen: list[tuple[str, str | None]] = []
    elsewhere: list[str] = []

    def other(path: str, body: dict[str, Any], headers: dict[str, str]) -> bytes | None:
        elsewhere.append(path)
        return http_answer({})

    def answer(path: str, body: dict[str, Any], headers: dict[str, str]) -> bytes | None:
        seen.append((path, headers.get("authorization")))
        if path == "/step":
            return http_answer({}, 307, Location=f"{other_url}/step")
        return published_textcraft(path, body, headers)

    with raw_server(other) as other_url, raw_server(answer) as url, TextCraftClient(url) as client:
        client.reset(1)
        client.available_actions()
        with pytest.raises(EnvServerError, match="HTTP 307"):
            client.step("Action: inventory")
    assert [path.partition("?")[0] for path, _ in seen] == [
        "/create",
        "/reset",
        "/available_actions",
        "/step",
        "/close",
    ]
    assert {token for _, token in seen} == {"Bearer s3cret"}
    assert elsewhere == []


def test_a_server_that_wants_a_token_serves_who_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTGYM_TOKEN", raising=False)
    with serve(build_app(scripted_spec(), token="s3cret")) as url:
        with pytest.raises(EnvServerError, match="HTTP 401"):
            ScriptedClient(url)
        with pytest.raises(ConfigError, match="HTTP 401: the server wants its token in AGENTGYM_TOKEN"):
            check_server(url, "scripted")
        monkeypatch.setenv("AGENTGYM_TOKEN", "s3cret")
        check_server(url, "scripted")
        with ScriptedClient(url) as client:
            assert client.reset(1) == "item 1 step 0"


def test_without_a_token_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTGYM_TOKEN", raising=False)
    seen: list[bool] = []

    def answer(path: str, body: dict[str, Any], headers: dict[str, str]) -> bytes | None:
        seen.append("authorization" in headers)
        return published_textcraft(path, body, headers)

    with raw_server(answer) as url:
        TextCraftClient(url).close()
    assert seen == [False, False]


@pytest.mark.parametrize("token", ["two words", "line\nbreak", "caf\N{LATIN SMALL LETTER E WITH ACUTE}"])
def test_what_cannot_be_a_token_is_refused_without_repeating_it(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTGYM_TOKEN", token)
    with pytest.raises(ConfigError, match="AGENTGYM_TOKEN: must be printable ASCII without spaces") as caught:
        TextCraftClient("http://127.0.0.1:1")
    assert token not in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "0.0.0.0"])
def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serve(build_app(scripted_spec()), host="0.0.0.0") as url:
        client = ScriptedClient(f"http://{host}:{url.rpartition(':')[2]}", max_retries=0)
        assert client.reset(1) == "item 1 step 0"
        client.close()


def test_after_a_broken_connection_any_other_server_is_not_asked_again() -> None:
    step_ids, answer = breaking(echo=False)
    refused = pytest.raises(EnvUnreachable, match="the connection broke")
    with raw_server(answer) as url, TextCraftClient(url) as client, refused:
        client.step("Action: inventory")
    assert len(step_ids) == 1


def test_a_create_whose_answer_is_lost_is_repeated_and_leaves_no_session_behind() -> None:
    script = Script()
    lost = {"/create": Fault.RESET}
    with (
        serve(build_app(scripted_spec(script))) as upstream,
        faulty_proxy(upstream, lambda call: lost.pop(call.path, None)) as proxy,
        ScriptedClient(proxy.url) as client,
    ):
        assert (client.retries, script.open) == (1, 1)
        client.close()
        assert script.open == 0


def test_a_restarted_server_does_not_know_the_session() -> None:
    with serve(build_app(scripted_spec())) as url:
        client = ScriptedClient(url)
        client.reset(1)
    with serve(build_app(scripted_spec()), port=int(url.rsplit(":", 1)[1])):
        with pytest.raises(EnvServerError, match="no session"):
            client.step("Action: go")
        client.close()


# ------------------------------------------------------------------------------------------------------- at the start


def test_the_check_passes_for_the_right_server(url: str) -> None:
    check_server(url, "textcraft")
    check_server(url + "/", "textcraft")


def test_the_check_says_in_one_line_how_to_start_a_missing_server() -> None:
    port = free_port()
    with pytest.raises(EnvUnreachable) as caught:
        check_server(f"http://127.0.0.1:{port}", "textcraft")
    message = str(caught.value)
    assert "\n" not in message
    assert f"http://127.0.0.1:{port}" in message
    assert message.endswith(f"agentgym-rl serve textcraft --host 127.0.0.1 --port {port}")


def test_the_check_refuses_a_server_of_another_task(url: str) -> None:
    with pytest.raises(ConfigError, match="serves 'textcraft', this run is for 'babyai'"):
        check_server(url, "babyai")


def test_the_check_reads_what_an_agentgym_server_says_of_itself() -> None:
    with raw_server(published_textcraft) as url:
        check_server(url, "textcraft")
        with pytest.raises(ConfigError, match="serves 'textcraft', this run is for 'webshop'"):
            check_server(url, "webshop")


def test_the_check_passes_for_a_server_that_greets_in_plain_text() -> None:
    answers = {"/": http_answer(b"ok"), "/step": http_answer({"detail": "Method Not Allowed"}, 405)}
    with raw_server(lambda path, body, headers: answers.get(path, http_answer(b"<html>", 404))) as url:
        check_server(url, "textcraft")


@pytest.mark.parametrize("address", ["???", "127.0.0.1:36001", "ftp://x", ""])
def test_the_check_refuses_what_is_no_url(address: str) -> None:
    with pytest.raises(ConfigError, match="must be a URL"):
        check_server(address, "textcraft")


@pytest.mark.parametrize("path", ["/wrong", "/textcraft/v2"])
def test_the_check_refuses_a_wrong_path_behind_the_right_host(url: str, path: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{url}{path}/step is not found: is the path behind the host")):
        check_server(url + path, "textcraft")


def test_the_check_passes_for_a_server_behind_a_path_and_runs_nothing() -> None:
    asked: list[str] = []

    def answer(path: str, body: dict[str, Any], headers: dict[str, str]) -> bytes | None:
        asked.append(path)
        known = {"/maze/step": http_answer({"detail": "Method Not Allowed"}, 405)}
        return known.get(path, http_answer({"detail": "Not Found"}, 404))

    with raw_server(answer) as url:
        check_server(f"{url}/maze/", "textcraft")
        with pytest.raises(ConfigError, match="/step is not found"):
            check_server(url, "textcraft")
    assert "/maze/create" not in asked


def test_the_check_refuses_a_web_site_that_answers_everything_with_a_page() -> None:
    with (
        raw_server(lambda path, body, headers: http_answer(b"<html>")) as url,
        pytest.raises(ConfigError, match="no environment server answers there"),
    ):
        check_server(url, "textcraft")


def test_the_check_says_when_a_server_wants_a_token() -> None:
    with (
        raw_server(lambda path, body, headers: http_answer({"detail": "no"}, 401)) as url,
        pytest.raises(ConfigError, match="HTTP 401: the server wants its token in AGENTGYM_TOKEN"),
    ):
        check_server(url, "textcraft")


def test_of_several_servers_the_check_names_the_one_that_is_wrong(url: str) -> None:
    missing = f"http://127.0.0.1:{free_port()}"
    with serve(build_app(scripted_spec())) as other, serve(build_app(SPEC)) as second:
        check_server([url, second], "textcraft")
        check_server(f"{url}, {second}", "textcraft")
        with pytest.raises(EnvUnreachable) as caught:
            check_server([url, missing, second], "textcraft")
        assert str(caught.value).startswith(f"no textcraft server at {missing}: ")
        assert url not in str(caught.value)
        with pytest.raises(ConfigError, match=rf"{other}: serves 'scripted'.* \(also wrong: {missing}\)$"):
            check_server([url, other, missing], "textcraft")


def test_all_servers_are_checked_side_by_side() -> None:
    everyone = threading.Barrier(4, timeout=60)

    def answer(path: str, body: dict[str, Any], headers: dict[str, str]) -> bytes | None:
        if path == "/health":
            everyone.wait()  # passes only when all four are being asked at once
        return published_textcraft(path, body, headers)

    with ExitStack() as stack:
        check_server([stack.enter_context(raw_server(answer)) for _ in range(4)], "textcraft")
