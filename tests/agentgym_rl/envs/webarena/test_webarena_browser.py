"""The environment in a real Chromium, on the small sites."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import requests
from support.judges import scripted_model
from support.servers import serve

pytest.importorskip("playwright")

from agentgym_rl.client.base import EnvClient
from agentgym_rl.envs.base import InvalidCall
from agentgym_rl.envs.checking import child_processes
from agentgym_rl.envs.registry import EnvSpec
from agentgym_rl.envs.server import build_app
from agentgym_rl.envs.webarena import SMALL_TASKS, SPEC, WebArenaSettings, browsing
from agentgym_rl.envs.webarena.addresses import BLANK
from agentgym_rl.envs.webarena.environment import WebArena
from agentgym_rl.envs.webarena.expert import SOLUTIONS, Step, solution
from agentgym_rl.envs.webarena.sites.server import small_sites
from agentgym_rl.errors import EnvServerError, EnvTimeout
from agentgym_rl.viewer.panel import is_image

pytestmark = [pytest.mark.browser, pytest.mark.server]


def served_spec(settings: WebArenaSettings | None = None) -> EnvSpec:
    """The spec with no more children than a test needs."""
    spec = SPEC if settings is None else SPEC.with_settings(settings)
    assert spec.isolation is not None
    return replace(spec, isolation=replace(spec.isolation, started_ahead=0))


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serve(build_app(served_spec())) as url:
        yield url


@pytest.fixture(scope="module")
def shared() -> Iterator[WebArena]:
    """An environment in this process, for tests that look behind the text."""
    environment = SPEC.environment()
    assert isinstance(environment, WebArena)
    yield environment
    environment.close()


def number_in(text: str, role: str, name: str) -> str:
    """The number in front of an element."""
    match = re.search(rf"\[(\d+)\] {role} {re.escape(repr(name))}", text)
    assert match is not None, f"no {role} {name!r} in\n{text}"
    return match[1]


def action_of(step: Step, text: str) -> str:
    """A step of a solution as an agent writes it who sees ``text``."""
    name, *arguments = step
    if name in ("click", "type", "hover"):
        arguments = [number_in(text, arguments[0], arguments[1]), *arguments[2:]]
    return f"```{' '.join([name, *(f'[{argument}]' for argument in arguments)])}```"


def play(client: EnvClient, item: int, steps: tuple[Step, ...]) -> list[float]:
    """The rewards of an episode, which must end with the last step."""
    seen, rewards = client.reset(item), []
    for number, step in enumerate(steps, 1):
        output = client.step(f"I know what to do. {action_of(step, seen)}")
        assert "had no effect" not in output.state, output.state
        assert output.done == (number == len(steps))
        seen = output.state
        rewards.append(output.reward)
    return rewards


def act(environment: WebArena, *step: str) -> Any:
    return environment.step(action_of(step, environment.observation()))


# ------------------------------------------------------------------------------------------------------ whole episodes


def test_golden_episodes_of_all_tasks_end_with_reward_one_and_stopping_at_once_with_none(server: str) -> None:
    def episode(item: int) -> list[float]:
        with SPEC.client(server) as client:
            client.reset(item)
            output = client.step("```stop [I do not know]```")
            assert (output.reward, output.done) == (0.0, True), item
            return play(client, item, SOLUTIONS[item])

    with ThreadPoolExecutor(4) as threads:
        rewards = list(threads.map(episode, range(20)))
    assert [sum(each) for each in rewards] == [1.0] * 20
    assert all(each[:-1] == [0.0] * (len(each) - 1) for each in rewards)


def test_the_expert_says_the_same_actions_as_an_agent_would(shared: WebArena) -> None:
    shared.reset(19)
    actions = solution(shared)
    assert [shared.step(action).reward for action in actions] == [0.0] * 6 + [1.0]
    with pytest.raises(InvalidCall, match="task 19 has ended"):
        shared.step(actions[-1])


# --------------------------------------------------------------------------------------------------------------- wire


def test_answers_have_the_fields_and_types_of_the_protocol(server: str) -> None:
    created = requests.post(f"{server}/create", timeout=60).json()
    assert list(created) == ["env_idx"]
    handle = {"env_idx": created["env_idx"]}
    before = requests.get(f"{server}/observation", params=handle, timeout=60)
    assert before.status_code == 400 and "reset it first" in before.json()["detail"]

    started = requests.post(f"{server}/reset", json=handle | {"seed": 0, "idx": 11}, timeout=60).json()
    assert started["observation"].startswith("Tab 0 (current): All posts - Postmill\n\n[1] RootWebArea")
    assert started["sites"] == ["reddit"] and started["object"].startswith("Show me the best voted posts")

    step = requests.post(f"{server}/step", json=handle | {"action": "```goto [reddit.com/f/baking]```"}, timeout=60)
    content = step.json()
    assert {"observation", "reward", "terminated", "truncated", "info"} <= content.keys()
    assert (content["reward"], content["terminated"], content["truncated"]) == (0.0, False, False)

    seen = requests.get(f"{server}/observation", params=handle, timeout=60).json()
    assert seen == (
        f"OBSERVATION:\n{content['observation']}\nURL: http://reddit.com/f/baking\nOBJECTIVE: {started['object']}\n"
        "PREVIOUS ACTION: goto [reddit.com/f/baking]"
    )
    metadata = requests.get(f"{server}/observation_metadata", params=handle, timeout=60).json()
    assert metadata["image"].startswith("data:image/png;base64,iVBOR")
    nodes = metadata["text"]["obs_nodes_info"]
    assert nodes["1"] == {"role": "RootWebArea", "name": "baking - Postmill", "union_bound": [0, 0, 1280, 720]}
    assert requests.post(f"{server}/render", json=handle, timeout=60).json() == metadata["image"]

    outside = requests.post(f"{server}/reset", json=handle | {"idx": 20}, timeout=60)
    assert outside.status_code == 400 and outside.json() == {"detail": "idx 20: must be in 0..19"}
    assert requests.post(f"{server}/close", json=handle, timeout=60).json() == {"closed": "closed"}


def test_two_sessions_do_not_disturb_each_other(server: str) -> None:
    with SPEC.client(server) as first, SPEC.client(server) as second:
        start, other = first.reset(4), second.reset(4)
        assert start == other
        for step in SOLUTIONS[4][:-1]:
            first.step(action_of(step, first.observation()))
        assert "Tall Floor Lamp" in first.observation()
        wishes = second.step("```goto [http://onestopmarket.com/wishlist]```").state
        assert "No items yet." in wishes
        assert first.step("```stop []```").reward == 1.0
        assert second.step("```stop []```").reward == 0.0


def test_a_reset_leaves_nothing_of_the_episode_before(server: str) -> None:
    with SPEC.client(server) as client:
        start = client.reset(4)
        assert sum(play(client, 4, SOLUTIONS[4])) == 1.0
        assert client.reset(4) == start
        assert "No items yet." in client.step("```goto [http://onestopmarket.com/wishlist]```").state


# ------------------------------------------------------------------------------------------------------------- actions


def test_tabs_are_opened_focused_and_closed(shared: WebArena) -> None:
    shared.reset(11)
    assert act(shared, "new_tab").observation.startswith(
        "Tab 0: All posts - Postmill | Tab 1 (current): \n\n[1] RootWebArea ''"
    )
    act(shared, "goto", "http://gitlab.com")
    assert shared.url == "http://gitlab.com/"
    assert act(shared, "tab_focus", "0").observation.startswith(
        "Tab 0 (current): All posts - Postmill | Tab 1: Projects - GitLab"
    )
    assert act(shared, "tab_focus", "2").fail_error == "there is no tab 2; tabs are 0..1"
    assert act(shared, "close_tab").observation.startswith("Tab 0 (current): Projects - GitLab\n")
    assert act(shared, "close_tab").observation.startswith("Tab 0 (current): \n")


def test_history_scrolling_hovering_and_keys(shared: WebArena) -> None:
    shared.reset(0)
    assert act(shared, "go_back").fail_error == "there is no page to go back to"
    act(shared, "hover", "link", "Lamps")
    act(shared, "click", "link", "Amber Desk Lamp")
    top = shared.observation()
    assert "button 'Submit Review'" not in top
    scrolled = act(shared, "scroll", "down").observation
    assert "button 'Submit Review'" in scrolled and "link 'Lamps'" not in scrolled
    assert act(shared, "scroll", "up").observation == top
    assert "'Home - One Stop Market'" in act(shared, "go_back").observation
    assert "'Amber Desk Lamp - One Stop Market'" in act(shared, "go_forward").observation
    assert act(shared, "press", "Wrong").fail_error == "there is no key 'Wrong'"
    act(shared, "click", "textbox", "Quantity")
    act(shared, "press", "ctrl+a")
    act(shared, "press", "Backspace")
    assert "value: '31'" in act(shared, "type", "textbox", "Quantity", "31", "0").observation


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("I click the lamp", "no action found"),
        ("```click [9999]```", "no element [9999] is in view"),
        ("```goto [http://example.org/x]```", "http://example.org/x is not on the sites of this task"),
        ("```goto [file:///etc/passwd]```", "file:///etc/passwd is not on the sites"),
        ("```goto [javascript:alert(1)]```", "is not on the sites"),
        ("```goto [http://127.0.0.1:1]```", "is not on the sites"),
        ("```goto [chrome://settings]```", "is not on the sites"),
    ],
)
def test_what_cannot_be_done_is_told_and_changes_nothing(shared: WebArena, text: str, why: str) -> None:
    start = shared.reset(0).observation
    result = shared.step(text)
    assert (result.reward, result.done) == (0.0, False)
    assert why in result.fail_error
    assert result.observation == f"The action had no effect: {result.fail_error}\n{start}"


@pytest.mark.parametrize(
    "text", ["\ud800", "\x00\x07", "x" * 20_000, "行动 \U0001f600", "<|im_end|>", "'\"`$\\{}", "a\nb", "%zz%00"]
)
def test_odd_texts_in_actions_are_no_faults(shared: WebArena, text: str) -> None:
    shared.reset(0)
    field = number_in(shared.observation(), "textbox", "Search the store")
    for action in (f"press [{text}]", f"goto [http://reddit.com/{text}]", f"goto [{text}]", "goto [shop.com]"):
        assert shared.step(f"```{action}```").reward == 0.0
    shared.reset(0)
    assert shared.step(f"```type [{field}] [{text}] [0]```").fail_error == ""
    assert shared.step(f"```stop [{text}]```").done


def test_an_agent_that_logs_in_is_logged_in(shared: WebArena) -> None:
    shared.reset(12)
    act(shared, "click", "link", "Log in")
    act(shared, "type", "textbox", "User name", "nora", "0")
    assert "Welcome, nora!" in act(shared, "type", "textbox", "Password", "nora-password", "1").observation


# ---------------------------------------------------------------------------------------------- pages of the tests' own


@pytest.fixture
def page(shared: WebArena) -> Any:
    """Replaces the body of the page that the task shows, as its site might have sent it."""

    def show(body: str) -> str:
        shared.reset(0)
        session, browser = shared._session, shared._world.browser
        browser.run(session.page.evaluate("body => { document.body.innerHTML = body }", body))
        shared._look()
        return shared.observation()

    return show


def test_a_link_that_opens_a_tab_makes_it_the_current_one(shared: WebArena, page: Any) -> None:
    page("<a target='_blank' href='/cart'>Cart in a tab</a>")
    opened = act(shared, "click", "link", "Cart in a tab").observation
    assert opened.startswith("Tab 0: Home - One Stop Market | Tab 1 (current): Shopping Cart - One Stop Market")


def test_a_link_that_leads_outside_is_followed_no_further(shared: WebArena, page: Any) -> None:
    page("<a href='http://outside.invalid/x'>Away</a><p>Here</p>")
    result = act(shared, "click", "link", "Away")
    assert result.fail_error == "this leads to http://outside.invalid/x, which is not on the sites of this task"
    assert shared.url.startswith("http://onestopmarket.com")


def test_questions_of_a_page_are_answered_with_yes_and_shown(shared: WebArena, page: Any) -> None:
    page("<button onclick=\"document.title = confirm('Really?')\">Delete</button>")
    assert act(shared, "click", "button", "Delete").observation.startswith(
        "The page said: Really?\nTab 0 (current): true\n"
    )


def test_an_element_that_has_gone_is_reported(shared: WebArena, page: Any) -> None:
    seen = page("<button>Fleeting</button>")
    shared._world.browser.run(shared._session.page.evaluate("document.body.innerHTML = ''"))
    result = shared.step(action_of(("click", "button", "Fleeting"), seen))
    assert result.fail_error.endswith("is not there any more")


def test_what_a_page_loads_after_a_click_is_waited_for(shared: WebArena, page: Any) -> None:
    page(
        "<p id='out'>nothing</p><button onclick=\"fetch('/cart').then(r => r.text())"
        ".then(t => { out.textContent = 'got ' + (t.length > 0) })\">Load</button>"
    )
    assert "StaticText 'got true'" in act(shared, "click", "button", "Load").observation


# ----------------------------------------------------------------------------------------- further tasks and evaluators


def with_tasks(tmp_path: Path, *tasks: dict[str, Any], **settings: Any) -> WebArena:
    """An environment in this process with tasks of its own on the small sites."""
    base = json.loads(SMALL_TASKS.read_text())[0] | {"storage_state": None}
    rows = [base | task | {"task_id": number} for number, task in enumerate(tasks)]
    (tmp_path / "tasks.json").write_text(json.dumps(rows))
    chosen = WebArenaSettings(task_file=tmp_path / "tasks.json", **settings)
    environment = SPEC.with_settings(chosen).environment()
    assert isinstance(environment, WebArena)
    return environment


def test_with_screenshots_each_answer_carries_a_picture_of_the_page(tmp_path: Path) -> None:
    environment = with_tasks(tmp_path, {}, screenshots=True)
    try:
        start = environment.reset(0)
        step = environment.step("```scroll [down]```")
    finally:
        environment.close()
    wire = SPEC.wire
    for told in (wire.was_reset(1, start), wire.stepped(step)["info"]):
        assert is_image(told["screenshot"])
    plain = replace(step, screenshot=None)
    assert "screenshot" not in wire.stepped(plain)["info"]


def page_task(url: str, locator: str, required: dict[str, Any], **more: Any) -> dict[str, Any]:
    target = {"url": url, "locator": locator, "required_contents": required} | more
    return {"eval": {"eval_types": ["program_html"], "reference_answers": None, "program_html": [target]}}


HOME = "__SHOPPING__/"
HEADING = "document.querySelector('h1').outerText"


@pytest.mark.parametrize(
    ("task", "reward"),
    [
        (page_task("last", HEADING, {"exact_match": "home"}), 1.0),
        (page_task("last", HEADING, {"exact_match": "cart"}), 0.0),
        (page_task("last", "", {"must_include": ["Cast Iron Pan", "no such thing |OR| $39.00"]}), 1.0),
        (page_task("__SHOPPING__/cart", HEADING, {"must_include": ["Shopping Cart"]}), 1.0),
        (page_task("last", "document.querySelector('.absent').outerText", {"exact_match": "x"}), 0.0),
        (page_task("last", "document.querySelector('h1').absent", {"exact_match": ""}), 1.0),
        (page_task("last", HEADING, {"exact_match": "changed"},
                   prep_actions=["document.querySelector('h1').innerText = 'changed'", "absent.click()"]), 1.0),
        (page_task("last", "[...document.querySelectorAll('th')].map(e => e.innerText).join()",
                   {"exact_match": "Product,Price"}), 1.0),
        (page_task("func:reddit_get_post_url('__REDDIT__/f/gardening/2/my-compost-smells/-/comment/4')", HEADING,
                   {"exact_match": "My compost smells"}), 1.0),
        (page_task("__GITLAB__/liam/tide-table/-/project_members",
                   "func:gitlab_get_project_memeber_role(__page__, 'mina')", {"exact_match": "Developer"}), 1.0),
        (page_task("__GITLAB__/liam/tide-table/-/project_members",
                   "func:gitlab_get_project_memeber_role(__page__, 'nobody')", {"exact_match": "Developer"}), 0.0),
    ],
)  # fmt: skip
def test_pages_are_looked_at_as_the_task_says(tmp_path: Path, task: dict[str, Any], reward: float) -> None:
    if "__REDDIT__" in str(task):
        task = json.loads(json.dumps(task).replace("__REDDIT__", small_sites().addresses["REDDIT"]))
    environment = with_tasks(tmp_path, task)
    environment.reset(0)
    assert environment.step("```stop []```").reward == reward
    environment.close()


def test_a_locator_that_is_no_javascript_is_a_fault_and_no_score(tmp_path: Path) -> None:
    environment = with_tasks(tmp_path, page_task("last", "document.querySelector(", {"exact_match": "x"}))
    environment.reset(0)
    with pytest.raises(ValueError, match=r"locator 'document.querySelector\('"):
        environment.step("```stop []```")
    environment.close()


def test_all_checks_of_a_task_must_hold(tmp_path: Path) -> None:
    both = {"eval_types": ["string_match", "url_match"], "reference_answers": {"must_include": ["lamp"]},
            "reference_url": "__SHOPPING__/cart"}  # fmt: skip
    environment = with_tasks(tmp_path, {"eval": both})
    rewards = []
    for actions in (["stop [lamp]"], ["goto [onestopmarket.com/cart]", "stop [pan]"],
                    ["goto [onestopmarket.com/cart]", "stop [lamp]"]):  # fmt: skip
        environment.reset(0)
        rewards.append([environment.step(f"```{action}```").reward for action in actions][-1])
    environment.close()
    assert rewards == [0.0, 0.0, 1.0]


def test_the_shop_is_asked_over_magentos_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_magento() as address:
        monkeypatch.setenv("SHOPPING", address)
        order = page_task(
            "func:shopping_get_latest_order_url()", HEADING, {"exact_match": "/sales/order/view/order_id/188/"}
        )
        author = page_task("last", "func:shopping_get_sku_latest_review_author('B 1/2')", {"exact_match": "Emma"})
        rating = page_task("last", "func:shopping_get_sku_latest_review_rating('B 1/2')", {"must_include": ["80"]})
        environment = with_tasks(tmp_path, order, author, rating)
        for item in range(3):
            environment.reset(item)
            assert environment.step("```stop []```").reward == 1.0, item
        environment.close()


class scripted_magento:
    """A shop that shows the path of each page, and answers the calls of Magento's interface that tasks make."""

    _ANSWERS: ClassVar = {
        "/rest/default/V1/integration/admin/token": '"a-token"',
        "/rest/default/V1/orders": '{"items": [{"increment_id": "000000188"}]}',
        "/rest/default/V1/products/B%201%2F2/reviews": (
            '[{"nickname": "Old", "ratings": []}, {"nickname": "Emma", "ratings": [{"percent": 80}]}]'
        ),
    }

    def __enter__(self) -> str:
        answers = self._ANSWERS

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                body = answers.get(path, f"<h1>{path}</h1>")
                allowed = path not in answers or self.headers.get("Authorization") == "Bearer a-token"
                self._send(body if allowed or self.command == "POST" else "", 200 if allowed else 401)

            def do_POST(self) -> None:
                sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                known = sent == {"username": "admin", "password": "admin1234"}
                self._send(answers[self.path] if known else "", 200 if known else 401)

            def _send(self, body: str, status: int) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Content-Type", "text/html" if body.startswith("<") else "application/json")
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_a_task_that_cannot_be_judged_or_played_is_refused_at_reset(tmp_path: Path) -> None:
    fuzzy = {"eval": {"eval_types": ["string_match"], "reference_answers": {"fuzzy_match": ["16min"]}}}
    environment = with_tasks(tmp_path, fuzzy, {"start_url": "__MAP__"}, {"storage_state": "./.auth/absent_state.json"})
    with pytest.raises(InvalidCall, match="task 0 is judged by a language model: start the server with --judge-url"):
        environment.reset(0)
    with pytest.raises(InvalidCall, match="task 1 needs MAP: set the site's address"):
        environment.reset(1)
    with pytest.raises(InvalidCall, match=r"task 2 begins logged in: there is no .*absent_state.json"):
        environment.reset(2)
    environment.close()


