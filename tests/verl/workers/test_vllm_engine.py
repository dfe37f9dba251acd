"""How the vLLM engine ends, whoever ends it, and what it refuses; what it computes is tested in test_engines.py."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.engines import HIDDEN_SIZE, MAX_MODEL_LEN, assert_all_exact, play_all, prompt_ids, start_vllm
from support.models import save_tiny_model, tiny_qwen2

from agentgym_rl.errors import ConfigError, EngineError
from agentgym_rl.types import Generation, SamplingParams
from verl.workers.rollout.engine import Engine
from verl.workers.rollout.selection import prepare_vllm

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Load vLLM first: what it sets when it is imported is no trace of an engine."""
    pytest.importorskip("vllm")
    prepare_vllm("cpu")
    importlib.import_module("verl.workers.rollout.vllm_engine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=HIDDEN_SIZE)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """An empty folder with a name short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="e", dir="/tmp") as folder:
        yield Path(folder)


def engine_processes(owner: int) -> list[psutil.Process]:
    return [p for p in psutil.Process(owner).children(recursive=True) if "EngineCor" in p.name()]


def traces(folder: Path) -> dict[str, set[str]]:
    """What an engine of this process could leave behind; ``folder`` is where temporary files go."""
    process = psutil.Process()
    return {
        "files": {str(path) for path in folder.iterdir()},
        # Names of shared segments; semaphores and Ray's store belong to others.
        "shared memory": {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("psm_", "torch_"))},
        "threads": {t.name for t in threading.enumerate() if "engine" in t.name.lower()},
        "sockets": {str(c.laddr) for c in process.net_connections("unix") if str(folder) in str(c.laddr)},
        "ports": {str(c.laddr) for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN},
        "processes": {p.name() for p in engine_processes(process.pid)},
        "environment": {f"{name}={value}" for name, value in os.environ.items()},
    }


def wait_until(condition: Callable[[], bool], *, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def end_while_in_flight(engine: Engine, end: Callable[[], object]) -> list[Generation | BaseException]:
    """Three long turns, ended by ``end``; what their callers get."""

    async def scenario() -> list[Generation | BaseException]:
        turns = [
            asyncio.create_task(
                engine.generate(prompt_ids(i), SamplingParams(MAX_MODEL_LEN - 100, seed=i), trajectory_id=f"t{i}")
            )
            for i in range(3)
        ]
        await asyncio.sleep(0.1)
        assert not any(turn.done() for turn in turns)
        await asyncio.to_thread(end)
        return await asyncio.wait_for(asyncio.gather(*turns, return_exceptions=True), 30)

    return asyncio.run(scenario())


def assert_refuses_everything(engine: Engine, reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        asyncio.run(engine.generate([5], SamplingParams(4), trajectory_id="late"))
    with pytest.raises(EngineError, match=reason):
        engine.load_weights(tiny_qwen2(hidden_size=HIDDEN_SIZE).named_parameters(), 1)
    with pytest.raises(EngineError, match=reason):
        engine.wake()
    with pytest.raises(EngineError, match=reason):
        engine.raise_if_down()
    engine.sleep()


def test_closing_ends_turns_in_flight_and_leaves_nothing_behind(
    folder: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    before = traces(temporary)
    engine = start_vllm(folder)
    try:
        assert len(engine_processes(os.getpid())) == 1
        model = tiny_qwen2(seed=1, hidden_size=HIDDEN_SIZE)
        engine.load_weights(model.named_parameters(), 1)
        assert_all_exact(model, play_all(engine, 2))
        errors = end_while_in_flight(engine, engine.close)
    finally:
        engine.close()
    assert all(isinstance(error, EngineError) for error in errors)
    assert_refuses_everything(engine, "the engine is closed")
    assert {kind: names - before[kind] for kind, names in traces(temporary).items()} == {kind: set() for kind in before}


def test_names_of_sockets_stay_until_an_answer_has_come_through_each(
    folder: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    names_at_answers: list[int] = []
    ask = AsyncLLM.get_supported_tasks

    async def asked(llm: AsyncLLM) -> object:
        answer = await ask(llm)
        names_at_answers.append(sum(path.is_socket() for path in temporary.rglob("*")))
        return answer

    monkeypatch.setattr(AsyncLLM, "get_supported_tasks", asked)
    start_vllm(folder).close()
    assert len(names_at_answers) == 1 and names_at_answers[0] >= 2


def test_a_killed_engine_process_fails_every_waiting_turn_instead_of_hanging(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Temporary files may lie too deep for the names of sockets.
    deep = tmp_path / ("deep" * 10)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    engine = start_vllm(folder)
    try:
        [process] = engine_processes(os.getpid())
        errors = end_while_in_flight(engine, process.kill)
        assert all(isinstance(error, EngineError) and "has died" in str(error) for error in errors)
        assert_refuses_everything(engine, "has died")
    finally:
        engine.close()
    assert not engine_processes(os.getpid())


OWNER = """
import sys
from pathlib import Path
from support.engines import start_vllm

if __name__ == "__main__":
    engine = start_vllm(Path(sys.argv[1]))
    print("started", flush=True)
    sys.stdin.read()
"""


def test_an_engine_process_ends_with_an_owner_that_was_killed(folder: Path, tmp_path: Path, temporary: Path) -> None:
    program = tmp_path / "owner.py"
    program.write_text(OWNER)
    root = Path(__file__).parents[3]
    owner = subprocess.Popen(
        [sys.executable, program, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}", "TMPDIR": str(temporary)},
    )
    try:
        assert owner.stdout is not None
        assert "started\n" in iter(owner.stdout.readline, "")
        [process] = engine_processes(owner.pid)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate()
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, limit_s=10)
    assert not list(temporary.iterdir())


def test_models_that_vllm_cannot_run_are_configuration_errors(tmp_path: Path) -> None:
    small_heads = save_tiny_model(tmp_path / "heads", hidden_size=32)
    with pytest.raises(ConfigError, match=r"attention heads of 32, 64, .* have 8; take rollout.name=hf"):
        start_vllm(small_heads)
    too_short = save_tiny_model(tmp_path / "short", hidden_size=HIDDEN_SIZE)
    config = too_short / "config.json"
    config.write_text(config.read_text().replace('"max_position_embeddings": 2048', '"max_position_embeddings": 512'))
    with pytest.raises(ConfigError, match=r"(?s)vLLM cannot run model.path=.*max_model_len"):
        start_vllm(too_short)
