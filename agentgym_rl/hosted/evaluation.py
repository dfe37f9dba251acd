"""``agentgym-rl eval``: the evaluation of ``main_generation`` with a hosted model in place of an engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from agentgym_rl.agent.strategies import AgentChoice
from agentgym_rl.client.addresses import parse_addresses
from agentgym_rl.client.capacity import read_capacity
from agentgym_rl.client.check import check_server
from agentgym_rl.client.servers import client_factory
from agentgym_rl.data.items import ItemList
from agentgym_rl.envs.registry import get_spec
from agentgym_rl.errors import ConfigError
from agentgym_rl.evaluation.report import Report
from agentgym_rl.evaluation.results import (
    USAGE_FILE,
    Requested,
    claim_folder,
    missing_requests,
    note_requested,
    report_on,
    write_report,
)
from agentgym_rl.evaluation.usage import Prices, UsageLog
from agentgym_rl.evaluation.versions import library_versions, server_versions
from agentgym_rl.hosted.characters import character_chat
from agentgym_rl.hosted.endpoint import Endpoint, HostedModel
from agentgym_rl.hosted.engine import HostedEngine, Pace
from agentgym_rl.rollout.collector import RolloutSettings, TokenLimits, check_failures, collect
from agentgym_rl.rollout.handler import RolloutRequest
from agentgym_rl.rollout.log import TRAJECTORY_FOLDER, TrajectoryLog
from agentgym_rl.rollout.requests import make_requests
from agentgym_rl.types import Item, SamplingParams, Trajectory

_NO_LIMIT = 100_000_000
"""Characters: the model's own limits are its server's."""
_COLUMNS = ("input_ids", "loss_mask", "sequence_ids", "rollout_log_probs", "token_rewards")


@dataclass(frozen=True)
class HostedEvaluation:
    """One evaluation of a hosted model."""

    model: HostedModel
    servers: Mapping[str, tuple[str, ...]]
    """Addresses of each task's servers."""
    data: Sequence[str]
    """Item list of each task, in their order."""
    out: Path
    """The results folder."""
    max_rounds: int = 10
    n_samples: int = 1
    seed: int = 0
    agent: AgentChoice = field(default_factory=AgentChoice)
    concurrency: int = 8
    """Trajectories in flight."""
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_retries: int = 6
    """Tries of a request after the first."""
    timeout_s: float = 3600.0
    """Seconds that one trajectory may take, waiting for the model's server included."""
    env_timeout_s: float = 60.0
    """Seconds to wait for the answer to one request to an environment."""
    max_failed_fraction: float = 0.5
    prices: Prices | None = None

    def __post_init__(self) -> None:
        for name in ("max_rounds", "n_samples", "concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        for name in ("requests_per_minute", "tokens_per_minute"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} {value:g}: must be above 0")

    def settings(self) -> dict[str, Any]:
        """What results depend on; the key is not among it."""
        return {
            "api_base": self.model.api_base,
            "model": self.model.model,
            "max_tokens": self.model.max_tokens,
            "temperature": self.model.temperature,
            "top_p": self.model.top_p,
            "body": dict(self.model.body),
            "agentgym.task_name": list(self.servers),
            "servers": server_versions(self.servers),
            "agentgym.agent": self.agent.agent,
            "agentgym.action_format": str(self.agent.action_format),
            "agentgym.max_trials": self.agent.trials,
            "agentgym.max_rounds": self.max_rounds,
            "data.seed": self.seed if self.model.sends_seed else None,
        }