def test_with_a_judge_meanings_are_compared_at_stop(tmp_path: Path) -> None:
    fuzzy = {"eval": {"eval_types": ["string_match"], "reference_answers": {"fuzzy_match": ["16min"]}}}
    with scripted_model("no", "yes", "") as (url, asked):
        environment = with_tasks(tmp_path, fuzzy, judge_url=url, judge_model="small")
        rewards = []
        for answer in ("an hour", "a quarter of an hour"):
            environment.reset(0)
            rewards.append(environment.step(f"```stop [{answer}]```").reward)
        environment.reset(0)
        with pytest.raises(EnvServerError, match="gave no verdict"):
            environment.step("```stop [soon]```")
        environment.close()
    assert rewards == [0.0, 1.0]
    assert "a quarter of an hour" in asked[1]["messages"][0]["content"]


def test_a_login_state_is_found_in_the_folder_that_is_named(tmp_path: Path) -> None:
    task = {"storage_state": "./.auth/reddit_state.json", "start_url": "__REDDIT__"}
    environment = with_tasks(tmp_path, task, login_folder=SMALL_TASKS.parent)
    assert "Welcome, nora!" in environment.reset(0).observation
    environment.close()


# ------------------------------------------------------------------------------------------------------ slow pages


class slow_site:
    """A shop whose pages take their time, and one request of which never ends."""

    _LINKS = "".join(f"<p><a href='/{name}'>{name}</a></p>" for name in ("late", "streamed", "stuck", "quick"))
    _LINKS += "<p><a target=_blank href='/late'>late anew</a></p>"

    def __enter__(self) -> str:
        links, end = self._LINKS, threading.Event()
        self._end = end

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/never":
                    end.wait(60)
                    return
                if self.path == "/late":
                    time.sleep(0.6)
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                self.wfile.write(f"<title>{self.path}</title>{links}<script>".encode())
                self.wfile.write(b"fetch('/never');</script>" if self.path == "/stuck" else b"</script>")
                if self.path == "/streamed":
                    self.wfile.write(b" " * 5000)
                    self.wfile.flush()
                    time.sleep(0.6)
                self.wfile.write(b"<p>That was all.</p>")

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._server.shutdown()
        self._server.server_close()


