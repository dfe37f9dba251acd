"""A real server of vLLM as a hosted model. Its start takes minutes on a busy machine, so there is one test."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests
from support.environments import Script
from support.models import tiny_qwen2
from support.parity import TASK, parity_spec
from support.servers import serve
from support.tokenizers import make_tokenizer

from agentgym_rl.cli import main
from agentgym_rl.envs.registry import register
from agentgym_rl.envs.server import build_app
from agentgym_rl.evaluation.results import read_samples, report_on
from agentgym_rl.types import FinishReason

_START_S = 420.0


@contextmanager
def vllm_server(model: Path, log: Path) -> Iterator[str]:
    """``vllm serve`` with this model, called ``tiny``, until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--max-model-len", "512", "--max-num-seqs", "8", "--enforce-eager"),
    ]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            wait_until_up(f"http://127.0.0.1:{port}/health", server, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()
            server.wait(60)


def wait_until_up(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _START_S
    while server.poll() is None and time.monotonic() < end:
        try:
            if requests.get(url, timeout=5).status_code == 200:
                return
        except requests.RequestException:
            time.sleep(0.5)
    raise AssertionError(f"vLLM did not start: {log.read_text()[-2000:]}")


@pytest.mark.vllm
@pytest.mark.server
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_served_model_is_evaluated_like_any_other(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    model, tokenizer = tmp_path / "model", make_tokenizer()
    tiny_qwen2(vocab_size=len(tokenizer), hidden_size=128).save_pretrained(model)
    tokenizer.save_pretrained(model)
    items = tmp_path / "items.json"
    items.write_text(json.dumps([f"{TASK}_{index}" for index in range(4)]))
    spec = parity_spec(Script(turns=2))
    register(spec)
    with vllm_server(model, tmp_path / "vllm.log") as api_base, serve(build_app(spec)) as url:
        arguments = ["eval", "--api-base", api_base, "--model", "tiny", "--task", TASK, "--env-addr", url]
        arguments += [
            "--data",
            str(items),
            "--temperature",
            "0",
            "--seed",
            "1",
            "--max-tokens",
            "6",
            "--max-retries",
            "1",
        ]
        for name in ("first", "second"):
            assert main([*arguments, "--out", str(tmp_path / name)]) == 0
    report = report_on(tmp_path / "first")
    assert (report.overall.num_items, report.num_faults) == (4, 0)
    assert report.usage is not None and report.usage.answers == 8 and report.usage.models == ("tiny",)
    assert report.usage.prompt_tokens > 8 * 10 and 0 < report.usage.completion_tokens <= 8 * 6
    first, second = (texts_of(tmp_path / name) for name in ("first", "second"))
    assert first == second  # greedy
    turns = [turn for trajectory in read_samples(tmp_path / "first") for turn in trajectory.turns]
    assert any(turn.finish_reason == FinishReason.LENGTH for turn in turns)


def texts_of(folder: Path) -> dict[str, list[str]]:
    """What the model wrote at each item."""
    return {each.item.item_id: [turn.text for turn in each.turns] for each in read_samples(folder)}
