"""A vLLM engine whose model is spread over two processes: its numbers, and how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from support.engines import (
    HIDDEN_SIZE,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    assert_samples_the_actors_policy_and_update,
    dump_ids,
    play_all,
    prompt_ids,
    start_vllm,
)
from support.models import save_tiny_model, tiny_qwen2
from transformers import AutoModelForCausalLM

from agentgym_rl.errors import ConfigError, EngineError
from agentgym_rl.types import Generation, SamplingParams
from verl.config import ActorConfig, ModelConfig, OptimConfig
from verl.workers.actor import Actor
from verl.workers.rollout.engine import Engine
from verl.workers.rollout.engine_group import EngineGroup
from verl.workers.rollout.hf_engine import HFEngine

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=HIDDEN_SIZE)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    engine = start_vllm(folder, num_devices=2)
    yield engine
    engine.close()


def engine_processes(owner: int) -> list[psutil.Process]:
    return [process for process in psutil.Process(owner).children(recursive=True) if process.name().startswith("VLLM")]


def assert_no_named_shared_memory(processes: list[psutil.Process]) -> None:
    """What these processes share is freed with the last of them, however it ends."""
    paths = {Path(each.path) for process in processes for each in process.memory_maps()}
    # Python itself keeps the names of semaphores, 32 bytes each.
    rings = {path for path in paths if path.parent == Path("/dev/shm") and not path.name.startswith("sem.")}
    assert rings and not any(path.exists() for path in rings)


def wait_until(condition: Callable[[], bool], *, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_greedy_trajectories_of_hf_and_of_two_processes_have_the_same_ids(engine: Engine, folder: Path) -> None:
    weights = dict(tiny_qwen2(seed=5, hidden_size=HIDDEN_SIZE).named_parameters())
    hf = HFEngine(AutoModelForCausalLM.from_pretrained(folder), max_num_seqs=MAX_NUM_SEQS)
    try:
        for each in (hf, engine):
            each.load_weights(weights.items(), 1)
        records = play_all(hf, 6, temperature=0.0, max_tokens=12)
    finally:
        hf.close()
    assert dump_ids(play_all(engine, 6, temperature=0.0, max_tokens=12)) == dump_ids(records)


def test_sampled_log_probs_are_the_actors_own_after_each_of_two_updates(engine: Engine, folder: Path) -> None:
    actor = Actor(
        ModelConfig(path=str(folder)),
        ActorConfig(optim=OptimConfig(lr=1e-2), entropy_coeff=1.0),
        device="cpu",
        temperature=0.8,
        total_updates=2,
        loss_norm_constant=10.0,
    )
    for version in (1, 2, 3):
        engine.sleep()
        engine.load_weights(actor.state_dict_items(on_device=True), version)
        engine.wake()
        assert_samples_the_actors_policy_and_update(engine, actor)


def test_a_killed_process_of_one_device_ends_the_engine_and_fails_its_turns(folder: Path, engine: Engine) -> None:
    processes = engine_processes(os.getpid())
    workers = [process for process in processes if "Worker" in process.name()]
    assert len(workers) == 2 and len(processes) == 3
    assert_no_named_shared_memory(processes)

    async def scenario() -> list[Generation | BaseException]:
        sampling = SamplingParams(MAX_MODEL_LEN - 100, seed=1)
        turns = [asyncio.create_task(engine.generate(prompt_ids(i), sampling, trajectory_id=f"t{i}")) for i in range(3)]
        await asyncio.sleep(0.2)
        assert not any(turn.done() for turn in turns)
        workers[1].kill()
        return await asyncio.wait_for(asyncio.gather(*turns, return_exceptions=True), 60)

    errors = asyncio.run(scenario())
    assert all(isinstance(error, EngineError) and "has died" in str(error) for error in errors)
    for refused in (engine.wake, lambda: engine.load_weights([], 9), engine.raise_if_down):
        with pytest.raises(EngineError, match="has died"):
            refused()
    engine.close()
    wait_until(lambda: all(map(has_ended, processes)), limit_s=10)


OWNER = """
import sys
from pathlib import Path
from support.engines import start_vllm

if __name__ == "__main__":
    engine = start_vllm(Path(sys.argv[1]), num_devices=2)
    print("started", flush=True)
    sys.stdin.read()