def test_a_page_is_looked_at_once_it_has_loaded_and_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(browsing, "_SETTLE_LIMIT_S", 2.0)
    monkeypatch.setattr(browsing, "_AWAIT_LOAD_S", 0.05)
    with slow_site() as address:
        monkeypatch.setenv("SHOPPING", address)
        environment = with_tasks(tmp_path, {})
        environment.reset(0)
        for name in ("late", "streamed"):
            seen = act(environment, "click", "link", name).observation
            assert seen.startswith(f"Tab 0 (current): /{name}\n") and "That was all." in seen
        seen = act(environment, "click", "link", "late anew").observation
        assert seen.startswith("Tab 0: /streamed | Tab 1 (current): /late\n") and "That was all." in seen
        act(environment, "close_tab")
        assert "That was all." in act(environment, "click", "link", "stuck").observation
        assert len(environment._session._tab.in_flight) == 1
        assert "That was all." in act(environment, "click", "link", "quick").observation
        assert len(environment._session._tab.in_flight) == 0
        environment.close()


# --------------------------------------------------------------------------------------------------------------- faults


def chromium_of(pid: int) -> list[int]:
    """Process ids of the browsers (not of their renderers) that a process started."""
    found = []
    for each in child_processes(pid):
        try:
            command = Path(f"/proc/{each}/cmdline").read_bytes().decode().split("\0")
        except OSError:  # it has ended meanwhile
            continue
        if any(part.startswith("--remote-debugging-pipe") for part in command) and "--type" not in " ".join(command):
            found.append(each)
    return found


