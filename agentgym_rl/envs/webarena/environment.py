"""WebArena: do on web sites what a sentence asks for.

An episode is a fresh browser context with its own cookies and tabs. The agent reads the visible part of the current
tab's accessibility tree, acts on its numbered nodes, and ends with ``stop [answer]``; the reward is paid then.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.async_api import TimeoutError as PlaywrightTimeout

from agentgym_rl.envs.base import Environment, InvalidCall, ResetResult, StepResult
from agentgym_rl.envs.webarena.actions import MAX_ECHO, Action, Kind, NotAnAction, read_action, written_action
from agentgym_rl.envs.webarena.addresses import BLANK, Addresses
from agentgym_rl.envs.webarena.browser import SharedBrowser
from agentgym_rl.envs.webarena.browsing import BrowsingSession, Refused, Timing, View
from agentgym_rl.envs.webarena.evaluators import PageChecks, score_answer
from agentgym_rl.envs.webarena.judge import KEY_VARIABLE, Judge
from agentgym_rl.envs.webarena.sites.server import SmallSites
from agentgym_rl.envs.webarena.tasks import START_TABS, Check, Task

TIMED_OUT, ERROR = "TimeoutError", "Error"
"""What a reset answers when the browser did not load the start page in time."""
_CLICKED = frozenset(
    {"button", "checkbox", "combobox", "link", "menuitem", "option", "radio", "switch", "tab", "treeitem"}
)
_TYPED = frozenset({"textbox", "searchbox", "spinbutton"})


@dataclass(frozen=True, slots=True)
class WebArenaStart(ResetResult):
    """The start of a task, or the time-out in its place."""

    sites: Sequence[str]
    """Sites of the task; ``Error`` after a time-out."""
    intent: str
    """What is asked for; ``Error`` after a time-out."""
    screenshot: str | None = None
    """Of the page, as a data URL, where they are asked for."""


@dataclass(frozen=True, slots=True)
class WebArenaStep(StepResult):
    """One action."""

    fail_error: str
    """Why the action had no effect; empty when it had."""
    url: str
    """Canonical address of the current tab."""
    screenshot: str | None = None
    """Of the page, as a data URL, where they are asked for."""


@dataclass(frozen=True)
class World:
    """What all sessions of a process share."""

    tasks: Sequence[Task]
    addresses: Addresses
    browser: SharedBrowser
    timing: Timing
    judge: Judge | None
    logins: Path
    """Folder that the tasks' files of logged-in users are found in, by their names."""
    small_sites: SmallSites | None
    """The project's own sites, where no others are configured."""
    screenshots: bool = False
    """Whether each answer carries a picture of the page, for the viewer."""


