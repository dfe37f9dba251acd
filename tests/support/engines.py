"""What tests of engines share: a model, trajectories of several turns, and the numbers that must come out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from agentgym_rl.types import Generation, SamplingParams
from verl.config import ModelConfig, RolloutConfig
from verl.protocol import DataProto
from verl.trainer.core_algos import BatchTotals
from verl.workers.actor import Actor
from verl.workers.rollout.engine import Engine
from verl.workers.rollout.engine_group import EngineGroup
from verl.workers.rollout.selection import prepare_vllm

VOCAB_SIZE = 64
STOP = 3
# The smallest attention heads that vLLM takes on a CPU have 32 numbers; the tiny model has 4 heads.
HIDDEN_SIZE = 128
MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 8

Record = list[tuple[list[int], Generation]]
"""Of each turn: the sequence before it, and what was sampled."""


def start_vllm(folder: Path, *, num_devices: int = 1, **options: int) -> Engine:
    """A vLLM engine with the model in ``folder``, over so many processes; skips the test without vLLM."""
    pytest.importorskip("vllm")
    prepare_vllm("cpu")
    from verl.workers.rollout.vllm_engine import VLLMEngine, VLLMPlace

    rollout = RolloutConfig(name="vllm", max_num_seqs=MAX_NUM_SEQS)
    group = EngineGroup(num_devices)
    place = VLLMPlace(torch.device("cpu"), torch.float32, num_threads=1, num_engines=1, group=group)
    return VLLMEngine(ModelConfig(path=str(folder)), rollout, place, max_model_len=MAX_MODEL_LEN, **options)


def prompt_ids(seed: int, length: int = 30) -> list[int]:
    return np.random.default_rng(seed).integers(4, VOCAB_SIZE, length).tolist()


async def play(
    engine: Engine,
    prompt: Sequence[int],
    *,
    trajectory_id: str,
    seed: int,
    turns: int = 4,
    max_tokens: int = 7,
    temperature: float = 1.0,
) -> Record:
    """A trajectory with observations between its turns, longer from turn to turn."""
    sequence, record = list(prompt), []
    for turn in range(turns):
        sampling = SamplingParams(max_tokens, temperature, stop_token_ids=(STOP,), seed=seed * 100 + turn)
        generation = await engine.generate(sequence, sampling, trajectory_id=trajectory_id)
        record.append((list(sequence), generation))
        sequence += [*generation.token_ids, *prompt_ids(seed * 31 + turn, 3 + turn * 5)]
        await asyncio.sleep(0)
    engine.release(trajectory_id)
    return record


def play_all(engine: Engine, num_trajectories: int, **options: float) -> list[Record]:
    """Trajectories at once, of which each three share a prompt."""

    async def plays() -> list[Record]:
        return await asyncio.gather(
            *(
                play(engine, prompt_ids(i // 3), trajectory_id=f"t{i}", seed=i, **options)  # type: ignore[arg-type]
                for i in range(num_trajectories)
            )
        )

    return asyncio.run(plays())


def expected_log_probs(
    model: PreTrainedModel, sequence: Sequence[int], generation: Generation, temperature: float = 1.0
) -> list[float]:
    """By one forward pass of transformers over the whole sequence."""
    ids = torch.tensor([[*sequence, *generation.token_ids]])
    with torch.no_grad():
        log_probs = torch.log_softmax(model(ids).logits[0] / temperature, dim=-1)
    return [float(log_probs[len(sequence) + i - 1, token]) for i, token in enumerate(generation.token_ids)]


def assert_exact(
    model: PreTrainedModel, sequence: Sequence[int], generation: Generation, temperature: float = 1.0
) -> None:
    expected = expected_log_probs(model, sequence, generation, temperature)
    assert generation.log_probs == pytest.approx(expected, abs=1e-4)


def assert_all_exact(model: PreTrainedModel, records: Sequence[Record], temperature: float = 1.0) -> None:
    for record in records:
        for sequence, generation in record:
            assert_exact(model, sequence, generation, temperature)


def dump_ids(records: Sequence[Record]) -> str:
    """All sampled ids, for a comparison that shows where two differ."""
    return json.dumps([[generation.token_ids for _, generation in record] for record in records])


def assert_samples_the_actors_policy_and_update(engine: Engine, actor: Actor) -> None:
    """The engine's log-probs are the actor's own at a temperature of 0.8; then an update that changes them visibly."""
    turns = [turn for record in play_all(engine, 6, temperature=0.8) for turn in record]
    batch = DataProto.from_sequences(
        [[*sequence, *g.token_ids] for sequence, g in turns],
        [[0] * len(sequence) + [1] * len(g.token_ids) for sequence, g in turns],
    )
    batch = batch.replace(advantages_T=torch.linspace(-1, 1, batch.num_tokens))
    expected = actor.log_probs(batch)[batch.loss_mask_T]
    sampled = torch.tensor([log_prob for _, g in turns for log_prob in g.log_probs])
    torch.testing.assert_close(sampled, expected, atol=1e-4, rtol=0)
    actor.update([batch], [BatchTotals.of(batch)])
    assert float((actor.log_probs(batch)[batch.loss_mask_T] - expected).abs().max()) > 0.01
