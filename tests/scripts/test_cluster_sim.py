"""The simulator of a training step: cases worked by hand, bounds that nothing may break, and the code it stands for."""

from __future__ import annotations

import importlib
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import tiny_qwen2
from support.tokenizers import make_tokenizer

from agentgym_rl.rollout.log import TrajectoryLog
from agentgym_rl.types import FinishReason, Item, Message, Role, StopReason, Trajectory, Turn
from verl.models.shapes import KNOWN_SHAPES, shape_from_config
from verl.protocol import DataProto
from verl.utils import families as real_families
from verl.utils import flops as real_flops

PROJECT = Path(__file__).parents[2]
FOLDER = PROJECT / "scripts" / "experiments"
NAMES = ("model", "rollout", "step", "workload", "sim", "validate", "measure")


@dataclass(frozen=True)
class Modules:
    """The simulator's files."""

    model: ModuleType
    rollout: ModuleType
    step: ModuleType
    workload: ModuleType
    sim: ModuleType
    validate: ModuleType
    measure: ModuleType


def load() -> Modules:
    """As a program in their folder would import them."""
    sys.path.insert(0, str(FOLDER))
    try:
        return Modules(*(importlib.import_module(f"cluster_{name}") for name in NAMES))
    finally:
        sys.path.remove(str(FOLDER))


sim = load()
SHAPE = KNOWN_SHAPES["Qwen2.5-0.5B-Instruct"]


def engine_cost(**changes: Any) -> Any:
    """An engine each pass of which takes a second, whatever is in it."""
    plain = {
        "fixed_s": 1.0,
        "row_s": 0.0,
        "token_flops": 0.0,
        "pair_flops": 0.0,
        "head_flops": 0.0,
        "flops": 1.0,
        "weight_bytes": 0.0,
        "cache_bytes": 0.0,
        "bandwidth": 1.0,
        "communication_s": 0.0,
        "communication_token_s": 0.0,
        "cache_tokens": math.inf,
    }
    return sim.model.EngineCost(**plain | changes)


def script(*turns: tuple[int, int, float], uid: str = "a", prompt: int = 10, reset_s: float = 0.0) -> Any:
    """Turns as sampled tokens, observed tokens, seconds of the environment."""
    return sim.rollout.TrajectoryScript(
        uid, prompt, reset_s, tuple(sim.rollout.TurnScript(*turn) for turn in turns), shared=prompt
    )


def rollout(*scripts: Any, engines: int = 1, cost: Any = None, **options: Any) -> Any:
    return sim.rollout.Rollout(scripts, cost or engine_cost(), engines, **options).run()


# ------------------------------------------------------------------------------------------------------------ rollout


def test_a_trajectory_takes_its_reset_its_tokens_and_its_environment_one_after_the_other():
    result = rollout(script((5, 3, 2.0), (4, 0, 0.5), reset_s=3.0))
    assert result.duration_s == 3.0 + 5 + 2.0 + 4 + 0.5
    assert result.busy_s == (9.0,)
    assert (result.passes, result.rows, result.decoded) == (9, 9, 9)
    # The prompt, then what was observed and the one sampled token that no pass had seen.
    assert result.prefilled == 10 + 3 + 1


def test_every_pass_reads_all_weights_and_what_is_cached_so_far():
    cost = engine_cost(fixed_s=0.0, weight_bytes=100.0, cache_bytes=1.0, bandwidth=10.0)
    # The prompt's pass finds nothing cached; then 11 and 12 tokens are read.
    assert rollout(script((3, 0, 0.0)), cost=cost).duration_s == pytest.approx(10.0 + 11.1 + 11.2)


def test_a_pass_takes_as_long_as_the_slower_of_computing_and_reading():
    cost = engine_cost(
        fixed_s=0.0, token_flops=6.0, head_flops=2.0, flops=1.0, weight_bytes=50.0, bandwidth=1.0, row_s=0.25
    )
    # 10 prompt tokens and a row: 62 operations; then 8 operations, which 50 bytes outlast; a quarter second a row.
    assert rollout(script((2, 0, 0.0)), cost=cost).duration_s == pytest.approx(62 + 50 + 2 * 0.25)


def test_turns_asked_for_together_are_computed_together():
    several = [script((4, 0, 0.0), uid=uid) for uid in "abc"]
    result = rollout(*several)
    assert (result.duration_s, result.passes, result.rows) == (4.0, 4, 12)


