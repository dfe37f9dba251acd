"""What members of a group have in common is computed once, and nothing else changes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import tiny_qwen2
from torch.nn.functional import scaled_dot_product_attention

from verl.models import attention
from verl.models.attention import PACKED_ATTENTION, Packing, packed_attention
from verl.models.policy import PackedModule, PolicyModule, ValueModule
from verl.models.prefixes import Row
from verl.protocol import DataProto
from verl.utils.families import Family, balanced_shares, find_families

# --------------------------------------------------------------------------------------------------------- the families


def batch_of(sequences: Sequence[Sequence[int]], groups: Sequence[int], *, loss_from: int = 1) -> DataProto:
    """Every token from ``loss_from`` on is a loss token."""
    masks = [[int(position >= loss_from) for position in range(len(ids))] for ids in sequences]
    return DataProto.from_sequences(sequences, masks).replace(group_ids_B=torch.tensor(groups))


PROMPT = list(range(20))


def test_neighbours_of_one_group_with_a_common_beginning_are_a_family():
    batch = batch_of([[*PROMPT, 1, 2], [*PROMPT, 1, 3, 4], [*PROMPT, 5]], [7, 7, 7])
    assert find_families(batch, range(3)) == [Family([0, 1, 2], 20)]
    assert find_families(batch, range(2)) == [Family([0, 1], 21)]


def test_a_family_holds_one_group_and_what_is_worth_sharing():
    other = [*PROMPT[:10], *reversed(PROMPT[10:])]
    batch = batch_of([[*PROMPT, 1], [*PROMPT, 2], [*PROMPT, 3], [*other, 4], [*other, 5]], [7, 7, 8, 8, 8])
    families = find_families(batch, range(5))
    assert families == [Family([0, 1], 20), Family([2], 0), Family([3, 4], 20)]


def test_a_reflection_shares_its_whole_trial_and_strangers_of_the_item_do_not_spoil_it():
    """Rows of one item in four groups: two trials, each followed by its reflection, with a short prompt in common."""
    trials = [[*PROMPT, *range(start, start + 60)] for start in (100, 200)]
    rows = [trials[0], [*trials[0], 1, 2, 3], trials[1], [*trials[1], 4, 5, 6]]
    batch = batch_of(rows, [7, 8, 7, 8]).replace(item_ids_B=torch.zeros(4, dtype=torch.int64))
    assert find_families(batch, range(4)) == [Family([0, 1], 79), Family([2, 3], 79)]


def test_members_alike_to_the_end_keep_their_last_token_for_themselves():
    batch = batch_of([PROMPT, PROMPT, [*PROMPT, 1]], [7, 7, 7])
    assert find_families(batch, range(3)) == [Family([0, 1, 2], 19)]


def test_a_family_ends_where_the_budget_does():
    batch = batch_of([[*PROMPT, *range(10)]] * 5, [7] * 5)
    # Two members: 60 tokens, of which 29 are spared, and an eighth of those, 3, counts: 34. Three: 90 - 58 + 7 = 39.
    assert [family.members for family in find_families(batch, range(5), max_tokens=34)] == [[0, 1], [2, 3], [4]]
    assert [family.members for family in find_families(batch, range(5), max_tokens=39)] == [[0, 1, 2], [3, 4]]
    assert [family.members for family in find_families(batch, range(2), max_tokens=5)] == [[0], [1]]


def test_only_the_tokens_asked_for_count():
    batch = batch_of([[*PROMPT, 1], [*PROMPT, 2], [*PROMPT, 3]], [7, 7, 7])
    assert find_families(batch, [0, 2]) == [Family([0, 2], 20)]


def test_ranks_get_whole_families_where_that_is_less_work():
    batch = batch_of([[*PROMPT, 1], [*PROMPT, 2]] * 2, [7, 7, 8, 8])
    # Two ranks: a family is 22 tokens and an eighth of 20, two strangers are 42.
    assert balanced_shares(batch, 2) == [[0, 1], [2, 3]]
    assert balanced_shares(batch, 4) == [[0], [1], [2], [3]]
    assert balanced_shares(batch.replace(group_ids_B=torch.arange(4)), 2) == [[0, 2], [1, 3]]


# -------------------------------------------------------------------------------------------------------------- the row


def test_a_row_holds_what_is_shared_once_and_knows_what_precedes_each_loss_token():
    batch = batch_of([[*PROMPT, 30, 31], [9, 9], [*PROMPT, 40]], [7, 8, 7], loss_from=20)
    batch = batch.select([0, 2, 1])
    row = Row.of(batch, shares_prefixes=True)
    assert batch.input_ids_T[row.tokens_P].tolist() == [*PROMPT, 30, 31, 40, 9, 9]
    assert batch.position_ids_T[row.tokens_P].tolist() == [*range(20), 20, 21, 20, 0, 1]
    # Both first answers follow the prompt's last token, number 19 of the row.
    assert row.before_S.tolist() == [19, 20, 19]
    assert row.packing.lengths == [20, 2, 1, 2]
    assert row.packing.contexts == [20, 22, 21, 2]


# ------------------------------------------------------------------------------------------ the same numbers, gradients


def policy(*, kv_heads: int = 2, window: int | None = None) -> PolicyModule:
    model = tiny_qwen2(num_kv_heads=kv_heads)
    for layer in model.model.layers:
        layer.self_attn.sliding_window = window
    model.set_attn_implementation(PACKED_ATTENTION)
    return PolicyModule(model)


@st.composite
def groups_of_sequences(draw: st.DrawFn) -> DataProto:
    """Groups whose members share a random number of tokens, some of them all; loss tokens anywhere, shared ones too."""
    seed = draw(st.integers(0, 10_000))
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> list[int]:
        return torch.randint(0, 64, (length,), generator=generator).tolist()

    sequences, groups = [], []
    for group in range(draw(st.integers(1, 3))):
        prefix = ids(draw(st.sampled_from([1, 15, 17, 40])))
        for length in draw(st.lists(st.sampled_from([0, 1, 6, 6, 23]), min_size=1, max_size=4)):
            sequences.append([*prefix, *ids(length)] if len(prefix) + length > 1 else [*prefix, 5])
            groups.append(group)
    masks = [[0, *(torch.rand(len(s) - 1, generator=generator) < 0.5).int().tolist()] for s in sequences]
    masks[0][-1] = 1
    return DataProto.from_sequences(sequences, masks).replace(group_ids_B=torch.tensor(groups))


def numbers_and_gradients(module: PackedModule, batch: DataProto, *, shares: bool) -> list[torch.Tensor]:
    module.zero_grad()
    module.shares_prefixes = shares
    read_out = module(batch, with_entropy=True)
    weights_S = torch.linspace(-1, 1, len(read_out.numbers))
    (read_out.numbers * weights_S).sum().backward()
    entropy = [] if read_out.entropy is None else [read_out.entropy]
    return [read_out.numbers, *entropy, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def assert_sharing_changes_nothing(module: PackedModule, batch: DataProto) -> None:
    for one, other in zip(
        numbers_and_gradients(module, batch, shares=True),
        numbers_and_gradients(module, batch, shares=False),
        strict=True,
    ):
        assert torch.allclose(one, other, atol=1e-4, rtol=1e-4)


@settings(max_examples=30, deadline=None)
@given(groups_of_sequences(), st.sampled_from([1, 2, 4]), st.sampled_from([None, 3, 20]))
def test_numbers_and_gradients_are_those_of_whole_sequences(batch, kv_heads, window):
    assert_sharing_changes_nothing(policy(kv_heads=kv_heads, window=window), batch)


def many_in_groups() -> DataProto:
    sequences = [[*PROMPT, group, member, 3, 4] for group in (30, 31) for member in (40, 41, 42)]
    return batch_of([*sequences, [5, 6, 7]], [1, 1, 1, 2, 2, 2, 3], loss_from=2)


def test_values_are_those_of_whole_sequences():
    model = tiny_qwen2()
    model.set_attn_implementation(PACKED_ATTENTION)
    module = ValueModule(model)
    torch.nn.init.normal_(module.value_head.weight)
    assert_sharing_changes_nothing(module, many_in_groups())


def test_divergence_to_a_reference_is_that_of_whole_sequences():
    module, reference, batch = policy(), policy(kv_heads=4), many_in_groups()
    seen = []
    for shares in (True, False):
        module.shares_prefixes = reference.shares_prefixes = shares
        seen.append(module(batch, reference=reference.states(batch)).kl)
    assert seen[1].abs().min() > 0
    assert torch.allclose(seen[0], seen[1], atol=1e-5)


def test_what_is_shared_goes_through_the_model_once_and_equal_shapes_through_attention_together(monkeypatch):
    calls = []

    def watch(query, key, value, **kwargs):
        calls.append((query.shape[0], query.shape[2], key.shape[2]))
        return scaled_dot_product_attention(query, key, value, **kwargs)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", watch)
    module, batch = policy(), many_in_groups()
    module.shares_prefixes = True
    widths = []
    module.model.model.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    module(batch)
    # Per group 21 tokens in common and 3 for each of three members; then the lone sequence of 3.
    assert widths == [2 * 21 + 6 * 3 + 3]
    layers = len(module.model.model.layers)
    assert calls == [(2, 21, 21), (6, 3, 24), (1, 3, 3)] * layers


# ----------------------------------------------------------------------------------------------------------- flash-attn


def varlen(q, k, v, cu_q, cu_k, max_q, max_k, *, softmax_scale, causal, window_size):
    """What flash-attn computes, as its documentation says: causal from the end of each pair of sequences."""
    assert causal
    outputs = []
    for b in range(len(cu_q) - 1):
        queries, keys, values = q[cu_q[b] : cu_q[b + 1]], k[cu_k[b] : cu_k[b + 1]], v[cu_k[b] : cu_k[b + 1]]
        assert len(queries) <= max_q and len(keys) <= max_k
        distance = torch.arange(len(keys) - len(queries), len(keys))[:, None] - torch.arange(len(keys))
        mask = (distance >= 0) & (distance <= (window_size[0] if window_size[0] >= 0 else len(keys)))
        heads = q.shape[1] // k.shape[1]
        keys, values = keys.repeat_interleave(heads, 1), values.repeat_interleave(heads, 1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * softmax_scale
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), values))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("continued", [None, [None, 0, 0, None]])
def test_flash_attn_is_asked_for_what_the_other_way_computes(monkeypatch, continued, window):
    flash = ModuleType("flash_attn")
    vars(flash)["flash_attn_varlen_func"] = varlen
    monkeypatch.setitem(sys.modules, "flash_attn", flash)
    lengths = [9, 3, 5, 4]
    packing = Packing.of(torch.tensor([0, 9, 12, 17, 21]))
    if continued:
        packing = Packing.continuing(lengths, continued, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 21, 8, generator=generator) for heads in (4, 2, 2))
    expected = packed_attention(torch.nn.Identity(), q, k, v, None, packing=packing, scaling=0.3, sliding_window=window)
    seen = attention._flash(q, k, v, packing, 0.3, window)
    assert torch.allclose(seen, expected[0], atol=1e-5)