"""


def test_all_processes_of_an_engine_end_with_an_owner_that_was_killed(folder: Path, tmp_path: Path) -> None:
    program = tmp_path / "owner.py"
    program.write_text(OWNER)
    root = Path(__file__).parents[3]
    owner = subprocess.Popen(
        [sys.executable, program, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"},
    )
    try:
        assert owner.stdout is not None
        assert "started\n" in iter(owner.stdout.readline, "")
        processes = engine_processes(owner.pid)
        assert len(processes) == 3
        assert_no_named_shared_memory(processes)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate()
    wait_until(lambda: all(map(has_ended, processes)), limit_s=10)


def test_heads_that_cannot_be_shared_out_are_a_configuration_error(tmp_path: Path) -> None:
    for size, num_kv_heads in ((3, 4), (8, 4)):
        model = save_tiny_model(tmp_path / str(size), hidden_size=HIDDEN_SIZE, num_kv_heads=num_kv_heads)
        with pytest.raises(ConfigError, match=rf"tensor_model_parallel_size={size}: must divide the 4 attention heads"):
            start_vllm(model, num_devices=size)


def test_the_engines_processes_see_the_devices_of_all_their_ranks() -> None:
    pytest.importorskip("vllm")
    from verl.workers.rollout.vllm_engine import VLLMPlace, _process_environment

    group = EngineGroup(2, 0, visible_devices=("2", "3"))
    place = VLLMPlace(torch.device("cuda", 0), torch.bfloat16, num_threads=1, num_engines=1, group=group)
    assert _process_environment(place, "/tmp")["CUDA_VISIBLE_DEVICES"] == "2,3"


class ThreadGroup:
    """`EngineGroup` of threads."""

    def __init__(self, size: int) -> None:
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=30)

    def member(self, place: int) -> SimpleNamespace:
        def exchange(value: Any) -> list[Any]:
            self._values[place] = value
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()
            return values

        return SimpleNamespace(exchange=exchange, wait=lambda: exchange(None))


def test_each_device_shows_its_copy_of_a_chunk_until_the_engine_has_read_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of steps on CUDA, with what is asked of a GPU replaced."""
    pytest.importorskip("vllm")
    from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_BUFFER_SIZE_BYTES, PackedIpcChunk

    from verl.workers.rollout import vllm_weights

    buffers, sizes, reads, collected = {"gpu0": "", "gpu1": ""}, [], [], []

    def producer(iterator: Any, gpu_uuid: str, post_iter_func: Any, buffer_size_bytes: int) -> Iterator[PackedIpcChunk]:
        sizes.append(buffer_size_bytes)
        for item in iterator:
            buffers[gpu_uuid] = item[0]
            assert post_iter_func(item).dtype == torch.bfloat16
            yield PackedIpcChunk([item[0]], [[1]], ["bfloat16"], [2], {gpu_uuid: (gpu_uuid,)})

    def read(info: dict[str, Any]) -> None:
        assert set(info["ipc_handles"]) == {"gpu0", "gpu1"}
        time.sleep(0.02)  # room for a rank that does not wait
        reads.append((info["names"], [buffers[uuid] for (uuid,) in info["ipc_handles"].values()]))

    monkeypatch.setattr(vllm_weights, "packed_ipc_producer", producer)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"gpu{device.index}"))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: collected.append(1))
    client: Any = SimpleNamespace(
        start_weight_update=lambda: None, update_weights=read, finish_weight_update=lambda: reads.append("finished")
    )
    weights = [(name, torch.ones(1)) for name in "abc"]
    group, kind, largest = ThreadGroup(2), torch.bfloat16, 2 * DEFAULT_PACKED_BUFFER_SIZE_BYTES
    leader: Any = {"device": torch.device("cpu", 0), "dtype": kind, "group": group.member(0)}
    follower: Any = {"device": torch.device("cpu", 1), "dtype": kind, "group": group.member(1)}
    with ThreadPoolExecutor(1) as other:
        sharing = other.submit(vllm_weights.share_by_cuda_ipc, weights, **follower)
        vllm_weights.send_by_cuda_ipc(weights, client, largest_bytes=largest, **leader)
        sharing.result()
    assert reads == [(["a"], ["a", "a"]), (["b"], ["b", "b"]), (["c"], ["c", "c"]), "finished"]
    assert sizes == [largest, largest] and len(collected) == 2