def test_a_dead_browser_is_replaced_and_only_its_sessions_fail() -> None:
    spec = served_spec()
    assert spec.isolation is not None
    spec = replace(spec, isolation=replace(spec.isolation, sessions_per_child=2))
    before = set(chromium_of(os.getpid()))
    with serve(build_app(spec)) as url:
        clients = [spec.client(url) for _ in range(2)]
        clients[0].reset(0)
        [browser] = set(chromium_of(os.getpid())) - before
        other = spec.client(url)
        other.reset(0)
        clients[1].reset(0)
        os.kill(browser, signal.SIGKILL)
        for client in clients:
            with pytest.raises(EnvServerError, match="HTTP 500"):
                client.step("```scroll [down]```")
        assert "had no effect" not in other.step("```scroll [down]```").state
        assert sum(play(clients[0], 12, SOLUTIONS[12])) == 1.0
        assert len(set(chromium_of(os.getpid())) - before) == 2
        for client in [*clients, other]:
            client.close()
    assert _eventually(lambda: set(chromium_of(os.getpid())) <= before)


def _eventually(holds: Any, patience_s: float = 10.0) -> bool:
    end = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_a_site_that_does_not_answer_is_a_fault_and_a_page_that_hangs_a_time_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hang.wait(30)

        def log_message(self, format: str, *args: object) -> None:
            pass

    slow = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    slow.daemon_threads = True
    threading.Thread(target=slow.serve_forever, daemon=True).start()
    monkeypatch.setenv("SHOPPING", f"http://127.0.0.1:{slow.server_address[1]}")
    monkeypatch.setenv("REDDIT", "http://127.0.0.1:9")
    try:
        task = {"start_url": "__SHOPPING__"}, {"start_url": "__REDDIT__"}
        environment = with_tasks(tmp_path, *task, navigation_timeout=1.0)
        started = environment.reset(0)
        assert (started.observation, started.sites, started.intent) == ("TimeoutError", "Error", "Error")
        with pytest.raises(InvalidCall, match="the last reset timed out"):
            environment.step("```scroll [down]```")
        with pytest.raises(EnvServerError, match=r"ERR_CONNECTION_REFUSED|ERR_UNSAFE_PORT"):
            environment.reset(1)
        environment.close()
        with_time_out = SPEC.with_settings(WebArenaSettings(task_file=tmp_path / "tasks.json", navigation_timeout=1.0))
        assert with_time_out.isolation is not None
        spec = replace(with_time_out, isolation=replace(with_time_out.isolation, started_ahead=0))
        timed_out = pytest.raises(EnvTimeout, match=r"webarena_0 .*the browser reports TimeoutError")
        with serve(build_app(spec)) as url, spec.client(url) as client, timed_out:
            client.reset(0)
    finally:
        hang.set()
        slow.shutdown()
        slow.server_close()