def test_the_first_of_a_group_computes_the_prompt_and_the_others_follow_a_pass_later():
    group = [script((1, 0, 0.0)) for _ in range(3)]
    result = rollout(*group)
    assert result.finished_s == (1.0, 2.0, 2.0)
    assert result.prefilled == 10 + 1 + 1
    apart = rollout(*group, design=sim.model.Design(prefix_reuse=False))
    assert apart.finished_s == (1.0, 1.0, 1.0) and apart.prefilled == 30


def test_without_prefix_reuse_every_turn_computes_all_that_was_before():
    one = script((5, 3, 0.0), (4, 0, 0.0))
    assert rollout(one, design=sim.model.Design(prefix_reuse=False)).prefilled == 10 + (10 + 5 + 3)


def test_a_turn_that_arrives_joins_with_the_next_pass():
    result = rollout(script((10, 0, 0.0)), script((2, 0, 0.0), uid="b", reset_s=2.5))
    assert result.finished_s == (10.0, 5.0)
    assert (result.passes, result.rows) == (10, 12)


def test_an_engine_that_does_not_mix_computes_prompts_while_nobody_decodes():
    rules = sim.rollout.EngineRules(mixes=False)
    result = rollout(script((10, 0, 0.0)), script((2, 0, 0.0), uid="b", reset_s=2.5), rules=rules)
    # The prompt's pass from 3 to 4 is one more; the token that follows comes with the next pass of all.
    assert result.finished_s == (11.0, 5.0)


def test_prompts_of_one_token_turns_never_block_the_others_of_their_group():
    rules = sim.rollout.EngineRules(mixes=False)
    assert rollout(*[script((1, 0, 0.0)) for _ in range(2)], rules=rules).finished_s == (1.0, 2.0)


def test_a_long_prompt_is_computed_in_chunks_beside_the_others_tokens():
    rules = sim.rollout.EngineRules(token_budget=9)
    result = rollout(script((3, 0, 0.0), prompt=5), script((1, 0, 0.0), uid="b", prompt=20), rules=rules)
    # 5 + 4 tokens, then 1 of the first beside 8 of the second, twice; the second's token comes with the third pass.
    assert result.finished_s == (3.0, 3.0)


def test_a_collector_gives_one_turn_after_the_other_to_its_engine():
    pair = [script((1, 0, 0.0), uid=uid) for uid in "ab"]
    assert rollout(*pair, turn_s=0.25).finished_s == (1.25, 2.25)
    # In one process with the engine, its work for both comes before the pass.
    rules = sim.rollout.EngineRules(shares_interpreter=True)
    assert rollout(*pair, turn_s=0.25, rules=rules).finished_s == (1.5, 1.5)


def test_calls_wait_for_a_slot_of_their_server():
    pair = [script((1, 0, 3.0), uid=uid) for uid in "ab"]
    assert rollout(*pair, servers=sim.rollout.EnvServers(1, 1)).finished_s == (4.0, 7.0)
    assert rollout(*pair, servers=sim.rollout.EnvServers(2, 1)).finished_s == (4.0, 4.0)
    assert rollout(*pair, servers=sim.rollout.EnvServers(1, 1)).env_wait_s == 3.0


def test_workers_with_room_take_what_a_static_split_leaves_to_the_slow_one():
    scripts = [script((tokens, 0, 0.0), uid=str(place)) for place, tokens in enumerate((5, 1, 1, 1))]
    static = sim.model.Design(one_by_one=False)
    assert rollout(*scripts, engines=2, max_concurrency=1).duration_s == 5.0
    assert rollout(*scripts, engines=2, max_concurrency=1, design=static).duration_s == 6.0
    # With room for all at once there is nothing left to hand out.
    assert rollout(*scripts, engines=2).duration_s == rollout(*scripts, engines=2, design=static).duration_s


def test_a_turn_waits_until_the_cache_has_room_and_one_that_never_fits_is_an_error():
    pair = [script((5, 0, 0.0), uid=uid) for uid in "ab"]
    assert rollout(*pair, cost=engine_cost(cache_tokens=29)).finished_s == (5.0, 10.0)
    assert rollout(*pair, cost=engine_cost(cache_tokens=30)).finished_s == (5.0, 5.0)
    with pytest.raises(ValueError, match="a turn of 15 tokens does not fit"):
        rollout(*pair, cost=engine_cost(cache_tokens=14))


def test_what_rests_in_the_cache_goes_when_another_needs_the_place_and_is_computed_again():
    resting = script((2, 4, 9.0), (1, 0, 0.0))
    result = rollout(resting, script((3, 0, 0.0), uid="b", reset_s=4.0), cost=engine_cost(cache_tokens=20))
    assert result.evictions == 1
    assert result.prefilled == 10 + 10 + (10 + 2 + 4)


