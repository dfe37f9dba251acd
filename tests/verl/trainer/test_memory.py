"""The memory that a run will take, worked by hand for a model of round numbers."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.config import ActorRolloutRefConfig, ModelConfig, PPOConfig, RolloutConfig
from verl.models.attention import PACKED_ATTENTION
from verl.models.log_probs import KEEP_BYTES
from verl.models.policy import PolicyModule
from verl.models.shapes import ModelShape, shape_from_config
from verl.protocol import DataProto
from verl.trainer import memory
from verl.trainer.memory import Machine, MemoryPlan, Part, plan_memory

SHAPE = ModelShape(
    vocab_size=1000,
    hidden_size=100,
    num_layers=10,
    num_heads=4,
    num_kv_heads=2,
    head_dim=25,
    intermediate_size=200,
    tied=False,
)
# Projections 2 x 100 x (100 + 50), MLP 3 x 100 x 200, norms 2 x 100.
LAYER = 30_000 + 60_000 + 200
WEIGHTS = 10 * LAYER + 2 * 1000 * 100 + 100


def run_of(*, lora_rank: int = 0, workers: int = 4) -> PPOConfig:
    config = PPOConfig(actor_rollout_ref=ActorRolloutRefConfig(rollout=RolloutConfig(n=4)))
    config.data.max_prompt_length, config.data.max_response_length = 100, 900
    config.actor_rollout_ref.model.lora_rank = lora_rank
    config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu = 5000
    config.trainer.n_gpus_per_node = workers
    return config


def plan(config: PPOConfig, device: str = "cuda", engine: str = "vllm") -> MemoryPlan:
    return plan_memory(config, SHAPE, SHAPE, Machine(device, config.trainer.world_size), engine=engine)


def sizes(parts: tuple[Part, ...]) -> dict[str, float]:
    return {part.name: part.num_bytes for part in parts}


def test_an_actor_on_gpus_is_shared_out_in_float32_and_computes_in_16_bit() -> None:
    assert SHAPE.num_weights == WEIGHTS
    # 8 groups x 4 trajectories x 1000 tokens on 4 devices are 8000 tokens: the budget of 5000 is less.
    activations = 5000 * 10 * (8 * 100 + 2 * 100 + 2 * 50 + 4 * 200) * 2
    assert sizes(plan(run_of()).users["actor"]) == {
        "weights": WEIGHTS * 4 / 4,
        "gradients": WEIGHTS * 4 / 4,
        "Adam": WEIGHTS * 8 / 4,
        "gathered layers": (200_000 + 2 * LAYER) * 2,
        "activations": activations,
        "logits": 5000 * 1000 * 4,
    }


def kept_numbers(model: Qwen2ForCausalLM, num_tokens: int) -> float:
    """Numbers that autograd keeps of a forward pass, weights left out, per token."""
    module = PolicyModule(model, 1.0, None).train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    batch = DataProto.from_sequences([[1] * num_tokens], [[0] * (num_tokens - 4) + [1] * 4])
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = module(batch, with_entropy=False, reference=None)
    assert result.numbers.requires_grad
    storages = {data: tensor.untyped_storage().nbytes() for data, tensor in kept.items() if data not in weights}
    return sum(storages.values()) / 4 / num_tokens


def test_activations_are_what_autograd_keeps_of_a_real_model() -> None:
    config = Qwen2Config(
        vocab_size=100,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM._from_config(config, attn_implementation=PACKED_ATTENTION)
    shape = shape_from_config(config.to_dict())
    assert shape is not None
    part = memory._activations(shape, ModelConfig(path="x"), Machine("cpu", 1), 1)
    assert part.num_bytes / 4 == pytest.approx(kept_numbers(model, 256), rel=0.1)


def test_checkpointing_keeps_what_goes_into_a_layer_and_one_layer_whole() -> None:
    config = run_of()
    config.actor_rollout_ref.model.enable_gradient_checkpointing = True
    assert sizes(plan(config).users["actor"])["activations"] == 5000 * (10 * 100 + 1900) * 2


@pytest.mark.parametrize(
    ("budget", "micro", "sharing", "tokens"),
    [
        (5000, None, 1, 5000),
        (600, None, 1, 1000),  # a trajectory of 1000 tokens goes alone
        (600, None, 2, 600),
        (600, None, 4, 600),
        (100, None, 4, 250),  # a fourth of one
        (99999, None, 1, 8000),  # no more than there is
        (600, 3, 1, 3000),
    ],
)
def test_a_micro_batch_is_the_budget_or_the_longest_trajectory(
    budget: int, micro: int | None, sharing: int, tokens: int
) -> None:
    config = run_of()
    actor = config.actor_rollout_ref.actor
    actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu = budget, micro
    actor.ulysses_sequence_parallel_size = sharing
    assert memory.micro_batch_tokens(config, actor, 1000) == tokens


def test_one_process_on_a_cpu_holds_the_plain_model_in_float32() -> None:
    parts = sizes(plan(run_of(workers=1), device="cpu", engine="hf").users["actor"])
    assert parts["weights"] == WEIGHTS * 4 and "gathered layers" not in parts
    assert parts["activations"] == 5000 * 10 * 1900 * 4


def test_an_adapter_alone_has_gradients_and_optimizer() -> None:
    adapter = 10 * 3 * (2 * 200 + 2 * 150 + 3 * 300)
    config = run_of(lora_rank=3)
    config.actor_rollout_ref.actor.use_kl_loss = True
    planned = plan(config)
    parts = sizes(planned.users["actor"])
    assert (parts["weights"], parts["adapter"], parts["Adam"]) == (WEIGHTS, adapter, 2 * adapter)
    assert "reference" not in planned.users  # the actor without its adapter


def test_what_is_trained_is_float32_even_of_a_model_of_16_bit() -> None:
    config = run_of()
    config.actor_rollout_ref.model.dtype = "bfloat16"
    config.actor_rollout_ref.actor.use_kl_loss = True
    config.algorithm.adv_estimator = "gae"
    users = plan(config).users
    parts = sizes(users["actor"])
    assert [parts[name] for name in ("weights", "gradients", "Adam")] == [WEIGHTS, WEIGHTS, 2 * WEIGHTS]
    assert parts["gathered layers"] == (200_000 + 2 * LAYER) * 2
    assert sizes(users["reference"])["weights"] == WEIGHTS * 2 / 4
    assert sizes(users["critic"])["Adam"] == 2 * (WEIGHTS - 1000 * 100 + 100 + 1)
    config.actor_rollout_ref.model.lora_rank = 3
    adapter = 10 * 3 * (2 * 200 + 2 * 150 + 3 * 300)
    parts = sizes(plan(config).users["actor"])
    assert [parts[name] for name in ("weights", "adapter", "gradients", "Adam")] == [
        WEIGHTS * 2 / 4,
        adapter,
        adapter,
        2 * adapter,
    ]


def test_one_process_on_a_cpu_that_computes_in_16_bit_gathers_layers_beside_its_float32() -> None:
    config = run_of(workers=1)
    config.actor_rollout_ref.model.dtype = "bfloat16"
    parts = sizes(plan(config, device="cpu", engine="hf").users["actor"])
    assert (parts["weights"], parts["gathered layers"]) == (WEIGHTS * 4, (200_000 + 2 * LAYER) * 2)


def test_the_engine_holds_weights_of_its_own_and_a_cache_for_each_trajectory_at_once() -> None:
    config = run_of()
    config.data.train_batch_size = 32  # x 4 trajectories on 4 engines
    assert sizes(plan(config).engine) == {"weights": WEIGHTS * 2, "cache": 32 * 1000 * 2 * 10 * 50 * 2}
    config.actor_rollout_ref.rollout.tensor_model_parallel_size = 2
    assert sizes(plan(config).engine) == {"weights": WEIGHTS, "cache": 64 * 1000 * 10 * 50 * 2}


def test_what_rests_counts_while_others_work_and_what_is_offloaded_does_not() -> None:
    config = run_of()
    config.actor_rollout_ref.actor.use_kl_loss = True
    engine = WEIGHTS * 2 + 32 * 1000 * 2000
    actor = sum(sizes(plan(config).users["actor"]).values())
    # Resting: weights of actor and reference, and the actor's Adam; the engine gives its memory back.
    assert dict(plan(config).phases()) == {
        "= while the engine works": engine + WEIGHTS * (1 + 2 + 1),
        "= while the actor works": actor + WEIGHTS,
        "= while the reference works": WEIGHTS * (1 + 1 + 2),
        "= while the engine gets weights": WEIGHTS * (1 + 2 + 1),
    }
    config.actor_rollout_ref.actor.fsdp_config.param_offload = True
    config.actor_rollout_ref.actor.fsdp_config.optimizer_offload = True
    config.actor_rollout_ref.ref.fsdp_config.param_offload = True
    config.actor_rollout_ref.rollout.free_cache_engine = False
    assert dict(plan(config).phases()) == {
        "= while the engine works": engine,
        "= while the actor works": actor + engine,
        "= while the reference works": WEIGHTS + engine,
        "= while the engine gets weights": WEIGHTS * (1 + 2),
    }


def test_copies_of_the_model_are_shared_out_among_fewer() -> None:
    config = run_of()
    config.actor_rollout_ref.actor.use_kl_loss = True
    config.actor_rollout_ref.actor.fsdp_config.fsdp_size = 2
    users = plan(config).users
    assert [sizes(users["actor"])[name] for name in ("weights", "gradients", "Adam")] == [
        WEIGHTS * 4 / 2,
        WEIGHTS * 4 / 2,
        WEIGHTS * 8 / 2,
    ]
    assert sizes(users["reference"])["weights"] == WEIGHTS * 4 / 4


def test_a_critic_has_no_output_layer() -> None:
    config = run_of()
    config.algorithm.adv_estimator = "gae"
    parts = sizes(plan(config).users["critic"])
    assert parts["weights"] == WEIGHTS - 1000 * 100 + 100 + 1 and "logits" not in parts


def test_logits_are_kept_up_to_what_log_probs_keeps() -> None:
    assert memory._KEPT_LOGITS_BYTES == KEEP_BYTES


def test_the_table_names_parts_formulas_and_sums() -> None:
    table = plan(run_of()).describe(Machine("cuda", 4), "model/config.json").splitlines()
    assert table[0] == "memory per GPU, one of 4, estimated from model/config.json:"
    assert "actor: Adam" in table[3] and "2 x P x 4 B / D" in table[3]
    assert any("its cache is what fits 0.5 of the GPU's memory" in line for line in table)
    assert table[-2].startswith("  = while the engine gets weights") and table[-1].startswith("  (P weights, ")


def test_half_a_run_holds_half_of_it() -> None:
    config = run_of()
    config.trainer.rollout_only = True
    assert plan(config).users == {} and [name for name, _ in plan(config).phases()] == ["= while the engine works"]
    config.trainer.rollout_only, config.trainer.replay = False, "trajectories"
    assert plan(config).engine == () and [name for name, _ in plan(config).phases()] == ["= while the actor works"]
