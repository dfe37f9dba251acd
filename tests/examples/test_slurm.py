"""The Slurm example trains on two nodes, both of which are this machine: `srun` is a script that runs its command."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support.models import tiny_qwen2
from support.tokenizers import make_tokenizer

from agentgym_rl.rollout.log import read_trajectories
from verl.utils.tracking import read_metrics

pytestmark = [pytest.mark.ray, pytest.mark.server, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
# Options of srun, which here make no difference, are dropped.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
printf 'node1\\nnode2\\n'
"""
HOSTNAME = """#!/usr/bin/env bash
echo 127.0.0.1
"""
OVERRIDES = (
    "trainer.device=cpu",
    "trainer.num_threads=1",
    "trainer.total_training_steps=1",
    "data.train_batch_size=2",
    "data.max_response_length=200",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.max_tokens=8",
    "algorithm.rounds_ctrl.rounds=2",
)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a batch job with two nodes of one device."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("hostname", HOSTNAME)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "AGENTGYM_"))}
    yield clean | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "RAY_CLUSTER_DIR": str(tmp_path / "ray"),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": str(_free_ports() - 20000),
        "SLURM_JOB_NAME": "test",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_CPUS_PER_TASK": "2",
    }


def _free_ports() -> int:
    """The lower of two free ports that the example's rule can arrive at."""
    for port in range(20000, 40000, 2):
        with suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port
    raise AssertionError("no free ports")


def test_two_nodes_train_and_the_job_leaves_nothing_behind(slurm: dict[str, str], tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tiny_qwen2(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    environment = slurm | {"MODEL": str(tmp_path / "model"), "OUT": str(tmp_path / "out")}
    command = ["bash", str(ROOT / "examples" / "slurm" / "train.sbatch"), *OVERRIDES]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as job:
        try:
            said, _ = job.communicate(timeout=280)
            assert job.returncode == 0, said[-5000:]
            assert [process for process in psutil.process_iter() if _is_of(process, job.pid)] == []
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
    assert "has 2 nodes" in said and "2 workers (ray, cpu" in said
    [row] = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert row["rollout/trajectories"] == 4 and row["rollout/masked"] == 0
    assert len(read_trajectories(tmp_path / "out" / "trajectories").trajectories) == 4


def _is_of(process: psutil.Process, session: int) -> bool:
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    return False