def test_a_prompt_stays_in_the_cache_while_any_of_its_group_is_there():
    group = [script((2, 4, 9.0), (1, 0, 0.0)), script((20, 0, 0.0))]
    result = rollout(*group, script((3, 0, 0.0), uid="b", reset_s=4.0), cost=engine_cost(cache_tokens=44))
    assert result.evictions == 1
    assert result.prefilled == (10 + 1) + 10 + (2 + 4)


def test_at_most_so_many_sequences_decode_at_once():
    rules = sim.rollout.EngineRules(max_num_seqs=1)
    assert rollout(*[script((4, 0, 0.0), uid=uid) for uid in "ab"], rules=rules).finished_s == (4.0, 8.0)


# ----------------------------------------------------------------------------------------------------------- formulas


def test_an_all_gather_moves_all_but_the_own_share_over_each_link():
    links = sim.model.Links(num_devices=4, bandwidth=10.0, fixed_s=0.5, hop_s=0.125)
    assert links.gather_s(80.0) == 0.5 + 3 * 0.125 + 80 * 3 / 4 / 10
    assert links.reduce_s(80.0) == 2 * links.gather_s(80.0)
    assert replace(links, num_devices=1).gather_s(80.0) == 0.0


def test_rings_that_leave_a_machine_run_at_the_pace_of_its_network():
    device = sim.model.DEVICES["H100"]
    assert sim.model.Cluster(device, 8).ring_bandwidth(8) == 450e9
    assert sim.model.Cluster(device, 16).ring_bandwidth(16) == 400e9
    slow = sim.model.Cluster(device, 16, node_bandwidth=12.5e9)
    assert slow.ring_bandwidth(16) == 12.5e9
    assert slow.ring_bandwidth(8) == 450e9


def test_copies_of_the_model_gather_within_a_machine_and_add_up_each_shard_over_its_part_of_the_network():
    device, assumed = sim.model.DEVICES["H100"], replace(sim.model.Assumptions(), collective_s=0.0, hop_s=0.0)
    cluster = sim.model.Cluster(device, 32, node_bandwidth=12.5e9, fsdp_size=8)
    cost = sim.model.TrainingCost.of(SHAPE, cluster, assumed, recomputes=True)
    assert (cost.links.num_devices, cost.links.bandwidth) == (8, 0.75 * 450e9)
    assert (cost.copies.num_devices, cost.copies.bandwidth) == (4, 0.75 * 12.5e9 / 8)
    # All-reduce: 3 of 4 parts of a shard's 4 bytes per weight, there and back.
    added = 2 * 3 / 4 * 4 * SHAPE.num_weights / 8 / (0.75 * 12.5e9 / 8)
    alone = sim.model.TrainingCost.of(SHAPE, sim.model.Cluster(device, 8), assumed, recomputes=True)
    assert cost.optimizer_s() - alone.optimizer_s() == pytest.approx(added)
    with pytest.raises(ValueError, match="num_devices=32, num_shards=5: the first must be a multiple"):
        replace(cluster, fsdp_size=5)


def test_a_micro_batch_takes_as_long_as_the_slower_of_computing_and_gathering():
    cluster = sim.model.Cluster(sim.model.DEVICES["H100"], 8)
    cost = sim.model.TrainingCost.of(SHAPE, cluster, sim.model.Assumptions(), recomputes=True)
    hidden, exposed = cost.communication_s(trains=True)
    assert 0 < exposed < hidden
    assert cost.micro_batch_s(0.0, trains=True) == pytest.approx(hidden + exposed)
    assert cost.micro_batch_s(10 * hidden, trains=True) == pytest.approx(10 * hidden + exposed)
    # Layers: two gathers of 2 bytes and a scatter of 4 per weight; all else: one of each.
    plain = replace(cost.links, fixed_s=0.0, hop_s=0.0)
    layers = SHAPE.num_layers * SHAPE.layer_weights
    num_bytes = 8 * layers + 6 * (SHAPE.num_weights - layers)
    assert sum(replace(cost, links=plain).communication_s(trains=True)) == pytest.approx(plain.gather_s(num_bytes))


def test_recomputing_activations_costs_one_forward_pass_more():
    cluster = sim.model.Cluster(sim.model.DEVICES["H100"], 1)
    assumed = replace(sim.model.Assumptions(), pass_s=0.0)
    work = sim.model.Work(flops=cluster.device.peak_flops, attention_flops=0.0, num_sequences=1)
    times = [
        sim.model.TrainingCost.of(SHAPE, cluster, assumed, recomputes=recomputes).compute_s(work, trains=trains)
        for recomputes, trains in ((True, False), (False, True), (True, True))
    ]
    assert times == pytest.approx([1 / 0.45, 3 / 0.45, 4 / 0.45])


