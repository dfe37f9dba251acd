"""Evaluation: every item sampled so many times, results appended row by row, one report over all of them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentgym_rl.errors import ConfigError
from agentgym_rl.evaluation.report import Report, finished_samples, make_report, one_per_sample
from agentgym_rl.rollout.collector import RolloutRequest, TokenLimits, check_failures
from agentgym_rl.rollout.log import read_trajectories
from agentgym_rl.types import Item, SamplingParams
from verl.config import GenerationConfig
from verl.single_controller.base import Interrupted, WorkerGroup, WorkerSpec
from verl.single_controller.signals import Terminated, stop_on_sigterm
from verl.single_controller.start import start_workers
from verl.trainer.plan import describe_machine, resolve_threads
from verl.trainer.rollouts import generate, make_requests
from verl.utils.checkpoint import write_atomically
from verl.utils.devices import resolve_device
from verl.workers.setup import RolloutOrder, RolloutSetup

SETTINGS_FILE = "settings.json"
REPORT_FILE = "report.json"
TRAJECTORY_FOLDER = "trajectories"


def run_generation(config: GenerationConfig, items: Sequence[Item]) -> Report:
    """Sample what the results folder does not hold yet, faults among it, then print and write the report over all.

    Raises `ConfigError` when the folder holds results of another model or other settings, and `TooManyFailures` when
    too large a share of what is sampled are faults.
    """
    device, folder = resolve_device(config.trainer.device), Path(config.rollout.rollout_log_dir or "").resolve()
    claim_folder(folder, _settings(config))
    requests = make_requests(items, n=config.data.n_samples, purpose="eval", seed=config.data.seed)
    finished = finished_samples(folder / TRAJECTORY_FOLDER)
    missing = [request for request in requests if _sample_of(request) not in finished]
    print(_describe(config, len(items), len(requests), len(missing), device), flush=True)
    if missing:
        with start_workers(_worker_spec(config, folder, device), config.trainer, config.ray_init) as workers:
            _sample(config, workers, missing)
    report = report_on(requests, folder)
    print(report.table(), flush=True)
    print(f"results in {folder}", flush=True)
    return report


def claim_folder(folder: Path, settings: dict[str, Any]) -> None:
    """Make the results folder, or find it made with the same settings; `ConfigError` when it was made with others."""
    path = folder / SETTINGS_FILE
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(settings, indent=1))
        return
    earlier = json.loads(path.read_text())
    for key, value in settings.items():
        if earlier.get(key) != value:
            raise ConfigError(
                f"{key}={value!r}: rollout.rollout_log_dir={str(folder)!r} holds results made with "
                f"{earlier.get(key)!r}; take another folder, or remove that one"
            )


def report_on(requests: Sequence[RolloutRequest], folder: Path) -> Report:
    """The report over the requested samples that the results folder holds, also written to its ``report.json``."""
    contents = read_trajectories(folder / TRAJECTORY_FOLDER)
    wanted = {_sample_of(request) for request in requests}
    chosen = [t for t in one_per_sample(contents.trajectories) if (t.item.item_id, t.sample_index) in wanted]
    report = make_report(chosen, torn_files=contents.torn)
    (folder / REPORT_FILE).write_text(json.dumps(_as_json(report), indent=1))
    return report


def _sample(config: GenerationConfig, workers: WorkerGroup, requests: Sequence[RolloutRequest]) -> None:
    """All requests, ``data.batch_size`` items in flight at a time."""
    rollout = config.rollout
    order = RolloutOrder(
        step=0,
        max_rounds=config.agentgym.max_rounds,
        sampling=SamplingParams(
            max_tokens=rollout.max_tokens, temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k
        ),
        log_name=TRAJECTORY_FOLDER,
        append=True,
        max_in_flight=config.data.batch_size * config.data.n_samples,
        max_failed_fraction=rollout.max_failed_fraction,
        only_faults=True,
    )
    try:
        with stop_on_sigterm(workers.interrupt, saying="giving up what is in flight"):
            faults = generate(workers, requests, order).trajectories
    except Interrupted:
        raise Terminated("terminated; the same command goes on from the results that are there") from None
    check_failures(faults, rollout.max_failed_fraction, total=len(requests))


def _sample_of(request: RolloutRequest) -> tuple[str, int]:
    return request.item.item_id, request.sample_index


def _settings(config: GenerationConfig) -> dict[str, Any]:
    """What results depend on; those made with different ones do not belong in one folder."""
    agentgym, rollout = config.agentgym, config.rollout
    return {
        "model.path": config.model.absolute().path,
        "model.weights": model_version(config.model.path),
        "model.dtype": config.model.dtype,
        "agentgym.task_name": list(agentgym.tasks),
        "servers": server_versions(agentgym.servers),
        "agentgym.agent": agentgym.agent,
        "agentgym.action_format": agentgym.action_format,
        "agentgym.max_trials": agentgym.agent_choice.trials,
        "agentgym.max_rounds": agentgym.max_rounds,
        "data.max_prompt_length": config.data.max_prompt_length,
        "data.max_response_length": config.data.max_response_length,
        "data.seed": config.data.seed,
        "rollout.temperature": rollout.temperature,
        "rollout.top_p": rollout.top_p,
        "rollout.top_k": rollout.top_k,
        "rollout.max_tokens": rollout.max_tokens,
        "rollout.max_model_len": rollout.max_model_len,
    }


def _worker_spec(config: GenerationConfig, folder: Path, device: str) -> WorkerSpec:
    setup = RolloutSetup(
        model=config.model.absolute(),
        agentgym=config.agentgym,
        rollout=config.rollout,
        limits=TokenLimits(
            config.data.max_prompt_length,
            config.data.max_response_length,
            config.rollout.max_tokens,
            config.rollout.max_model_len,
        ),
        log_dir=str(folder),
        seed=config.data.seed,
    )
    threads = resolve_threads(config.trainer)
    return WorkerSpec("verl.workers.rollout.worker:RolloutWorker", (setup,), num_threads=threads, device=device)


def _describe(config: GenerationConfig, num_items: int, num_requests: int, num_missing: int, device: str) -> str:
    done = "" if num_missing == num_requests else f", {num_requests - num_missing} of them done already"
    return (
        f"plan: {num_items} items x {config.data.n_samples} samples = {num_requests} trajectories of at most "
        f"{config.agentgym.max_rounds} rounds{done}\n"
        f"      {describe_machine(config.trainer, device)}"
    )


def _as_json(report: Report) -> Any:
    return _finite(dataclasses.asdict(report))


def _finite(value: Any) -> Any:
    """JSON values: paths as text, and null for a mean over nothing."""
    if isinstance(value, dict):
        return {str(key): _finite(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(child) for child in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
