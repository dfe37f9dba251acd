"""The scripts of examples/sft, dpo and agentevol, as SMOKE=1 runs them on a CPU; each begins with what came before."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.servers import serve_process

from agentgym_rl.data.conversations import read_conversations
from agentgym_rl.data.pairs import read_pairs
from verl.utils.tracking import read_metrics

PROJECT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.server, pytest.mark.slow]


def run(script: str, **variables: str | Path) -> str:
    """What the script printed; it must succeed."""
    environment = os.environ | {"SMOKE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", f"examples/{script}", "textcraft"],
        cwd=PROJECT,
        env=environment | {name: str(value) for name, value in variables.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.mark.timeout(1200)  # five programs, beside whatever else the machine does
def test_the_scripts_run_one_after_the_other(tmp_path: Path) -> None:
    with serve_process("textcraft") as server:
        given: dict[str, str | Path] = {"SMOKE_DIR": tmp_path / "smoke", "ENV_ADDR": server.url}
        sft, dpo, evolution = (tmp_path / name for name in ("sft", "dpo", "agentevol"))
        run("sft/sft.sh", OUT=sft, **given)
        demonstrations = sft / "demonstrations.jsonl"
        assert len(read_conversations(demonstrations)) == 4
        assert [row["step"] for row in read_metrics(sft / "metrics.jsonl")] == [1, 2]

        given["MODEL"] = sft / "huggingface"
        run("dpo/dpo.sh", OUT=dpo, **given)
        assert {pair.item_id for pair in read_pairs(dpo / "pairs.jsonl")} == {f"textcraft_{n}" for n in range(4)}
        assert read_metrics(dpo / "metrics.jsonl")[0]["train/loss"] == pytest.approx(0.6931, abs=1e-4)

        given["MODEL"] = dpo / "huggingface"
        printed = run("agentevol/agentevol.sh", OUT=evolution, CONVERSATIONS=demonstrations, **given)
        assert (evolution / "table.txt").read_text() in printed
        assert (evolution / "iteration_1" / "sft" / "huggingface" / "config.json").is_file()