class odd_site:
    """A shop some of whose pages are elsewhere, gone, or out of order, and a page that is no site of the tasks'."""

    _ASKED: ClassVar = ("outside", "other", "hanging", "file", "circle", "status/401", "status/404", "status/410")
    _BROKEN: ClassVar = ("status/429", "status/500", "dropped", "dead", "stuck")

    def __enter__(self) -> str:
        self._end, self._servers = threading.Event(), [self._serve(), self._serve()]
        return self._address(0)

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def _address(self, number: int) -> str:
        return f"http://127.0.0.1:{self._servers[number].server_address[1]}"

    def _targets(self) -> dict[str, str]:
        """Where pages redirect to."""
        return {
            "/outside": "http://outside.invalid/x",
            "/other": f"{self._address(1)}/other-page",
            "/hanging": f"{self._address(1)}/stuck",
            "/file": "file:///etc/passwd",
            "/circle": "/circle",
            "/dead": "http://127.0.0.1:9/",
        }

    def _serve(self) -> ThreadingHTTPServer:
        site, seen = self, set[str]()
        names = (*self._ASKED, *self._BROKEN)
        links = "".join(
            f"<a href='/{name}'>{name}</a> <a target=_blank href='/{name}'>{name} anew</a> " for name in names
        )

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path, known = self.path, self.path in seen
                seen.add(path)
                if path == "/dropped":
                    self.close_connection = True
                elif path == "/stuck":
                    site._end.wait(30)
                elif path.startswith("/once/") and not known:
                    self._send(200, "<title>Once</title>")
                elif "/status/" in path:
                    self._send(int(path[-3:]))
                elif (name := path[path.rfind("/") :]) in site._targets():
                    self._send(302, location=site._targets()[name])
                else:
                    self._send(200, f"<title>{path}</title><form method=post><button>Post</button></form>{links}")

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self._send(200, "<title>Posted</title><a href='/last'>last</a>")

            def _send(self, status: int, body: str = "", location: str = "") -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Content-Type", "text/html")
                self.send_header("Cache-Control", "no-store")
                for name, value in (("Location", location), ("WWW-Authenticate", "Basic" if status == 401 else "")):
                    if value:
                        self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebArena]:
    with odd_site() as address, pytest.MonkeyPatch.context() as patch:
        patch.setattr(browsing, "_SETTLE_LIMIT_S", 1.0)
        patch.setenv("SHOPPING", address)
        patch.setenv("GITLAB", "http://127.0.0.1:9")
        tasks = {"start_url": "__SHOPPING__/start"}, {"start_url": "__SHOPPING__/status/404"}
        environment = with_tasks(tmp_path_factory.mktemp("odd"), *tasks, navigation_timeout=1.0, quiet=0.05)
        yield environment
        environment.close()


