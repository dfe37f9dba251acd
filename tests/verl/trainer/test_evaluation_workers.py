"""An evaluation's figures do not depend on how many workers made it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from support.rollouts import ScriptedClient, ScriptedEngine, frameless_chat, make_settings

from agentgym_rl.evaluation.results import (
    REPORT_FILE,
    Requested,
    claim_folder,
    missing_requests,
    note_requested,
    report_on,
    write_report,
)
from agentgym_rl.rollout.collector import collect
from agentgym_rl.rollout.log import TRAJECTORY_FOLDER, TrajectoryLog
from agentgym_rl.rollout.requests import make_requests
from agentgym_rl.types import Item, StepOutput, StopReason
from verl.workers.rollout.hand_out import HandOut

ITEMS = [Item("toy", index, "odd" if index % 2 else "even") for index in range(7)]


def environment(item: int, step: int, text: str) -> StepOutput:
    """Item i is over after i + 1 steps with a score of i / 6; items 5 and 6 outlast the horizon of 5 rounds."""
    done = step == item + 1
    return StepOutput(f"step {step} of {item}", item / 6 if done else 0.0, done)


def evaluate(folder: Path, *, num_workers: int) -> bytes:
    """Two samples of each item, made by workers that share one supply; returns the report's file."""
    claim_folder(folder, {"model.path": "scripted"}, {"workers": num_workers})
    note_requested(folder, Requested(tuple(ITEMS), 2))
    requests = missing_requests(make_requests(ITEMS, n=2, purpose="eval", seed=0), folder)
    store = dist.HashStore()

    def work(rank: int) -> None:
        chat, hand_out = frameless_chat(), HandOut(requests, store, name="1")
        with TrajectoryLog(folder / TRAJECTORY_FOLDER / f"{rank}.jsonl") as log:
            asyncio.run(
                collect(
                    requests,
                    ScriptedEngine(chat),
                    make_client=lambda: ScriptedClient(environment),
                    chat=chat,
                    settings=make_settings(max_rounds=5, max_concurrency=2),
                    picks=hand_out,
                    on_finished=log.write,
                )
            )

    with ThreadPoolExecutor(num_workers) as threads:
        for done in [threads.submit(work, rank) for rank in range(num_workers)]:
            done.result()
    write_report(folder, report_on(folder))
    return (folder / REPORT_FILE).read_bytes()


@pytest.mark.parametrize("num_workers", [3, 8])
def test_one_worker_and_several_give_the_same_figures_to_the_last_digit(tmp_path: Path, num_workers: int) -> None:
    alone = evaluate(tmp_path / "alone", num_workers=1)
    assert evaluate(tmp_path / "several", num_workers=num_workers) == alone
    report = report_on(tmp_path / "several")
    assert (report.overall.num_items, report.num_trajectories, report.num_missing) == (7, 14, 0)
    assert report.overall.avg == pytest.approx(sum(range(5)) / 6 / 7) and report.overall.pass_rate == 0
    assert {ending.reason: ending.share for ending in report.endings}[StopReason.MAX_ROUNDS] == 4 / 14