def test_a_prefix_that_a_family_shares_is_computed_once():
    size = sim.model.model_size(SHAPE)
    shared = sim.model.Work.of(size, [100, 120], 60, 50)
    alone = sim.model.Work.of(size, [100, 120], 0, 50)
    prefix = sim.model.Work.of(size, [60], 0, 0)
    assert shared.flops == pytest.approx(alone.flops - prefix.flops)
    assert shared.attention_flops == pytest.approx(alone.attention_flops - prefix.attention_flops)
    assert alone.all_flops == pytest.approx(size.forward_flops([100, 120], 50))


def test_the_size_of_a_shape_is_that_of_the_model_itself():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, tie_word_embeddings=True,
    )  # fmt: skip
    shape = shape_from_config(config.to_dict())
    assert shape is not None
    assert sim.model.model_size(shape) == real_flops.model_size(Qwen2ForCausalLM(config))


def test_a_model_too_large_for_its_devices_is_refused():
    big, device = KNOWN_SHAPES["Qwen2.5-14B-Instruct"], replace(sim.model.DEVICES["H100"], memory_bytes=40e9)
    scenario = sim.step.Scenario(big, sim.model.Cluster(device, 1))
    with pytest.raises(ValueError, match=r"14\.8B weights on 1 x H100: no memory is left"):
        scenario.engine_cost()
    awake = replace(scenario, cluster=sim.model.Cluster(sim.model.DEVICES["H100"], 1))
    awake.engine_cost()
    with pytest.raises(ValueError, match="beside what training holds"):
        replace(awake, design=sim.model.Design(sleep=False)).engine_cost()


@pytest.mark.parametrize(("name", "value"), [("training_share", 1.5), ("link_share", 0.0), ("pass_s", -1.0)])
def test_assumptions_out_of_range_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        sim.model.Assumptions(**{name: value})


def test_a_doubled_share_is_at_most_all():
    assert sim.model.Assumptions().scaled("memory_share", 2.0).memory_share == 1.0
    assert sim.model.Assumptions().scaled("pass_s", 2.0).pass_s == 0.06


def test_checkpoints_wait_only_for_what_storage_does_not_manage_beside_training():
    cluster = sim.model.Cluster(sim.model.DEVICES["H100"], 8)
    slow = replace(sim.model.Assumptions(), disk_bandwidth=16 * SHAPE.num_weights / 100)  # 100 s a checkpoint

    def cost(step_s: float, *, is_async: bool = True) -> float:
        return sim.model.save_s(SHAPE, cluster, slow, steps_between=10, step_s=step_s, is_async=is_async)

    assert cost(6.0) == pytest.approx(cost(10.0) + (100 - 60) / 10)
    assert cost(10.0, is_async=False) == pytest.approx(cost(10.0) + 100 / 10)
    assert sim.model.save_s(SHAPE, cluster, slow, steps_between=0, step_s=6.0, is_async=True) == 0.0


# ------------------------------------------------------------------------------------------ as the framework's own


def test_shares_and_families_are_those_of_the_learner():
    random = np.random.default_rng(0)
    scripts, rows, masks, groups = [], [], [], []
    for group in range(6):
        prompt = random.integers(2, 90, size=int(random.integers(5, 60))).tolist()
        for member in range(int(random.integers(1, 5))):
            sampled = int(random.integers(1, 80))
            # No two members go on alike.
            rows.append(prompt + [100 + member] * sampled)
            masks.append([0] * len(prompt) + [1] * sampled)
            groups.append(group)
            scripts.append(script((sampled, 0, 0.0), uid=str(group), prompt=len(prompt)))
    batch = DataProto.from_sequences(rows, masks).replace(group_ids_B=torch.tensor(groups))
    lengths = [each.num_tokens for each in scripts]
    for most in (None, 200):
        real = real_families.find_families(batch, range(len(batch)), max_tokens=most)
        assert sim.step.find_families(scripts, lengths, most) == real
    cost = sim.model.TrainingCost.of(SHAPE, sim.model.Cluster(sim.model.DEVICES["H100"], 1), sim.model.Assumptions(),
                                     recomputes=False)  # fmt: skip
    for ranks in (1, 2, 3):
        passes = sim.step.Passes(cost, ranks, sim.model.Design(), 1000)
        assert passes._shares(scripts) == real_families.balanced_shares(batch, ranks)


