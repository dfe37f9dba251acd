"""vLLM loads the folder that a checkpoint holds for it, and computes what the trained model does."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.batches import random_batch
from support.engines import HIDDEN_SIZE, assert_all_exact, play_all, start_vllm
from support.models import save_tiny_model
from transformers import AutoModelForCausalLM

from verl.config import ActorConfig, ModelConfig, OptimConfig
from verl.trainer.core_algos import BatchTotals
from verl.workers.actor import Actor

pytestmark = pytest.mark.vllm


def test_vllm_samples_from_the_folder_of_a_checkpoint(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", hidden_size=HIDDEN_SIZE)
    actor = Actor(
        ModelConfig(path=str(model)),
        ActorConfig(optim=OptimConfig(lr=1e-2)),
        device="cpu",
        temperature=1.0,
        total_updates=1,
        loss_norm_constant=1.0,
    )
    batch = random_batch([5, 17, 3, 40])
    actor.update([batch], [BatchTotals.of(batch)])
    exported = tmp_path / "actor" / "huggingface"
    actor.prepare_save(tmp_path / "actor", export_to=exported)()
    engine = start_vllm(exported)
    try:
        records = play_all(engine, 3)
    finally:
        engine.close()
    assert_all_exact(AutoModelForCausalLM.from_pretrained(exported), records)