def servers_by_task(tasks: Sequence[str], addresses: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """An address, or several with commas between, for each task; raises `ConfigError` when their numbers differ."""
    if len(set(tasks)) != len(tasks) or len(addresses) != len(tasks):
        raise ConfigError(f"{len(tasks)} --task and {len(addresses)} --env-addr: give each task once, and one for each")
    return {get_spec(task).name: parse_addresses(address) for task, address in zip(tasks, addresses, strict=True)}


def evaluate_hosted(evaluation: HostedEvaluation) -> Report:
    """Play what the results folder does not hold yet, then print and write the report over all.

    Raises `ConfigError` for wrong input, a wrong key included, and `TooManyFailures`; what was played until then is
    there, and the same call goes on from it.
    """
    listed = ItemList.load("--data", list(evaluation.data), list(evaluation.servers))
    for task, addresses in evaluation.servers.items():
        listed.check_range(task, check_server(addresses, task), owner=f"the server at {', '.join(addresses)}")
    with contextlib.closing(Endpoint(evaluation.model)) as endpoint:
        endpoint.check_reachable()
        _play_missing(evaluation, endpoint, listed.items)
    report = report_on(evaluation.out)
    write_report(evaluation.out, report)
    print(report.table(), flush=True)
    print(f"results in {evaluation.out}", flush=True)
    return report


def _play_missing(evaluation: HostedEvaluation, endpoint: Endpoint, items: Sequence[Item]) -> None:
    """Take the results folder, and play what it does not hold."""
    run = {"versions": library_versions(), "prices": _prices(evaluation.prices)}
    claim_folder(evaluation.out, evaluation.settings(), run)
    note_requested(evaluation.out, Requested(tuple(items), evaluation.n_samples))
    requests = make_requests(items, n=evaluation.n_samples, purpose="eval", seed=evaluation.seed)
    missing = missing_requests(requests, evaluation.out)
    print(_plan(evaluation, items, len(requests), len(missing)), flush=True)
    if missing:
        _play(evaluation, endpoint, missing)


def _play(evaluation: HostedEvaluation, endpoint: Endpoint, requests: Sequence[RolloutRequest]) -> None:
    in_flight = min(evaluation.concurrency, len(requests), *_capacities(evaluation))
    pace = Pace(evaluation.requests_per_minute, evaluation.tokens_per_minute)
    bar = tqdm(total=len(requests), unit=" trajectories", leave=False, disable=None)
    with UsageLog(evaluation.out / USAGE_FILE) as usage, TrajectoryLog(_log_path(evaluation.out)) as log, bar:
        engine = HostedEngine(endpoint, usage, max_in_flight=in_flight, max_retries=evaluation.max_retries, pace=pace)

        def finished(trajectory: Trajectory) -> None:
            log.write(without_characters(trajectory))
            bar.update(trajectory.is_last_trial)

        work = collect(
            requests,
            engine,
            make_client=_client_factories(evaluation),
            chat=character_chat(),
            settings=_settings(evaluation, in_flight),
            only_faults=True,
            on_finished=finished,
        )
        try:
            faults = asyncio.run(_until_sigterm(work))
        finally:
            engine.close()
    check_failures(faults, evaluation.max_failed_fraction, total=len(requests))


def without_characters(trajectory: Trajectory) -> Trajectory:
    """The trajectory without the columns of its record: they are characters, which its messages have already."""
    columns = {name: getattr(trajectory, name)[:0] for name in _COLUMNS}
    turns = tuple(dataclasses.replace(turn, num_tokens=0) for turn in trajectory.turns)
    asides = tuple(dataclasses.replace(aside, num_tokens=0) for aside in trajectory.asides)
    return dataclasses.replace(trajectory, turns=turns, asides=asides, prompt_length=0, **columns)


async def _until_sigterm(work: Coroutine[Any, Any, list[Trajectory]]) -> list[Trajectory]:
    """What comes of ``work``; at SIGTERM it is given up as at Ctrl-C: sessions are closed, and what is there stays."""
    task = asyncio.ensure_future(work)
    is_main = threading.current_thread() is threading.main_thread()
    loop = asyncio.get_running_loop()
    if is_main:
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        if is_main:
            loop.remove_signal_handler(signal.SIGTERM)


def _settings(evaluation: HostedEvaluation, in_flight: int) -> RolloutSettings:
    return RolloutSettings(
        max_rounds=evaluation.max_rounds,
        limits=TokenLimits(_NO_LIMIT, _NO_LIMIT, _NO_LIMIT, 2 * _NO_LIMIT),
        sampling=SamplingParams(max_tokens=_NO_LIMIT),
        timeout_s=evaluation.timeout_s,
        max_concurrency=in_flight,
        agent=evaluation.agent,
        runs_inline=frozenset(task for task in evaluation.servers if get_spec(task).client.runs_inline),
    )


def _client_factories(evaluation: HostedEvaluation) -> dict[str, Callable[[], Any]]:
    return {
        task: client_factory(get_spec(task).client, addresses, timeout_s=evaluation.env_timeout_s)
        for task, addresses in evaluation.servers.items()
    }


def _capacities(evaluation: HostedEvaluation) -> list[int]:
    """Places of each task's servers, where they say."""
    capacities = map(read_capacity, evaluation.servers.values())
    return [max(1, capacity.total) for capacity in capacities if capacity is not None]


def _log_path(folder: Path) -> Path:
    return folder / TRAJECTORY_FOLDER / "0.jsonl"


def _prices(prices: Prices | None) -> dict[str, Any] | None:
    return None if prices is None else dataclasses.asdict(prices)


def _plan(evaluation: HostedEvaluation, items: Sequence[Item], num_requests: int, num_missing: int) -> str:
    done = "" if num_missing == num_requests else f", {num_requests - num_missing} of them done already"
    model = evaluation.model
    return (
        f"plan: {len(items)} items x {evaluation.n_samples} samples = {num_requests} trajectories of at most "
        f"{evaluation.max_rounds} rounds{done}\n"
        f"      {model.model} at {model.api_base}, temperature {model.temperature:g}, turns of at most "
        f"{model.max_tokens} tokens, {evaluation.concurrency} trajectories at once"
    )
