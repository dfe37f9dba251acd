"""What is the hf engine's own: its cache, its model families, and how it breaks. The rest is in test_engines.py."""

from __future__ import annotations

import asyncio
import copy

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from agentgym_rl.errors import ConfigError, EngineError
from agentgym_rl.types import Generation, SamplingParams
from verl.workers.rollout import hf_engine
from verl.workers.rollout.hf_engine import HFEngine

VOCAB = 97
STOP = 3


def _model(seed: int = 0, kind: str = "qwen2") -> torch.nn.Module:
    shape = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape)).eval()
    return Qwen2ForCausalLM(Qwen2Config(**shape)).eval()


@pytest.fixture
def reference():
    return _model()


@pytest.fixture
def engine(reference):
    engine = HFEngine(copy.deepcopy(reference), max_num_seqs=8)
    yield engine
    engine.close()


def _prompt(seed: int, length: int = 30) -> list[int]:
    return np.random.default_rng(seed).integers(4, VOCAB, length).tolist()


def _expected_log_probs(model, prompt, generation: Generation, temperature: float = 1.0) -> list[float]:
    ids = torch.tensor([[*prompt, *generation.token_ids]])
    with torch.no_grad():
        log_probs = torch.log_softmax(model(ids).logits[0] / temperature, dim=-1)
    return [float(log_probs[len(prompt) + i - 1, token]) for i, token in enumerate(generation.token_ids)]


def _assert_exact(model, prompt, generation: Generation, temperature: float = 1.0) -> None:
    assert generation.log_probs == pytest.approx(_expected_log_probs(model, prompt, generation, temperature), abs=2e-5)


async def _play(engine, prompt, *, trajectory_id: str, seed: int, turns: int = 4, max_tokens: int = 7):
    """A trajectory of several turns with observations between; returns (sequence before the turn, generation) pairs."""
    sequence, record = list(prompt), []
    for turn in range(turns):
        sampling = SamplingParams(max_tokens, stop_token_ids=(STOP,), seed=seed * 100 + turn)
        generation = await engine.generate(sequence, sampling, trajectory_id=trajectory_id)
        record.append((list(sequence), generation))
        sequence += [*generation.token_ids, *_prompt(seed * 31 + turn, 3 + turn * 5)]
        await asyncio.sleep(0)
    engine.release(trajectory_id)
    return record


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_log_probs_of_every_turn_equal_a_full_forward_pass(kind):
    reference = _model(kind=kind)
    engine = HFEngine(copy.deepcopy(reference), max_num_seqs=8)
    for sequence, generation in asyncio.run(_play(engine, _prompt(0), trajectory_id="a", seed=0)):
        _assert_exact(reference, sequence, generation)
    engine.close()


def test_more_trajectories_than_slots_with_shared_prompts_stay_exact(engine, reference):
    async def play_all():
        plays = [_play(engine, _prompt(i // 5), trajectory_id=f"t{i}", seed=i) for i in range(30)]
        return await asyncio.gather(*plays)

    for record in asyncio.run(play_all()):
        for sequence, generation in record:
            _assert_exact(reference, sequence, generation)


def test_only_appended_tokens_are_computed(engine):
    computed = []
    forward = engine._model.forward

    def counting_forward(*args, **kwargs):
        computed.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    engine._model.forward = counting_forward
    record = asyncio.run(_play(engine, _prompt(0, 200), trajectory_id="a", seed=0, turns=3))
    final_length = len(record[-1][0]) + len(record[-1][1].token_ids)
    # Every token of the sequence once, except the very last, which nothing follows.
    assert sum(computed) == final_length - 1


def test_members_of_a_group_compute_their_prompt_once(engine):
    computed = []
    forward = engine._model.forward
    engine._model.forward = lambda *a, **k: (computed.append(k["input_ids"].shape[1]), forward(*a, **k))[1]

    async def group():
        plays = [_play(engine, _prompt(0, 300), trajectory_id=f"g{i}", seed=i, turns=1, max_tokens=1) for i in range(8)]
        return await asyncio.gather(*plays)

    asyncio.run(group())
    assert sum(computed) == 300 + 7


def test_members_of_a_group_that_start_together_sample_their_turns_together(engine):
    passes = []
    forward = engine._model.forward
    engine._model.forward = lambda *a, **k: (passes.append(len(k["slot_batch"].slots_R)), forward(*a, **k))[1]

    async def group():
        plays = [engine.generate(_prompt(0), SamplingParams(3, seed=i), trajectory_id=f"g{i}") for i in range(8)]
        return await asyncio.gather(*plays)

    asyncio.run(group())
    # Prompt, the other members' copies of it, and then two more tokens of all.
    assert passes == [1, 7, 8, 8]


def test_each_token_is_drawn_by_its_own_number_of_the_seed_in_all_digits(engine, monkeypatch):
    drawn = []
    sample = hf_engine.sample_tokens
    monkeypatch.setattr(hf_engine, "sample_tokens", lambda *args: (drawn.append(args[2]), sample(*args))[1])
    asyncio.run(engine.generate(_prompt(0), SamplingParams(5, seed=12), trajectory_id="a"))
    assert torch.cat(drawn).tolist() == np.random.default_rng(12).random(5).tolist()


def test_a_broken_model_fails_every_waiting_turn_instead_of_hanging(engine, caplog):
    def broken(*args, **kwargs):
        raise RuntimeError("no such kernel")

    engine._model.forward = broken

    async def scenario():
        turns = [engine.generate(_prompt(i), SamplingParams(4), trajectory_id=f"t{i}") for i in range(3)]
        return await asyncio.gather(*turns, return_exceptions=True)

    errors = asyncio.run(scenario())
    assert all(isinstance(error, EngineError) and "no such kernel" in str(error) for error in errors)
    with pytest.raises(EngineError, match="no such kernel"):
        asyncio.run(engine.generate([5], SamplingParams(4), trajectory_id="late"))
    with pytest.raises(EngineError, match="no such kernel"):
        engine.raise_if_down()
    assert "in broken\n" in caplog.text  # where it broke


def test_sleep_frees_the_cache_and_generation_goes_on_after_wake(engine, reference):
    asyncio.run(_play(engine, _prompt(0), trajectory_id="a", seed=0))
    engine.sleep()
    assert not engine._cache._layers
    engine.wake()
    for sequence, generation in asyncio.run(_play(engine, _prompt(0), trajectory_id="b", seed=0)):
        _assert_exact(reference, sequence, generation)


def test_sliding_window_models_are_refused():
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_sliding_window=True, sliding_window=8, max_window_layers=0,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="sliding_attention"):
        HFEngine(Qwen2ForCausalLM(config))