def go_to(environment: WebArena, name: str, way: str) -> Any:
    if way == "goto":
        return act(environment, "goto", f"onestopmarket.com/{name}")
    return act(environment, "click", "link", f"{name}{way.removeprefix('click')}")


def refusal(result: Any, start: str) -> str:
    """Why an action was refused that left everything but the keyboard's focus as it was."""
    told, _, seen = result.observation.partition("\n")
    assert told == f"The action had no effect: {result.fail_error}" and result.fail_error, result
    assert seen.replace(" focused: True", "") == start.replace(" focused: True", "")
    assert (result.reward, result.done) == (0.0, False)
    return str(result.fail_error)


@pytest.mark.parametrize("way", ["goto", "click", "click anew"])
def test_a_page_that_its_site_says_is_elsewhere_or_gone_is_refused_and_left(odd: WebArena, way: str) -> None:
    start = odd.reset(0).observation
    for name, why in (
        ("outside", "this leads to http://outside.invalid/x, which is not on the sites"),
        ("other", "/other-page, which is not on the sites of this task"),
        ("file", "http://onestopmarket.com/file leads to what is no page of a site"),
        ("circle", "http://onestopmarket.com/circle leads round in a circle"),
        ("status/401", "http://onestopmarket.com/status/401 is no page: the site answers with status 401"),
        ("status/404", "the site answers with status 404"),
        ("status/410", "the site answers with status 410"),
    ):
        assert why in refusal(go_to(odd, name, way), start)


