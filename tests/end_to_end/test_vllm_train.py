"""A training run on TextCraft whose turns a real vLLM engine samples."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from support.engines import HIDDEN_SIZE
from support.models import tiny_qwen2
from support.servers import serve_process
from support.tokenizers import make_tokenizer

from agentgym_rl.rollout.log import read_trajectories
from verl.utils.tracking import read_metrics

pytestmark = [pytest.mark.server, pytest.mark.ray, pytest.mark.vllm]

pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a model and items, and the URL of a running server in ``url``."""
    folder, tokenizer = tmp_path_factory.mktemp("world"), make_tokenizer()
    tiny_qwen2(vocab_size=len(tokenizer), hidden_size=HIDDEN_SIZE).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "train.json").write_text(json.dumps([{"item_id": f"textcraft_{index}"} for index in range(8)]))
    with serve_process("textcraft") as server:
        (folder / "url").write_text(server.url)
        yield folder


def test_three_steps_of_training_sample_with_the_weights_of_the_step_before(world: Path) -> None:
    out = world / "run"
    rows = train(world, out, "trainer.total_training_steps=3")
    assert len(rows) == 3
    assert_sampled_by_the_actor(out, rows)


def test_two_workers_train_with_one_engine_that_spans_them(world: Path) -> None:
    out = world / "spanned"
    rows = train(
        world,
        out,
        "trainer.total_training_steps=2",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    )
    assert len(rows) == 2
    assert_sampled_by_the_actor(out, rows)
    # All is played by the first worker, whose fair share is everything.
    assert all(row["rollout/sessions_peak"] == 8 for row in rows)
    assert all(0 < row["rollout/engine_busy_share"] <= 1 for row in rows)
    assert {path.name for path in (out / "trajectories").glob("*/*")} == {"0.jsonl", "step.json"}


def train(world: Path, out: Path, *overrides: str) -> list[dict[str, float]]:
    """Metrics of the steps of a run with vLLM, 8 trajectories each."""
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "verl.agent_trainer.main_ppo",
            f"data.train_file={world / 'train.json'}",
            "data.train_batch_size=4",
            "data.max_response_length=400",
            "actor_rollout_ref.agentgym.task_name=textcraft",
            f"actor_rollout_ref.agentgym.env_addr={(world / 'url').read_text()}",
            f"actor_rollout_ref.model.path={world / 'model'}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.actor.optim.lr=1e-2",
            # A random model crafts nothing, so entropy is what it is trained on.
            "actor_rollout_ref.actor.entropy_coeff=0.1",
            "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.rollout.max_tokens=12",
            "actor_rollout_ref.rollout.max_num_seqs=16",
            "algorithm.rounds_ctrl.rounds=3",
            f"trainer.default_local_dir={out}",
            "trainer.device=cpu",
            "trainer.num_threads=1",
            *overrides,
        ],
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return read_metrics(out / "metrics.jsonl")


def assert_sampled_by_the_actor(out: Path, rows: Sequence[Mapping[str, float]]) -> None:
    """Each step's trajectories, with the weights of the step before."""
    # The engine's log-probs against the actor's, which is another model after each update.
    assert all(0 < row["training/rollout_probs_diff_max"] < 1e-4 for row in rows)
    assert all(row["actor/grad_norm"] > 0 and row["training/updates"] == 2 for row in rows)
    for step in range(1, len(rows) + 1):
        trajectories = read_trajectories(out / "trajectories" / f"step{step}").trajectories
        assert len(trajectories) == 8 and not any(t.masked for t in trajectories)
        assert all(t.policy_version == step - 1 for t in trajectories)