class WebArena(Environment):
    """One task after another in a context of the shared browser."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._session = BrowsingSession(world.browser, world.addresses, world.timing)
        self._task: Task | None = None
        self._view = View("", BLANK, {})
        self._observation = ""
        self._previous = "None"
        self._done = True
        self._visitor: str | None = None

    @property
    def task(self) -> Task:
        """The task of this episode; raises `InvalidCall` when its reset timed out."""
        if self._task is None:
            raise InvalidCall("the last reset timed out: reset again")
        return self._task

    # --------------------------------------------------------------------------------------------------------- episode

    def reset(self, data_idx: int) -> WebArenaStart:
        task = self._find(data_idx)
        login = self._login_of(task)
        self._task, self._done, self._previous = None, True, "None"
        urls = self._world.addresses.filled(task.start_url).split(START_TABS)
        begin = self._session.begin(
            urls, storage_state=login, geolocation=task.geolocation, cookies=self._visit_small_sites()
        )
        try:
            self._world.browser.run(begin)
            self._look()
        except PlaywrightTimeout:
            self._observation = TIMED_OUT
            return WebArenaStart(TIMED_OUT, ERROR, ERROR)
        self._task, self._done = task, False
        return WebArenaStart(self._observation, list(task.sites), task.intent, self._screenshot())

    def step(self, action: str) -> WebArenaStep:
        if self._done:
            raise InvalidCall(f"task {self.task.task_id} has ended: reset before the next step")
        self._previous = _shortened(written_action(action) or action)
        trouble, reward = "", 0.0
        try:
            asked = read_action(action)
            if asked.kind == Kind.STOP:
                reward = self._judge(asked)
                self._done = True
            else:
                self._world.browser.run(self._session.act(asked))
        except (NotAnAction, Refused) as refusal:
            trouble = str(refusal)
        self._look(trouble)
        return WebArenaStep(self._observation, reward, self._done, trouble, self.url, self._screenshot())

    def close(self) -> None:
        self._world.browser.run(self._session.end())
        self._leave_small_sites()

    def _find(self, data_idx: int) -> Task:
        """The task; raises `InvalidCall` for one that cannot be played or judged here."""
        tasks = self._world.tasks
        if not 0 <= data_idx < len(tasks):
            raise InvalidCall(f"idx {data_idx}: must be in 0..{len(tasks) - 1}")
        task = tasks[data_idx]
        if missing := self._world.addresses.missing(task.text):
            raise InvalidCall(f"task {data_idx} needs {', '.join(missing)}: set the site's address in that variable")
        if task.evaluation.needs_judge and self._world.judge is None:
            raise InvalidCall(
                f"task {data_idx} is judged by a language model: start the server with --judge-url (OpenAI-compatible) "
                f"and --judge-model, its key in {KEY_VARIABLE}"
            )
        return task

    def _login_of(self, task: Task) -> Path | None:
        if task.storage_state is None:
            return None
        path = self._world.logins / Path(task.storage_state).name
        if not path.is_file():
            raise InvalidCall(
                f"task {task.task_id} begins logged in: there is no {path}; record it with "
                f"`playwright open --save-storage={path} ADDRESS`, or name its folder with --login-folder"
            )
        return path

    def _look(self, trouble: str = "") -> None:
        self._view = self._world.browser.run(self._session.view())
        notice = f"The action had no effect: {trouble}\n" if trouble else ""
        self._observation = self._world.addresses.canonical(notice) + self._view.text

    def _screenshot(self) -> str | None:
        return self.render() if self._world.screenshots else None

    def _judge(self, stop: Action) -> float:
        """The product of the task's checks."""
        wanted = self.task.evaluation
        if Check.STRING in wanted.checks and not score_answer(self.task, stop.text, self._world.judge):
            return 0.0
        checks = PageChecks(self._session, self._world.addresses)
        return float(self._world.browser.run(checks.hold(wanted)))

    def _visit_small_sites(self) -> list[dict[str, str]]:
        """Cookies that lead to a fresh copy of the small sites' data."""
        self._leave_small_sites()
        if self._world.small_sites is None:
            return []
        self._visitor = self._world.small_sites.welcome()
        return self._world.small_sites.cookies(self._visitor)

    def _leave_small_sites(self) -> None:
        visitor, self._visitor = self._visitor, None
        if visitor is not None and self._world.small_sites is not None:
            self._world.small_sites.forget(visitor)

    # ----------------------------------------------------------------------------------------------------------- views

    @property
    def url(self) -> str:
        """Canonical address of the current tab."""
        return self._world.addresses.canonical(self._view.url)

    def observation(self) -> str:
        return self._observation

    def prompt(self) -> str:
        """All that an agent needs for its next action."""
        return (
            f"OBSERVATION:\n{self._observation}\nURL: {self.url}\nOBJECTIVE: {self.task.intent}\n"
            f"PREVIOUS ACTION: {self._previous}"
        )

    def available_actions(self) -> list[str]:
        """Clicks on what can be clicked, typing into fields, and what is always possible."""
        listed = ["scroll [up]", "scroll [down]", "new_tab", "go_back", "go_forward", "stop []"]
        for element in self._view.elements.values():
            if element.role in _CLICKED:
                listed.append(f"click [{element.number}]")
            elif element.role in _TYPED:
                listed.append(f"type [{element.number}] [text] [1]")
        return [f"```{action}```" for action in listed]

    def another(self) -> WebArena:
        """An environment of its own beside this one."""
        return WebArena(self._world)

    def number_of(self, role: str, name: str) -> int:
        """The first element in view of that role and name; raises KeyError that shows what is in view."""
        for element in self._view.elements.values():
            if (element.role, element.name) == (role, name):
                return element.number
        raise KeyError(f"no {role} {name!r} in view:\n{self._view.text}")

    def render(self) -> str:
        screenshot: str = self._world.browser.run(self._session.screenshot())
        return screenshot

    def metadata(self) -> dict[str, Any]:
        """The tree's nodes with their places, and a screenshot."""
        nodes = {
            str(element.number): {"role": element.role, "name": element.name, "union_bound": element.box}
            for element in self._view.elements.values()
        }
        text = self._world.addresses.canonical(json.dumps({"obs_nodes_info": nodes}))
        return {"text": json.loads(text), "image": self.render()}


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_ECHO else text[:MAX_ECHO] + "..."
