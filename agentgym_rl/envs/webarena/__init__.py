"""WebArena: tasks on web sites, in a real browser. See `environment` for the rules and README.md for its set-up."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym_rl.envs.registry import EnvSpec, Isolation
from agentgym_rl.envs.webarena.addresses import Addresses, addresses_from_environment
from agentgym_rl.envs.webarena.browser import find_chromium, require_playwright, shared_browser
from agentgym_rl.envs.webarena.client import WebArenaClient
from agentgym_rl.envs.webarena.judge import Judge
from agentgym_rl.envs.webarena.site_functions import PREFIX, parse_call
from agentgym_rl.envs.webarena.sites.server import SmallSites, small_sites
from agentgym_rl.envs.webarena.tasks import Task, read_tasks
from agentgym_rl.envs.wire import DIALECT_B
from agentgym_rl.errors import ConfigError

if TYPE_CHECKING:
    from agentgym_rl.envs.webarena.environment import WebArena

SMALL_TASKS = Path(__file__).parent / "sites" / "tasks.json"


@dataclass(frozen=True)
class WebArenaSettings:
    """What may be chosen when it is served."""

    task_file: Path | None = field(
        default=None, metadata={"help": "tasks in WebArena's JSON form; without it, those on the small sites"}
    )
    login_folder: Path | None = field(
        default=None, metadata={"help": "where the tasks' storage_state files are; without it, beside the task file"}
    )
    chromium: Path | None = field(
        default=None, metadata={"help": "the browser's program; without it, one is looked for"}
    )
    judge_url: str = field(
        default="", metadata={"help": "OpenAI-compatible address, up to /v1, of the model that compares answers"}
    )
    judge_model: str = field(default="", metadata={"help": "its name there"})
    navigation_timeout: float = field(default=30.0, metadata={"help": "seconds that a page may take"})
    quiet: float = field(
        default=0.15, metadata={"help": "seconds without traffic after an action until the page is looked at"}
    )
    screenshots: bool = field(
        default=False, metadata={"help": "write a picture of the page, some 50 kB, with each turn, for the viewer"}
    )

    def __post_init__(self) -> None:
        if bool(self.judge_url) != bool(self.judge_model):
            raise ConfigError("judge_url and judge_model go together")
        if self.judge_url and not self.judge_url.startswith(("http://", "https://")):
            raise ConfigError(f"judge_url={self.judge_url!r}: must be a URL such as http://127.0.0.1:8000/v1")
        if self.navigation_timeout <= 0 or self.quiet < 0:
            raise ConfigError(
                f"navigation_timeout={self.navigation_timeout:g}, quiet={self.quiet:g}: must be above 0, at least 0"
            )


@functools.lru_cache(maxsize=8)
def _tasks(path: Path) -> tuple[Task, ...]:
    """The file's tasks; raises `ConfigError` also for a function that nothing here knows."""
    tasks = read_tasks(path)
    for target in (target for task in tasks for target in task.evaluation.targets):
        for text in (target.url, target.locator):
            if text.startswith(PREFIX):
                parse_call(text)
    return tasks


def _addresses() -> tuple[Addresses, SmallSites | None]:
    """The configured sites; the small ones, which then run, when no variable is set."""
    if configured := addresses_from_environment():
        return Addresses(configured), None
    sites = small_sites()
    return Addresses(sites.addresses), sites


def _require_sites(settings: WebArenaSettings) -> None:
    if settings.task_file is None and (configured := addresses_from_environment()):
        raise ConfigError(f"{', '.join(configured)} is set: name the tasks for these sites with --task-file PATH")


def make_environment(settings: WebArenaSettings) -> WebArena:
    """An environment in this process's browser, which is up when it returns."""
    program = find_chromium(settings.chromium)
    from agentgym_rl.envs.webarena.browsing import Timing
    from agentgym_rl.envs.webarena.environment import WebArena, World

    _require_sites(settings)
    task_file = settings.task_file or SMALL_TASKS
    addresses, sites = _addresses()
    browser = shared_browser(program)
    browser.start()
    return WebArena(
        World(
            tasks=_tasks(task_file),
            addresses=addresses,
            browser=browser,
            timing=Timing(settings.navigation_timeout, settings.quiet),
            judge=Judge(settings.judge_url, settings.judge_model) if settings.judge_url else None,
            logins=settings.login_folder or task_file.parent,
            small_sites=sites,
            screenshots=settings.screenshots,
        )
    )


def _data_version(settings: WebArenaSettings) -> str:
    """Says what is missing before anything starts."""
    require_playwright()
    program = find_chromium(settings.chromium)
    _require_sites(settings)
    tasks = settings.task_file or SMALL_TASKS
    return f"{tasks.name} ({len(_tasks(tasks))} tasks), playwright {version('playwright')}, {program}"


def _expert(settings: WebArenaSettings) -> Any:
    """Solutions exist for the tasks on the small sites."""
    if settings.task_file is not None:
        return None

    def solve(environment: WebArena) -> list[str]:
        from agentgym_rl.envs.webarena.expert import solution

        return solution(environment)

    return solve


def _picture(screenshot: str | None) -> dict[str, str]:
    return {} if screenshot is None else {"screenshot": screenshot}


def configured(settings: WebArenaSettings) -> EnvSpec:
    """The environment under these settings."""
    return EnvSpec(
        name="webarena",
        title="WebArena",
        environment=functools.partial(make_environment, settings),
        client=WebArenaClient,
        num_items=len(_tasks(settings.task_file or SMALL_TASKS)),
        default_port=36005,
        data_version=functools.partial(_data_version, settings),
        wire=replace(
            DIALECT_B,
            index_field="idx",
            starts_on_create=False,
            was_reset=lambda handle, start: {
                "observation": start.observation,
                "sites": start.sites,
                "object": start.intent,
                **_picture(start.screenshot),
            },
            stepped=lambda step: {
                "observation": step.observation,
                "reward": step.reward,
                "terminated": step.done,
                "truncated": False,
                "info": {"fail_error": step.fail_error, "page": {"url": step.url}, **_picture(step.screenshot)},
            },
            closed=lambda known: {"closed": "closed" if known else "there was no such session"},
        ),
        queries={
            "observation": lambda environment: environment.prompt(),
            "observation_metadata": lambda environment: environment.metadata(),
        },
        # The browser's own waits end sooner; a judge may be asked several times in a call.
        isolation=Isolation(sessions_per_child=8, parallel=True, call_timeout_s=300),
        settings=settings,
        configure=configured,
        expert=_expert(settings),
        panel="agentgym_rl.envs.webarena.panel:panel",
    )


SPEC = configured(WebArenaSettings())