@pytest.mark.parametrize("way", ["goto", "click"])
def test_a_page_outside_that_hangs_is_not_waited_for(odd: WebArena, way: str) -> None:
    start = odd.reset(0).observation
    assert "/stuck, which is not on the sites of this task" in refusal(go_to(odd, "hanging", way), start)


@pytest.mark.parametrize("way", ["goto", "click", "click anew"])
@pytest.mark.parametrize("name", ["status/429", "status/500", "dropped", "dead"])
def test_a_site_that_is_out_of_order_is_a_fault_however_it_is_asked(odd: WebArena, name: str, way: str) -> None:
    odd.reset(0)
    with pytest.raises(browsing.SiteDown, match="ERR_"):
        go_to(odd, name, way)


def test_a_site_that_hangs_and_a_start_page_that_has_gone_are_faults(odd: WebArena) -> None:
    odd.reset(0)
    with pytest.raises(browsing.SiteDown, match="Timeout"):
        go_to(odd, "stuck", "goto")
    with pytest.raises(browsing.SiteDown, match="ERR_HTTP_RESPONSE_CODE_FAILURE"):
        odd.reset(1)


@pytest.mark.parametrize(("name", "left_for"), [("status/404", "/last"), ("outside", "/last"), ("other", BLANK)])
def test_a_page_that_has_gone_meanwhile_is_refused_and_left(odd: WebArena, name: str, left_for: str) -> None:
    odd.reset(0)
    pages = [f"onestopmarket.com/once/{way}/{name}" for way in ("back", "forward", "again")]
    act(odd, "goto", pages[0])
    last = act(odd, "goto", "onestopmarket.com/last").observation
    assert refusal(act(odd, "go_back"), last) and odd.url.endswith("/last")
    act(odd, "goto", pages[1])
    act(odd, "go_back")
    assert refusal(act(odd, "go_forward"), last) and odd.url.endswith("/last")
    act(odd, "goto", pages[2])
    assert odd.url.endswith(pages[2])
    assert act(odd, "goto", pages[2]).fail_error != "" and odd.url.endswith(left_for)


