"""Both worker groups call the same workers in the same way; Ray's ends with its driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import ray

from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Item
from verl.single_controller.base import Report, WorkerError, WorkerSpec
from verl.single_controller.local import LocalWorkerGroup
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.rollouts import make_requests

pytestmark = pytest.mark.ray

CALCULATOR = WorkerSpec("support.toy_workers:Calculator", args=(10,), num_threads=1, device="cpu")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A running Ray, with room for two groups of two; groups join it and leave it running."""
    ray.init(address="local", num_cpus=4, object_store_memory=2**27, include_dashboard=False, logging_level="error")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def pair(cluster: None) -> Iterator[RayWorkerGroup]:
    """Two workers on Ray, shared by the tests that leave them alive."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTGYM_TEST_MARK", "passed on")
        with RayWorkerGroup(CALCULATOR, workers_per_node=2) as group:
            yield group


def test_results_come_back_in_rank_order(pair: RayWorkerGroup) -> None:
    assert pair.call_each("add", [(1,), (2,)]) == [11, 12]
    ranks = pair.call_all("where")
    assert [(rank, size) for rank, size, _ in ranks] == [(0, 2), (1, 2)]
    assert len({pid for *_, pid in ranks} | {os.getpid()}) == 3


def test_workers_form_a_process_group(pair: RayWorkerGroup) -> None:
    assert pair.call_all("sum_of_ranks") == [3, 3]


def test_workers_get_their_thread_counts_and_the_drivers_variables(pair: RayWorkerGroup) -> None:
    assert pair.call_all("variable", "OMP_NUM_THREADS") == ["1", "1"]
    assert pair.call_all("variable", "AGENTGYM_TEST_MARK") == ["passed on"] * 2


def test_the_driver_hears_of_finished_work(pair: RayWorkerGroup) -> None:
    counts: list[int] = []
    pair.call_each("work", [(3,), (4,)], on_progress=counts.append)
    pair.call_each("work", [(1,), (0,)], on_progress=counts.append)
    assert sum(counts) == 8


def test_a_worker_with_a_slow_item_leaves_the_others_to_its_peer(pair: RayWorkerGroup) -> None:
    """With fixed shares this would never end."""
    requests = make_requests([Item("toy", index) for index in range(9)], n=1, purpose="x", seed=0)
    taken = pair.call_all("take_up", requests)
    assert sorted(taken) == [[0], [1, 2, 3, 4, 5, 6, 7, 8]]


def test_the_first_exception_ends_the_call_though_a_peer_never_answers(cluster: None) -> None:
    with RayWorkerGroup(CALCULATOR, workers_per_node=2) as group:
        began = time.monotonic()
        with pytest.raises(
            WorkerError, match="worker 1 of 2 failed: ZeroDivisionError: rank 1 divides by zero"
        ) as caught:
            group.call_all("fail_on", 1)
        assert time.monotonic() - began < 20
        assert isinstance(caught.value.cause, ZeroDivisionError)
        assert "fail_on" in caught.value.worker_traceback


@pytest.mark.parametrize("on_progress", [None, lambda count: None])
def test_a_worker_that_dies_is_named(cluster: None, on_progress: Report | None) -> None:
    with (
        RayWorkerGroup(CALCULATOR, workers_per_node=2) as group,
        pytest.raises(WorkerError, match="worker 0 of 2 failed: its process died"),
    ):
        group.call_all("die_on", 0, on_progress=on_progress)


def test_an_exception_in_a_workers_start_is_what_the_user_sees(cluster: None) -> None:
    broken = WorkerSpec("support.toy_workers:BornBroken", args=(), num_threads=1, device="cpu")
    with pytest.raises(WorkerError, match="worker 1 of 2 failed: FileNotFoundError: no weights here"):
        RayWorkerGroup(broken, workers_per_node=2)


def test_local_group_answers_in_the_drivers_process() -> None:
    counts: list[int] = []
    with LocalWorkerGroup(CALCULATOR) as group:
        assert group.call_all("where") == [(0, 1, os.getpid())]
        assert group.call_each("add", [(5,)]) == [15]
        group.call_all("work", 2, on_progress=counts.append)
        assert group.call_all("sum_of_ranks") == [1]
    assert counts == [1, 1]


def test_a_cluster_that_is_too_small_is_an_error_at_once(cluster: None) -> None:
    with pytest.raises(
        ConfigError,
        match=r"nnodes=3 .*_per_node=4: 1 of .* 1 nodes have 4 CPU .*: 4 CPU\); .* RAY_ADDRESS",
    ):
        RayWorkerGroup(CALCULATOR, nnodes=3, workers_per_node=4)
    on_gpu = WorkerSpec("support.toy_workers:Calculator", args=(), num_threads=1, device="cuda")
    with pytest.raises(ConfigError, match=r"0 of the Ray cluster.s 1 nodes have 1 CPU and 1 GPU .*: 4 CPU and 0 GPU"):
        RayWorkerGroup(on_gpu, workers_per_node=1)


def test_local_group_refuses_two_workers() -> None:
    with pytest.raises(ConfigError, match="worker_group=local with 2 workers"):
        LocalWorkerGroup(CALCULATOR, world_size=2)


DRIVER = """
import signal
import sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
from verl.agent_trainer.entry import run
from verl.config import SFTConfig
from verl.single_controller.base import WorkerSpec
from verl.single_controller.start import start_workers