def test_every_device_waits_for_the_busiest_in_each_micro_batch():
    cluster = sim.model.Cluster(sim.model.DEVICES["H100"], 2)
    cost = sim.model.TrainingCost.of(SHAPE, cluster, sim.model.Assumptions(), recomputes=False)
    cost = replace(cost, links=sim.model.Links(2, math.inf, 0.0, 0.0))
    scripts = [script((tokens, 0, 0.0), uid=str(tokens)) for tokens in (500, 40, 30)]
    phase = sim.step.Passes(cost, 2, sim.model.Design(), 60).run(scripts, trains=True)
    # Longest first, each to the device with less: 510 tokens alone; 50 and 40 tokens, which do not fit one micro-batch.
    long, middle, short = (
        cost.compute_s(sim.model.Work.of(cost.size, [tokens + 10], 0, tokens), trains=True) for tokens in (500, 40, 30)
    )
    assert phase.seconds in (pytest.approx(long + short), pytest.approx(long + middle))
    assert phase.busy_s == pytest.approx((long + middle + short) / 2)


def test_without_packing_rows_are_as_long_as_the_longest():
    scripts = [script((tokens, 0, 0.0), uid=str(tokens), prompt=10) for tokens in (20, 90, 40)]
    cost = sim.model.TrainingCost.of(SHAPE, sim.model.Cluster(sim.model.DEVICES["H100"], 1), sim.model.Assumptions(),
                                     recomputes=False)  # fmt: skip
    [works] = sim.step.Passes(cost, 1, sim.model.Design(packing=False), 200).micro_batches(scripts)
    assert [work.num_sequences for work in works] == [2, 1]
    assert works[0].all_flops == pytest.approx(cost.size.forward_flops([100, 100], 110))
    [packed] = sim.step.Passes(cost, 1, sim.model.Design(), 200).micro_batches(scripts)
    assert sum(work.all_flops for work in packed) == pytest.approx(cost.size.forward_flops([30, 100, 50], 150))


# ------------------------------------------------------------------------------------------------------------- bounds


@st.composite
def scenarios(draw: st.DrawFn) -> Any:
    cluster = sim.model.Cluster(
        sim.model.DEVICES[draw(st.sampled_from(["A100", "H100", "H200"]))],
        draw(st.sampled_from([1, 2, 8, 16])),
        node_bandwidth=draw(st.sampled_from(list(sim.model.NETWORKS.values()))),
        fsdp_size=draw(st.sampled_from([-1, 1])),
    )
    recipe = sim.step.Recipe(
        items=4,
        samples=2,
        mini_batch_items=draw(st.sampled_from([1, 4])),
        epochs=draw(st.sampled_from([1, 2])),
        has_reference=draw(st.booleans()),
        has_critic=draw(st.booleans()),
        recomputes=draw(st.booleans()),
        max_concurrency=draw(st.sampled_from([1, 256])),
    )
    design = sim.model.Design(*(draw(st.booleans()) for _ in range(5)))
    return sim.step.Scenario(SHAPE, cluster, recipe, design)


def drawn_scripts(seed: int, items: int = 4) -> Any:
    profile = replace(sim.workload.PROFILES["textcraft"], natural_turns=3, sampled=20)
    return profile.scripts(items=items, samples=2, horizon=4, seed=seed)