def test_a_page_that_answered_a_form_is_not_gone_back_to_and_can_be_left_and_shown_again(odd: WebArena) -> None:
    odd.reset(0)
    act(odd, "click", "button", "Post")
    assert "status 404" in go_to(odd, "status/404", "goto").fail_error
    assert odd.url == "http://onestopmarket.com/start"
    act(odd, "click", "button", "Post")
    act(odd, "click", "link", "last")
    assert "is not sent a second time" in act(odd, "go_back").fail_error
    assert odd.url == "http://onestopmarket.com/last"


def test_a_tab_of_the_agents_own_stays_when_its_page_is_refused(odd: WebArena) -> None:
    odd.reset(0)
    blank = act(odd, "new_tab").observation
    assert "status 404" in refusal(go_to(odd, "status/404", "goto"), blank)


def test_a_tab_that_a_refused_link_opened_gives_way_to_the_one_it_was_opened_from(odd: WebArena) -> None:
    odd.reset(0)
    act(odd, "new_tab")
    act(odd, "tab_focus", "0")
    assert (
        go_to(odd, "outside", "click anew")
        .observation.partition("\n")[2]
        .startswith("Tab 0 (current): /start | Tab 1: ")
    )


def test_sessions_leave_no_visitor_at_the_small_sites(shared: WebArena) -> None:
    shared.reset(0)
    before = small_sites().num_visitors
    other = shared.another()
    other.reset(0)
    other.reset(1)
    assert small_sites().num_visitors == before + 1
    other.close()
    assert small_sites().num_visitors == before
