"""Thread counts come from one place."""

from __future__ import annotations

import subprocess
import sys

import pytest

from agentgym_rl.threads import limit_threads, thread_environment, threads_per_worker


@pytest.mark.parametrize(
    ("cores", "workers", "threads"),
    [(1, 1, 1), (2, 1, 1), (2, 2, 1), (4, 1, 3), (16, 1, 15), (16, 2, 7), (16, 8, 1), (2, 9, 1)],
)
def test_cores_are_shared_out_with_one_left_for_the_server(cores: int, workers: int, threads: int) -> None:
    assert threads_per_worker(workers, cores=cores) == threads


def test_no_process_gets_less_than_one_thread() -> None:
    with pytest.raises(ValueError, match="num_threads=0"):
        thread_environment(0)
    with pytest.raises(ValueError, match="num_workers=0"):
        threads_per_worker(0)


def test_limited_processes_compute_with_that_many_threads() -> None:
    environ: dict[str, str] = {}
    limit_threads(1, environ)
    assert environ == thread_environment(1)
    run = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.get_num_threads())"],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "1"