@given(scenarios(), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_no_step_is_faster_than_published_peaks_allow_nor_busier_than_it_is_long(scenario, seed):
    estimate = sim.step.simulate(drawn_scripts(seed), scenario)
    assert estimate.step_s >= estimate.floor_s > 0
    assert 0 < estimate.mfu < 1 and 0 <= estimate.idle_share < 1
    for name, phase in estimate.phases.items():
        assert 0 <= phase.busy_s <= phase.seconds * (1 + 1e-9), name
    assert estimate.rollout.decoded == estimate.num_sampled


@given(scenarios(), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_a_better_machine_is_never_slower(scenario, seed):
    scripts = drawn_scripts(seed)
    before = sim.step.simulate(scripts, scenario)
    for name in ("memory_bandwidth", "peak_flops", "link_bandwidth", "host_bandwidth"):
        device = replace(scenario.cluster.device, **{name: 2 * getattr(scenario.cluster.device, name)})
        better = replace(scenario, cluster=replace(scenario.cluster, device=device))
        after = sim.step.simulate(scripts, better)
        # Other turns may meet in a pass then, which shifts a rollout by a little; the rest is monotone.
        assert after.rollout.duration_s <= before.rollout.duration_s * 1.02, name
        for phase in before.phases.keys() - {"gen"}:
            assert after.phases[phase].seconds <= before.phases[phase].seconds + 1e-12, (name, phase)


def test_64_gpus_gain_no_more_than_what_is_serial_allows():
    """Amdahl's law, with what the driver does and what each device does with all weights as the serial part."""
    scripts = drawn_scripts(0, items=64)
    recipe = sim.step.Recipe(items=64, samples=2, mini_batch_items=64, epochs=1)
    small, large = (
        sim.step.simulate(scripts, sim.step.Scenario(SHAPE, sim.model.Cluster(sim.model.DEVICES["H100"], gpus), recipe))
        for gpus in (8, 64)
    )
    serial = small.phases["driver"].seconds + small.phases["sync"].seconds
    assert large.step_s >= serial + (small.step_s - serial) / 8
    assert large.gpu_hours_per_1000 > small.gpu_hours_per_1000


def test_each_means_of_the_framework_saves_time_where_it_has_something_to_save():
    scripts = sim.workload.PROFILES["textcraft"].scripts(items=8, samples=4, horizon=10, seed=0)
    recipe = sim.step.Recipe(items=8, samples=4, mini_batch_items=8, epochs=1, max_concurrency=2)
    scenario = sim.step.Scenario(
        KNOWN_SHAPES["Qwen2.5-7B-Instruct"], sim.model.Cluster(sim.model.DEVICES["H100"], 2), recipe
    )
    plain = sim.step.simulate(scripts, scenario)

    def without(name: str) -> Any:
        design = replace(sim.model.Design(), **{name: False})
        return sim.step.simulate(scripts, replace(scenario, design=design))

    assert without("one_by_one").phases["gen"].seconds > plain.phases["gen"].seconds
    assert without("prefix_reuse").rollout.prefilled > 2 * plain.rollout.prefilled
    assert without("packing").phases["update"].seconds > plain.phases["update"].seconds
    assert without("prefix_sharing").phases["update"].busy_s > plain.phases["update"].busy_s


# ----------------------------------------------------------------------------------------------------------- workload


def test_a_trajectory_stays_the_same_when_others_are_added_and_keeps_the_horizon_and_the_budget():
    profile = replace(sim.workload.PROFILES["webarena"], max_response=3000)
    few, many = (profile.scripts(items=items, samples=4, horizon=6, seed=1) for items in (2, 5))
    assert many[: len(few)] == few
    assert len({each.uid for each in many}) == 5
    assert max(len(each.turns) for each in many) <= 6
    assert max(each.num_tokens - each.prompt for each in many) <= 3000
    assert all(len({each.prompt for each in many if each.uid == uid}) == 1 for uid in {each.uid for each in many})


def trajectory(sample: int, ids: list[int], mask: list[int], *, uid: str = "step1/textcraft_7") -> Trajectory:
    length = len(ids)
    return Trajectory(
        item=Item.parse("textcraft_7", "textcraft", ""),
        uid=uid,
        sample_index=sample,
        attempt=1,
        messages=(Message(Role.USER, "go"), Message(Role.ASSISTANT, "x")),
        turns=(
            Turn("x", "y", 0.0, False, FinishReason.STOP, 2, generation_s=0.5, env_s=0.25),
            Turn("z", "", 1.0, True, FinishReason.STOP, 1, generation_s=0.5, env_s=0.125),
        ),
        input_ids=np.array(ids, np.int32),
        loss_mask=np.array(mask, np.int8),
        sequence_ids=np.zeros(length, np.int32),
        rollout_log_probs=np.zeros(length, np.float32),
        token_rewards=np.zeros(length, np.float32),
        prompt_length=3,
        score=1.0,
        success=True,
        stop_reason=StopReason.DONE,
        policy_version=0,
        max_rounds=4,
        duration_s=2.0,
    )


def test_a_run_is_read_as_what_happened_in_it(tmp_path):
    mask = [0, 0, 0, 1, 1, 0, 0, 1]
    log = tmp_path / "trajectories" / "step2" / "0.jsonl"
    with TrajectoryLog(log) as written:
        written.write(trajectory(0, [1, 2, 3, 4, 5, 6, 7, 8], mask))
        written.write(trajectory(1, [1, 2, 3, 4, 9, 6, 7, 8], mask))
    timing = {"timing_s/gen": 3.0, "timing_s/update": 1.0, "timing_s/step": 4.5, "rounds/max_rounds": 4}
    rows = [{"step": 1}, {"step": 2} | timing]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [step] = sim.workload.read_run(tmp_path)
    assert (step.step, step.horizon, step.gen_s, step.update_s, step.num_tokens) == (2, 4, 3.0, 1.0, 16)
    turns = (sim.rollout.TurnScript(2, 2, 0.25), sim.rollout.TurnScript(1, 0, 0.125))
    expected = sim.rollout.TrajectoryScript("step1/textcraft_7", 3, 2.0 - 1.375, turns, shared=4)
    assert step.scripts == (expected, expected)
    with pytest.raises(ValueError, match="no finished training step between 3 and None"):
        sim.workload.read_run(tmp_path, first=3)


def test_groups_of_a_real_run_are_drawn_again():
    real = [script((place + 1, 0, 0.0), uid=str(place // 2), prompt=place // 2 + 1) for place in range(6)]
    drawn = sim.workload.resample(real, items=5, samples=3, seed=0)
    assert [each.uid for each in drawn] == [f"item{item}" for item in range(5) for _ in range(3)]
    assert {each.prompt for each in drawn} <= {1, 2, 3}
    assert all(len({each.prompt for each in drawn[start : start + 3]}) == 1 for start in range(0, 15, 3))


# --------------------------------------------------------------------------------------------------------- validation


def test_a_machine_is_found_again_from_the_times_of_some_steps_and_predicts_others():
    validator = sim.validate.Validator(SHAPE, "wall")
    truth = sim.validate.Machine(2e-3, 3e-4, 5e11, 1e-2, 2e-3, 4e11, 1e11)

    def step(number: int, items: int, horizon: int) -> Any:
        profile = replace(sim.workload.PROFILES["textcraft"], natural_turns=8, sampled=15)
        scripts = tuple(profile.scripts(items=items, samples=4, horizon=horizon, seed=number))
        bare = sim.workload.MeasuredStep(number, horizon, scripts, 1.0, 1.0, 2.0)
        gen = validator.gen_s(validator.rollout(bare, truth))
        return replace(bare, gen_s=gen, update_s=validator.update_s(bare, truth))

    known = [step(number, items, horizon) for number, (items, horizon) in enumerate([(2, 2), (6, 2), (4, 4), (2, 6)])]
    machine = validator.calibrated(known)
    [prediction] = validator.predictions("other", [step(9, 8, 8)], machine)
    assert (prediction.horizon, prediction.trajectories, prediction.steps) == (8, 32, 1)
    assert abs(sim.validate.error(prediction.gen_s)) < 0.03
    assert abs(sim.validate.error(prediction.update_s)) < 0.03
    table = sim.validate.as_markdown([(prediction, False)])
    assert "| other | 8 | 32 | 1 |" in table


def test_a_column_that_would_be_negative_is_left_out_of_a_fit():
    features = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    scale = np.ones(3)
    assert sim.validate.fit(features, np.array([3.0, 5.0, 7.0]), scale) == pytest.approx([1.0, 2.0])
    first, second = sim.validate.fit(features, np.array([3.0, 2.0, 1.0]), scale)
    assert second == 1e-15 and first == pytest.approx(2.0)


# ------------------------------------------------------------------------------------------------------------- report


def small_study(*arguments: str) -> Any:
    given = ["--model", "Qwen2.5-0.5B-Instruct", "--gpus", "2", "16", "--items", "4", "--samples", "2"]
    given += ["--mini-batch-items", "4", "--epochs", "1", "--seeds", "1", "--horizons", "2", "4", *arguments]
    return sim.sim.study_of(sim.sim.parser().parse_args(given))


def test_a_report_has_every_phase_both_efficiencies_and_what_matters_most(tmp_path):
    report = sim.sim.Report.of(small_study())
    sim.sim.write(report, tmp_path)
    numbers = json.loads((tmp_path / "estimate.json").read_text())
    assert [(each["horizon"], each["gpus"], each["trajectories"]) for each in numbers["steps"]] == [
        (2, 2, 8), (2, 16, 8), (2, 16, 64), (4, 2, 8), (4, 16, 8), (4, 16, 64),
    ]  # fmt: skip
    for each in numbers["steps"]:
        assert each["step_s"] == pytest.approx(sum(each[f"{group}_s"] for group in sim.sim.PHASE_GROUPS))
        assert each["gpu_hours_per_1000_steps"] == pytest.approx(each["step_s"] * each["gpus"] / 3.6)
    for each in numbers["efficiency"]:
        assert 0 < each["same_batch"] < each["grown_batch"] < 1
    variants = numbers["variants"]["2 GPUs"]
    assert variants["without prefix reuse in the engine"] > variants["as it is"]
    rows = numbers["sensitivity"]["2 GPUs"]
    weights = [max(abs(math.log(row["halved"])), abs(math.log(row["doubled"]))) for row in rows]
    assert weights == sorted(weights, reverse=True) and len(weights) > 20
    assert {name: rows[0]["horizon"] for name, rows in numbers["tasks"].items()}["searchqa"] == 10
    assert all(len(rows) == 2 and min(each["step_s"] for each in rows) > 0 for rows in numbers["tasks"].values())
    text = (tmp_path / "estimate.md").read_text()
    assert "| 4 | 16 GPUs, batch x 8 | 64 |" in text and "`task sampled`" in text


def test_trajectories_of_a_real_run_take_the_place_of_a_tasks_statistics(monkeypatch):
    scripts = tuple(script((3, 2, 0.1), (2, 0, 0.1), uid=str(place // 2)) for place in range(4))
    step = sim.workload.MeasuredStep(7, 5, scripts, 1.0, 1.0, 2.0)
    monkeypatch.setattr(sim.sim, "read_run", lambda folder, **steps: [step] if steps == {"first": 7, "last": 9} else [])
    study = small_study("--run", "saves/run", "--steps", "7:9")
    assert study.horizons == [5] and study.profile is None
    [first, *_] = study.scaling_cases()
    assert study.run(first).estimates[0].num_tokens == 8 * (10 + 3 + 2 + 2)


def test_tables_go_between_the_marks_of_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{sim.sim.BEGIN}\nold\n{sim.sim.END}\nafter\n")
    sim.sim.write_docs(page, "new")
    assert page.read_text() == f"before\n{sim.sim.BEGIN}\n\nnew\n\n{sim.sim.END}\nafter\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="no '<!-- estimate"):
        sim.sim.write_docs(page, "new")


def test_figures_are_drawn_of_any_report(tmp_path):
    pytest.importorskip("matplotlib")
    study = replace(small_study(), horizons=[2], seeds=[0])
    base, _ = study.bases()
    report = SimpleNamespace(
        scaling=[study.run(base)], sensitivity={base.name: [sim.sim.Sensitivity("pass_s", 0.03, 0.9, 1.2)]}
    )
    sim.sim.draw(report, tmp_path)
    assert "<svg" in (tmp_path / "phases.svg").read_text() and "pass_s" in (tmp_path / "sensitivity.svg").read_text()


@pytest.mark.server
def test_the_programs_run_as_the_page_shows_them(tmp_path, monkeypatch, capsys):
    """Small: trainings are measured, the simulator is held to them, and a step is estimated from their trajectories."""
    tokenizer = make_tokenizer()
    tiny_qwen2(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    items = tmp_path / "items.json"
    items.write_text(json.dumps(json.loads((PROJECT / "AgentItemId" / "textcraft_train.json").read_text())[:4]))

    def run(module: ModuleType, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *arguments])
        module.main()
        return capsys.readouterr().out

    model = ("--model", str(tmp_path / "model"))
    sizes = [sim.measure.Size(2, 2, 1), sim.measure.Size(1, 2, 2)]
    monkeypatch.setattr(sim.measure, "SIZES", sizes)
    run(sim.measure, *model, "--train-file", str(items), "--out", str(tmp_path / "runs"), "--repeats", "1")
    runs = [str(tmp_path / "runs" / "0" / str(size)) for size in sizes]
    said = run(
        sim.validate, *model, "--calibrate", *runs, "--predict", f"again={runs[0]}", "--out", f"{tmp_path}/v.json"
    )
    assert "| again | 1 | 4 | 2 |" in said
    [prediction] = json.loads((tmp_path / "v.json").read_text())["predictions"]
    assert prediction["trajectories"] == 4 and min(prediction["gen_s"] + prediction["update_s"]) > 0
    monkeypatch.setattr(sim.sim, "sensitivities", lambda study, base: [])
    small = ("--gpus", "1", "2", "--items", "2", "--samples", "2", "--mini-batch-items", "2", "--seeds", "1")
    said = run(sim.sim, "--run", runs[0], "--steps", "2:3", *small, "--out", str(tmp_path / "out"))
    assert "on a real run's trajectories" in said and "| 1 | 2 GPUs, batch x 2 | 8 |" in said
    # A model that fills a GPU in training leaves nothing to an engine that stays awake.
    assert "(`free_cache_engine=false`) | does not fit |" in said
    assert (tmp_path / "out" / "estimate.json").exists()


def test_the_page_on_scaling_shows_what_the_simulator_says():
    page = (PROJECT / "docs" / "scaling.md").read_text()
    study = sim.sim.study_of(sim.sim.parser().parse_args([]))
    first = study.run(next(iter(study.scaling_cases())))
    assert sim.sim.line(sim.sim.scaling_cells(first)) in page
