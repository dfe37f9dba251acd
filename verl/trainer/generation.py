"""Evaluation: every item sampled so many times, results appended row by row, one report over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentgym_rl.evaluation.report import Report
from agentgym_rl.evaluation.results import (
    Requested,
    claim_folder,
    missing_requests,
    note_requested,
    report_on,
    write_report,
)
from agentgym_rl.evaluation.versions import library_versions, server_versions
from agentgym_rl.rollout.collector import RolloutRequest, check_failures
from agentgym_rl.rollout.log import TRAJECTORY_FOLDER
from agentgym_rl.types import Item
from verl.config import GenerationConfig
from verl.single_controller.base import Interrupted, WorkerGroup, WorkerSpec
from verl.single_controller.signals import Terminated, stop_on_sigterm
from verl.single_controller.start import start_workers
from verl.trainer.plan import describe_generation, resolve_threads
from verl.trainer.rollouts import generate, make_requests
from verl.utils.devices import resolve_device
from verl.utils.model_folder import model_version
from verl.workers.setup import RolloutOrder, RolloutSetup


def run_generation(config: GenerationConfig, items: Sequence[Item]) -> Report:
    """Sample what the results folder does not hold yet, faults among it, then print and write the report over all.

    Raises `ConfigError` when the folder holds results of another model or other settings, and `TooManyFailures` when
    too large a share of what is sampled are faults.
    """
    device, folder = resolve_device(config.trainer.device), Path(config.rollout.rollout_log_dir or "").resolve()
    run = {"versions": library_versions(), "device": device, "workers": config.trainer.world_size}
    claim_folder(folder, _settings(config), run)
    note_requested(folder, Requested(tuple(items), config.data.n_samples))
    requests = make_requests(items, n=config.data.n_samples, purpose="eval", seed=config.data.seed)
    missing = missing_requests(requests, folder)
    num_done = len(requests) - len(missing)
    print(describe_generation(config, num_items=len(items), num_done=num_done, device=device), flush=True)
    if missing:
        with start_workers(_worker_spec(config, folder, device), config.trainer, config.ray_init) as workers:
            _sample(config, workers, missing)
    report = report_on(folder)
    write_report(folder, report)
    print(report.table(), flush=True)
    print(f"results in {folder}", flush=True)
    return report


def _sample(config: GenerationConfig, workers: WorkerGroup, requests: Sequence[RolloutRequest]) -> None:
    """All requests, ``data.batch_size`` items in flight at a time."""
    rollout = config.rollout
    order = RolloutOrder(
        step=0,
        max_rounds=config.agentgym.max_rounds,
        sampling=rollout.sampling,
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
        limits=config.rollout.limits(config.data),
        log_dir=str(folder),
        seed=config.data.seed,
    )
    threads = resolve_threads(config.trainer)
    return WorkerSpec("verl.workers.rollout.worker:RolloutWorker", (setup,), num_threads=threads, device=device)
