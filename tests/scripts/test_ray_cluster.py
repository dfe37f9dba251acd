"""A cluster of two Ray nodes on this machine, started, joined and stopped by the script, and workers placed on it.

A minute and more: it starts two Rays, each of which starts half a dozen processes.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
SMALL = ("--num-cpus", "2", "--object-store-memory", "100000000")
DRIVER = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT)!r} + "/tests"]
from verl.agent_trainer.entry import run
from verl.config import SFTConfig
from verl.single_controller.base import WorkerSpec
from verl.single_controller.start import start_workers

def work(config):
    spec = WorkerSpec("support.toy_workers:Calculator", args=(), num_threads=1, device="cpu")
    with start_workers(spec, config.trainer, config.ray_init) as group:
        print("nodes", *group.call_all("node"))
        print("sums", *group.call_all("sum_of_ranks"))
        print("mine", *group.call_all("variable", "MINE_A"))
        print("other", *group.call_all("variable", "OTHER"))

sys.exit(run(sys.argv[1:], work, SFTConfig, program="test", config_name="sft_trainer"))
"""


@dataclass(frozen=True)
class Node:
    """One machine of the cluster, as far as the script knows: a folder."""

    folder: Path
    home: Path

    @property
    def environment(self) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return clean | {"HOME": str(self.home), "RAY_CLUSTER_DIR": str(self.folder), "RAY_CLUSTER_WAIT_S": "90"}

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(ROOT / "scripts" / "ray_cluster.sh"), *arguments]
        return subprocess.run(
            command, env=self.environment | environment, capture_output=True, text=True, timeout=150, check=False
        )

    def succeed(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def processes(self) -> list[psutil.Process]:
        root = psutil.Process(int((self.folder / "process").read_text().split()[0]))
        return [root, *root.children(recursive=True)]


@dataclass(frozen=True)
class Cluster:
    address: str
    head: Node
    other: Node


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes with two CPUs each. They share a home, and so the token that the head makes in it."""
    # Ray's sockets lie under TMPDIR, whose path must be short; its default is fine.
    folder = tmp_path_factory.mktemp("ray")
    head, other = Node(folder / "head", folder), Node(folder / "other", folder)
    try:
        started = head.succeed("head", "--port", "0", *SMALL)
        [address] = re.findall(r"address is (\S+:\d+)", started)
        other.succeed("join", address, *SMALL)
        assert "has 2 nodes" in head.succeed("wait", address, "2")
        yield Cluster(address, head, other)
    finally:
        other.run("stop")
        head.run("stop")


def drive(cluster: Cluster, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    argv = ["data.train_file=x", "model.path=x", f"ray_init.address={cluster.address}", *overrides]
    variables = cluster.head.environment | {"RAY_AUTH_MODE": "token"} | environment
    return subprocess.run(
        [sys.executable, "-c", DRIVER, *argv], env=variables, capture_output=True, text=True, timeout=120, check=False
    )


def test_each_node_has_its_workers_in_rank_order_and_they_form_one_process_group(cluster: Cluster) -> None:
    run = drive(
        cluster,
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=2",
        "ray_init.env_vars=[MINE_*]",
        MINE_A="passed on",
        OTHER="kept back",
    )
    assert run.returncode == 0, run.stderr
    said = dict(
        line.split(" ", 1) for line in run.stdout.splitlines() if line.startswith(("nodes", "sums", "mine", "oth"))
    )
    first, second, third, fourth = said["nodes"].split()
    assert first == second != third == fourth
    assert said["sums"] == "10 10 10 10"
    assert said["mine"] == " ".join(["passed on"] * 4) and said["other"] == " ".join(["None"] * 4)


def test_what_a_cluster_lacks_is_said_at_once(cluster: Cluster) -> None:
    run = drive(cluster, "trainer.nnodes=3", "trainer.n_gpus_per_node=1")
    assert run.returncode == 2
    assert re.search(
        r"error: trainer.nnodes=3 .*: 2 of the Ray cluster's 2 nodes have 1 CPU \(.*: 2 CPU, .*: 2 CPU\)", run.stderr
    )


@pytest.mark.slow  # Ray tries for 20 s
def test_without_the_token_the_cluster_lets_nobody_in(cluster: Cluster, tmp_path: Path) -> None:
    run = drive(cluster, RAY_AUTH_MODE="disabled", HOME=str(tmp_path))
    assert run.returncode == 2
    assert "asks for its token; export RAY_AUTH_MODE=token" in run.stderr.splitlines()[-1]


def test_a_second_node_in_one_folder_is_refused(cluster: Cluster) -> None:
    refused = cluster.other.run("join", cluster.address, *SMALL)
    assert refused.returncode == 1 and "a node runs here already" in refused.stderr


def test_stop_ends_its_own_node_and_no_other(cluster: Cluster) -> None:
    own, others = cluster.other.processes(), cluster.head.processes()
    assert {"raylet"} <= {process.name() for process in own}
    assert "stopped" in cluster.other.succeed("stop")
    _, alive = psutil.wait_procs(own, timeout=30)
    assert alive == [] and all(process.is_running() for process in others)
    assert "nothing to stop" in cluster.other.succeed("stop")


def test_a_process_that_took_the_id_of_a_dead_node_is_left_alone(tmp_path: Path) -> None:
    node = Node(tmp_path, tmp_path)
    (tmp_path / "process").write_text(f"{os.getpid()}\nMon Jan  1 00:00:00 2001\n")
    assert "nothing to stop" in node.succeed("stop")


def test_an_address_without_a_cluster_is_an_error_within_seconds(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        node = Node(tmp_path / "node", tmp_path)
        joined = node.run("join", address, RAY_CLUSTER_WAIT_S="1")
        assert joined.returncode == 1 and f"no Ray head at {address} within 1 s" in joined.stderr
        run = drive(Cluster(address, node, node))
    assert run.returncode == 2
    assert f"ray_init.address={address} (or RAY_ADDRESS): no Ray there" in run.stderr.splitlines()[-1]


@pytest.mark.parametrize("arguments", [[], ["join"], ["wait", "x:1"], ["restart"]])
def test_other_words_print_the_usage(arguments: list[str], tmp_path: Path) -> None:
    run = Node(tmp_path, tmp_path).run(*arguments)
    assert run.returncode == 2 and "ray_cluster.sh join HOST:PORT" in run.stderr
