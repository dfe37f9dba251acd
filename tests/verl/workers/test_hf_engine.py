"""The hf engine against plain transformers: same log-probs whatever is cached, shared, or decoded beside it."""

from __future__ import annotations

import asyncio
import copy

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from agentgym_rl.errors import ConfigError, EngineError
from agentgym_rl.types import FinishReason, Generation, SamplingParams
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


def test_a_seeded_turn_is_the_same_alone_and_in_company(engine):
    async def alone():
        return await _play(engine, _prompt(1), trajectory_id="x", seed=7)

    async def in_company():
        others = [_play(engine, _prompt(i), trajectory_id=f"o{i}", seed=i, max_tokens=3 + i) for i in range(10, 16)]
        return (await asyncio.gather(alone(), *others))[0]

    first, second = asyncio.run(alone()), asyncio.run(in_company())
    assert [g.token_ids for _, g in first] == [g.token_ids for _, g in second]


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


def test_generation_ends_at_a_stop_token_or_at_max_tokens(engine):
    async def generate(stop):
        sampling = SamplingParams(12, stop_token_ids=stop, seed=5)
        return await engine.generate(_prompt(2), sampling, trajectory_id="a")

    unstopped = asyncio.run(generate(()))
    assert (len(unstopped.token_ids), unstopped.finish_reason) == (12, FinishReason.LENGTH)
    fourth = unstopped.token_ids[3]
    stopped = asyncio.run(generate((fourth,)))
    end = unstopped.token_ids.index(fourth) + 1
    assert (stopped.token_ids, stopped.finish_reason) == (unstopped.token_ids[:end], FinishReason.STOP)


def test_temperature_scales_the_reported_log_probs_and_zero_is_greedy(engine, reference):
    async def generate(temperature):
        sampling = SamplingParams(6, temperature=temperature, seed=1)
        return await engine.generate(_prompt(3), sampling, trajectory_id="a")

    _assert_exact(reference, _prompt(3), asyncio.run(generate(0.5)), temperature=0.5)
    greedy = asyncio.run(generate(0.0))
    _assert_exact(reference, _prompt(3), greedy)
    with torch.no_grad():
        assert greedy.token_ids[0] == int(reference(torch.tensor([_prompt(3)])).logits[0, -1].argmax())


def test_new_weights_are_used_at_once_and_old_cache_is_forgotten(engine):
    other = _model(seed=1)
    asyncio.run(_play(engine, _prompt(0), trajectory_id="before", seed=0))
    engine.load_weights(other.state_dict().items(), version=3)
    for sequence, generation in asyncio.run(_play(engine, _prompt(0), trajectory_id="after", seed=0)):
        assert generation.policy_version == 3
        _assert_exact(other, sequence, generation)


def test_weights_of_another_shape_or_incomplete_weights_are_refused(engine):
    weights = dict(_model().state_dict())
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(EngineError, match=r"up_proj.weight.*\(1, 1\)"):
        engine.load_weights({**weights, name: torch.zeros(1, 1)}.items(), version=1)
    del weights[name]
    with pytest.raises(EngineError, match=r"lack 1 .*up_proj"):
        engine.load_weights(weights.items(), version=1)


def test_loading_weights_aborts_what_is_in_flight(engine):
    async def scenario():
        sampling = SamplingParams(1500, seed=0)
        turn = asyncio.create_task(engine.generate(_prompt(0), sampling, trajectory_id="a"))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(engine.load_weights, _model().state_dict().items(), 1)
        await turn

    with pytest.raises(EngineError, match="weights of version 1"):
        asyncio.run(scenario())


def test_a_cancelled_turn_leaves_the_others_and_its_slot_sound(engine, reference):
    async def scenario():
        sampling = SamplingParams(1500, seed=0)
        doomed = [asyncio.create_task(engine.generate(_prompt(i), sampling, trajectory_id=f"d{i}")) for i in range(8)]
        await asyncio.sleep(0.05)
        for task in doomed:
            task.cancel()
        return await _play(engine, _prompt(0), trajectory_id="a", seed=0)

    for sequence, generation in asyncio.run(scenario()):
        _assert_exact(reference, sequence, generation)


def test_a_broken_model_fails_every_waiting_turn_instead_of_hanging(engine):
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


def test_sleep_frees_the_cache_and_generation_goes_on_after_wake(engine, reference):
    asyncio.run(_play(engine, _prompt(0), trajectory_id="a", seed=0))
    engine.sleep()
    assert not engine._cache._layers
    engine.wake()
    for sequence, generation in asyncio.run(_play(engine, _prompt(0), trajectory_id="b", seed=0)):
        _assert_exact(reference, sequence, generation)


def test_an_empty_prompt_or_budget_is_an_error_not_a_hang(engine):
    for prompt, max_tokens in (([], 4), ([5], 0)):
        with pytest.raises(EngineError, match="need 1 or more"):
            asyncio.run(engine.generate(prompt, SamplingParams(max_tokens), trajectory_id="a"))


def test_sliding_window_models_are_refused():
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_sliding_window=True, sliding_window=8, max_window_layers=0,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="sliding_attention"):
        HFEngine(Qwen2ForCausalLM(config))
