"""What every engine must do, asked of each: exact log-probs, weights, aborts, seeds, counters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.engines import (
    HIDDEN_SIZE,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    STOP,
    assert_all_exact,
    assert_exact,
    assert_samples_the_actors_policy_and_update,
    dump_ids,
    play,
    play_all,
    prompt_ids,
    start_vllm,
)
from support.models import save_tiny_model, tiny_qwen2
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentgym_rl.errors import EngineError
from agentgym_rl.types import FinishReason, Generation, SamplingParams
from verl.config import ActorConfig, ModelConfig, OptimConfig
from verl.workers.actor import Actor
from verl.workers.rollout.engine import Engine
from verl.workers.rollout.hf_engine import HFEngine

LONG = MAX_MODEL_LEN - 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=HIDDEN_SIZE)


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def hf(folder: Path) -> Iterator[Engine]:
    engine = HFEngine(AutoModelForCausalLM.from_pretrained(folder), max_num_seqs=MAX_NUM_SEQS)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def vllm(folder: Path) -> Iterator[Engine]:
    engine = start_vllm(folder)
    yield engine
    engine.close()


@pytest.fixture(params=["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine(request: pytest.FixtureRequest, reference: PreTrainedModel) -> Engine:
    """Each engine, with the weights of ``reference``."""
    engine: Engine = request.getfixturevalue(request.param)
    engine.load_weights(reference.named_parameters(), 0)
    return engine


def generate(engine: Engine, prompt: list[int], sampling: SamplingParams) -> Generation:
    return asyncio.run(engine.generate(prompt, sampling, trajectory_id="alone"))


async def in_flight(engine: Engine, number: int = 1) -> list[asyncio.Task[Generation]]:
    """Turns so long that they are still being sampled a moment later."""
    turns = [
        asyncio.create_task(engine.generate(prompt_ids(i), SamplingParams(LONG, seed=i), trajectory_id=f"long{i}"))
        for i in range(number)
    ]
    await asyncio.sleep(0.05)
    assert not any(turn.done() for turn in turns)
    return turns


def test_log_probs_of_every_turn_equal_a_full_forward_pass(engine: Engine, reference: PreTrainedModel) -> None:
    # More trajectories than the engine decodes at once.
    records = play_all(engine, 2 * MAX_NUM_SEQS)
    assert_all_exact(reference, records)
    assert {g.finish_reason for record in records for _, g in record} == {FinishReason.STOP, FinishReason.LENGTH}
    assert all(g.policy_version == 0 for record in records for _, g in record)


@pytest.mark.vllm
def test_greedy_trajectories_of_hf_and_vllm_have_the_same_ids(hf: Engine, vllm: Engine, folder: Path) -> None:
    for version, seed in enumerate((5, 6), start=1):
        weights = dict(tiny_qwen2(seed=seed, hidden_size=HIDDEN_SIZE).named_parameters())
        for engine in (hf, vllm):
            engine.load_weights(weights.items(), version)
        records = play_all(hf, 9, temperature=0.0, max_tokens=12)
        assert dump_ids(play_all(vllm, 9, temperature=0.0, max_tokens=12)) == dump_ids(records)


def test_a_seeded_turn_is_the_same_alone_and_in_company(engine: Engine) -> None:
    async def in_company() -> list:
        others = [play(engine, prompt_ids(i), trajectory_id=f"o{i}", seed=i, max_tokens=3 + i) for i in range(10, 16)]
        return (await asyncio.gather(play(engine, prompt_ids(1), trajectory_id="x", seed=7), *others))[0]

    alone = asyncio.run(play(engine, prompt_ids(1), trajectory_id="x", seed=7))
    assert dump_ids([asyncio.run(in_company())]) == dump_ids([alone])
    other_seed = asyncio.run(play(engine, prompt_ids(1), trajectory_id="x", seed=8))
    assert dump_ids([other_seed]) != dump_ids([alone])


def test_turns_without_a_seed_differ(engine: Engine) -> None:
    async def turns() -> list[Generation]:
        sampling = SamplingParams(20)
        return await asyncio.gather(
            *(engine.generate(prompt_ids(0), sampling, trajectory_id=f"t{i}") for i in range(4))
        )

    assert len({generation.token_ids for generation in asyncio.run(turns())}) == 4


def test_generation_ends_at_a_stop_token_or_at_max_tokens(engine: Engine) -> None:
    unstopped = generate(engine, prompt_ids(2), SamplingParams(12, seed=5))
    assert (len(unstopped.token_ids), unstopped.finish_reason) == (12, FinishReason.LENGTH)
    stop = unstopped.token_ids[3]
    stopped = generate(engine, prompt_ids(2), SamplingParams(12, seed=5, stop_token_ids=(stop, STOP)))
    end = next(i for i, token in enumerate(unstopped.token_ids) if token in (stop, STOP)) + 1
    assert (stopped.token_ids, stopped.finish_reason) == (unstopped.token_ids[:end], FinishReason.STOP)


def test_only_the_named_tokens_stop_a_turn(engine: Engine) -> None:
    # 1 is the model's own end-of-sequence token: no business of the engine.
    generations = [generate(engine, prompt_ids(i), SamplingParams(60, seed=i)) for i in range(4)]
    assert any(1 in generation.token_ids[:-1] for generation in generations)
    assert all(generation.finish_reason == FinishReason.LENGTH for generation in generations)


def test_temperature_scales_the_reported_log_probs_and_zero_is_greedy(
    engine: Engine, reference: PreTrainedModel
) -> None:
    for temperature in (0.5, 1.7):
        sampled = generate(engine, prompt_ids(3), SamplingParams(6, temperature, seed=1))
        assert_exact(reference, prompt_ids(3), sampled, temperature)
    greedy = generate(engine, prompt_ids(3), SamplingParams(6, 0.0, seed=1))
    assert_exact(reference, prompt_ids(3), greedy)
    with torch.no_grad():
        ids = torch.tensor([[*prompt_ids(3), *greedy.token_ids]])
        assert reference(ids).logits[0, 29:-1].argmax(-1).tolist() == list(greedy.token_ids)


def test_top_k_and_top_p_keep_the_likeliest_tokens(engine: Engine, reference: PreTrainedModel) -> None:
    with torch.no_grad():
        likeliest = reference(torch.tensor([prompt_ids(4)])).logits[0, -1].argsort(descending=True)
    for sampling in ({"top_k": 2}, {"top_p": 1e-6}):
        kept = set(likeliest[: 2 if "top_k" in sampling else 1].tolist())
        sampled = {
            generate(engine, prompt_ids(4), SamplingParams(1, 2.0, seed=seed, **sampling)).token_ids[0]
            for seed in range(40)
        }
        assert sampled == kept


def test_new_weights_are_used_at_once_and_what_was_cached_is_forgotten(engine: Engine) -> None:
    for version, seed in ((3, 1), (4, 2)):
        play_all(engine, 4)  # the same prompts under the old weights, in the cache
        model = tiny_qwen2(seed=seed, hidden_size=HIDDEN_SIZE)
        engine.load_weights(model.named_parameters(), version)
        records = play_all(engine, 4)
        assert_all_exact(model, records)
        assert {g.policy_version for record in records for _, g in record} == {version}


def test_sampled_log_probs_are_the_actors_own_after_each_of_two_updates(engine: Engine, folder: Path) -> None:
    actor = Actor(
        ModelConfig(path=str(folder)),
        ActorConfig(optim=OptimConfig(lr=1e-2), entropy_coeff=1.0),
        device="cpu",
        temperature=0.8,
        total_updates=2,
        loss_norm_constant=10.0,
    )
    engine.load_weights(actor.state_dict_items(), 1)
    for version in (2, 3, 4):
        assert_samples_the_actors_policy_and_update(engine, actor)
        engine.load_weights(actor.state_dict_items(), version)


def test_weights_of_another_shape_or_incomplete_weights_are_refused(engine: Engine, reference: PreTrainedModel) -> None:
    weights = dict(reference.named_parameters())
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(EngineError, match=r"up_proj.weight.*\(1, 1\)"):
        engine.load_weights({**weights, name: torch.zeros(1, 1)}.items(), 1)
    with pytest.raises(EngineError, match=r"'no.such'.*no such parameter"):
        engine.load_weights({**weights, "no.such": torch.zeros(1, 1)}.items(), 1)
    del weights[name]
    with pytest.raises(EngineError, match=r"lack 1 .*up_proj"):
        engine.load_weights(weights.items(), 1)
    engine.load_weights(reference.named_parameters(), 2)
    assert_all_exact(reference, play_all(engine, 2))


def test_a_weight_update_says_what_its_time_went_into(engine: Engine, reference: PreTrainedModel) -> None:
    def slowly():
        for item in reference.named_parameters():
            time.sleep(0.005)
            yield item

    number, start = len(list(reference.named_parameters())), time.perf_counter()
    times = engine.load_weights(slowly(), 1)
    took = time.perf_counter() - start
    assert times.gather_s >= 0.005 * number
    assert times.load_s > 0 and times.transfer_s >= 0
    assert times.gather_s + times.transfer_s + times.load_s <= took


@pytest.mark.parametrize("end", ["load", "sleep"])
def test_what_is_in_flight_is_aborted_by_new_weights_and_by_sleep(
    engine: Engine, reference: PreTrainedModel, end: str
) -> None:
    async def scenario() -> list[Generation | BaseException]:
        turns = await in_flight(engine, 3)
        if end == "load":
            await asyncio.to_thread(engine.load_weights, reference.named_parameters(), 1)
        else:
            await asyncio.to_thread(engine.sleep)
        return await asyncio.gather(*turns, return_exceptions=True)

    errors = asyncio.run(scenario())
    expected = "weights of version 1" if end == "load" else "put to sleep"
    assert all(isinstance(error, EngineError) and expected in str(error) for error in errors)
    engine.wake()
    assert_all_exact(reference, play_all(engine, 2))


def test_weights_that_arrive_during_sleep_are_used_after_waking(engine: Engine) -> None:
    engine.sleep()
    model = tiny_qwen2(seed=9, hidden_size=HIDDEN_SIZE)
    engine.load_weights(model.named_parameters(), 5)
    engine.wake()
    assert_all_exact(model, play_all(engine, 2))


def test_a_cancelled_turn_leaves_the_others_sound(engine: Engine, reference: PreTrainedModel) -> None:
    async def scenario():
        doomed = await in_flight(engine, MAX_NUM_SEQS)
        for task in doomed:
            task.cancel()
        await asyncio.wait(doomed)
        assert all(task.cancelled() for task in doomed)
        return await play(engine, prompt_ids(0), trajectory_id="a", seed=0)

    # All places were taken: without the cancellations, the last trajectory would wait for thousands of tokens.
    assert_all_exact(reference, [asyncio.run(scenario())])


def test_an_event_loop_that_ends_takes_its_turns_with_it_and_no_others(
    engine: Engine, reference: PreTrainedModel
) -> None:
    async def gives_up() -> None:
        await in_flight(engine, 4)

    asyncio.run(gives_up())
    assert_all_exact(reference, play_all(engine, 2))


def test_an_empty_prompt_or_budget_is_an_error_not_a_hang(engine: Engine) -> None:
    for prompt, max_tokens in (([], 4), ([5], 0)):
        with pytest.raises(EngineError, match="need 1 or more"):
            generate(engine, prompt, SamplingParams(max_tokens))


def test_usage_counts_tokens_of_finished_turns_and_time_with_turns_in_flight(engine: Engine) -> None:
    before = engine.usage()
    assert engine.usage() == before  # nothing runs
    start = time.perf_counter()
    records = play_all(engine, 5)
    elapsed = time.perf_counter() - start
    done = engine.usage() - before
    assert done.num_tokens == sum(len(g.token_ids) for record in records for _, g in record)
    assert 0 < done.busy_s <= elapsed

    async def cancelled() -> None:
        for task in await in_flight(engine):
            assert (engine.usage() - before).busy_s > done.busy_s
            task.cancel()

    asyncio.run(cancelled())
    assert (engine.usage() - before).num_tokens == done.num_tokens