def work(config):
    spec = WorkerSpec("support.toy_workers:Calculator", args=(), num_threads=1, device="cpu")
    with start_workers(spec, config.trainer) as group:
        print(*[pid for *_, pid in group.call_all("where")], flush=True)
        if {busy!r}:
            group.call_all("fail_on", -1)
        sys.stdin.readline()

signal.signal(signal.SIGINT, signal.default_int_handler)
argv = ["data.train_file=x", "model.path=x", "trainer.n_gpus_per_node=2"]
sys.exit(run(argv, work, SFTConfig, program="test", config_name="sft_trainer"))
"""


@contextmanager
def driver_of_its_own_ray(*, busy: bool = True) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A driver whose two workers are up, ``busy`` in a call or not, with its descendants; at last none is left."""
    program = DRIVER.format(root=str(Path(__file__).parents[3]), busy=busy)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **pipes, text=True) as driver:
        family: list[psutil.Process] = []
        try:
            assert driver.stdout is not None
            workers = [int(pid) for pid in driver.stdout.readline().split()]
            family = psutil.Process(driver.pid).children(recursive=True)
            assert {process.pid for process in family} >= set(workers) and len(workers) == 2
            yield driver, family
            _, alive = psutil.wait_procs([process for process in family if process.is_running()], timeout=30)
            assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
        finally:
            driver.kill()
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def kill(victims: set[str], family: list[psutil.Process]) -> None:
    """``victims``: names of programs, as far as they go."""
    for process in family:
        with suppress(psutil.NoSuchProcess):
            if process.name().startswith(tuple(victims)):
                process.kill()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_nothing_outlives_its_driver_whose_status_tells_the_signal(number: signal.Signals, status: int) -> None:
    with driver_of_its_own_ray() as (driver, _):
        driver.send_signal(number)
        driver.communicate(timeout=120)
        assert driver.returncode == status


@pytest.mark.parametrize(
    ("number", "status", "victims"),
    [(signal.SIGTERM, 143, {"raylet"}), (signal.SIGINT, 130, {"raylet", "gcs_server", "ray::_Worker"})],
)
def test_nor_where_parts_of_ray_are_killed_with_it(number: signal.Signals, status: int, victims: set[str]) -> None:
    with driver_of_its_own_ray() as (driver, family):
        kill(victims, family)
        driver.send_signal(number)
        driver.communicate(timeout=120)
        assert driver.returncode == status


@pytest.mark.parametrize("victim", ["raylet", "gcs_server"])
def test_a_run_ends_with_the_death_of_ray_and_says_so(victim: str) -> None:
    with driver_of_its_own_ray() as (driver, family):
        kill({victim}, family)
        _, errors = driver.communicate(timeout=120)
        assert driver.returncode == 1
        assert f"error: Ray's {victim} (process " in errors.splitlines()[-1]
        assert "Traceback" not in errors


def test_a_run_that_is_done_keeps_its_status_though_ray_has_died() -> None:
    with driver_of_its_own_ray(busy=False) as (driver, family):
        kill({"raylet", "gcs_server"}, family)
        driver.communicate("\n", timeout=120)
        assert driver.returncode == 0
