"""A run that is ended in the middle of its rollouts leaves no session on the environment's server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests
from support.models import tiny_qwen2
from support.servers import serve_process
from support.tokenizers import make_tokenizer

pytestmark = [pytest.mark.server, pytest.mark.ray]

# Whatever signal the test's own process was started to ignore.
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from verl.agent_trainer.entry import run
from verl.agent_trainer.main_generation import evaluate
from verl.config import GenerationConfig
sys.exit(run(sys.argv[1:], evaluate, GenerationConfig, program="test", config_name="generation"))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("model"), make_tokenizer()
    tiny_qwen2(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def sessions_at(url: str) -> int:
    return requests.get(f"{url}/health", timeout=10).json()["sessions"]


def wait_for_sessions(url: str, program: subprocess.Popen[str], count: int) -> None:
    end = time.monotonic() + 120
    while sessions_at(url) < count:
        assert program.poll() is None, program.communicate()[1]
        assert time.monotonic() < end, "no rollout began"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("group", "number", "status"),
    [("ray", signal.SIGINT, 130), ("ray", signal.SIGTERM, 143), ("local", signal.SIGTERM, 143)],
)
def test_no_session_outlives_the_run(
    group: str, number: signal.Signals, status: int, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "items.json").write_text(json.dumps([f"textcraft_{index}" for index in range(500)]))
    with serve_process("textcraft") as server:
        overrides = [
            f"data.path={tmp_path / 'items.json'}",
            f"model.path={model}",
            "agentgym.task_name=textcraft",
            f"agentgym.env_addr={server.url}",
            "agentgym.max_rounds=1000",
            "data.max_response_length=30000",
            "rollout.max_tokens=16",
            f"rollout.rollout_log_dir={tmp_path / 'results'}",
            "trainer.device=cpu",
            "trainer.num_threads=1",
            f"trainer.worker_group={group}",
            f"trainer.n_gpus_per_node={2 if group == 'ray' else 1}",
        ]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen([sys.executable, "-c", PROGRAM, *overrides], **pipes) as program:
            try:
                wait_for_sessions(server.url, program, 8)
                program.send_signal(number)
                _, errors = program.communicate(timeout=60)
            finally:
                program.kill()
        assert program.returncode == status, errors
        assert sessions_at(server.url) == 0
