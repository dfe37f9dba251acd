from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from verl.models import log_probs
from verl.models.log_probs import OutputStates, token_kl, token_log_probs


def inputs(num_positions: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_positions, 5, generator=generator, requires_grad=True)
    head = torch.randn(11, 5, generator=generator, requires_grad=True)
    return hidden, head, torch.randint(0, 11, (num_positions,), generator=generator)


def plain(hidden, head, ids, temperature):
    log_p = (hidden @ head.T / temperature).log_softmax(-1)
    return log_p.gather(-1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("keep_bytes", [0, 2**20], ids=["recomputed", "kept"])
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_the_full_softmax(monkeypatch, temperature, chunk, keep_bytes):
    monkeypatch.setattr(log_probs, "KEEP_BYTES", keep_bytes)
    hidden, head, ids = inputs()
    seen = token_log_probs(hidden, head, ids, temperature=temperature, with_entropy=True, chunk=chunk)
    expected = plain(hidden, head, ids, temperature)
    weights = torch.linspace(-1, 2, 14).split(7)

    def gradients(outputs):
        return torch.autograd.grad(sum((w * o).sum() for w, o in zip(weights, outputs, strict=True)), (hidden, head))

    for one, other in zip([*seen, *gradients(seen)], [*expected, *gradients(expected)], strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_each_output_carries_its_gradient_alone():
    hidden, head, ids = inputs()
    for output in (0, 1):
        seen = token_log_probs(hidden, head, ids, with_entropy=True)[output]
        expected = plain(hidden, head, ids, 1.0)[output]
        grads = (torch.autograd.grad(value.square().sum(), (hidden, head)) for value in (seen, expected))
        for one, other in zip(*grads, strict=True):
            assert torch.allclose(one, other, atol=1e-5)


def test_the_kl_over_the_vocabulary_and_its_gradient_by_hand():
    hidden = torch.tensor([[math.log(3)]], requires_grad=True)
    head = torch.tensor([[1.0], [0.0]])  # logits log 3 and 0: probabilities 3/4 and 1/4
    reference = OutputStates(torch.zeros(1, 1), head)  # 1/2 and 1/2
    kl = token_kl(OutputStates(hidden, head), reference)
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert kl.tolist() == pytest.approx([expected])
    kl.sum().backward()
    assert hidden.grad.item() == pytest.approx(0.75 * (math.log(1.5) - expected))


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_kl_in_chunks_equals_that_of_full_softmaxes(temperature, chunk):
    hidden, head, _ = inputs()
    ref_hidden, ref_head = hidden.detach() + 0.5, head.detach() * 1.5
    seen = token_kl(
        OutputStates(hidden, head), OutputStates(ref_hidden, ref_head), temperature=temperature, chunk=chunk
    )
    log_p, ref_log_p = ((h @ w.T / temperature).log_softmax(-1) for h, w in ((hidden, head), (ref_hidden, ref_head)))
    expected = torch.nn.functional.kl_div(ref_log_p, log_p, reduction="none", log_target=True).sum(-1)
    grads = (torch.autograd.grad(value.square().sum(), (hidden, head)) for value in (seen, expected))
    for one, other in zip(*grads, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert torch.allclose(seen, expected, atol=1e-5)


def test_entropy_is_left_out_unless_asked_for():
    assert token_log_probs(*inputs())[1] is None


def test_bfloat16_states_give_float32_log_probs():
    hidden, head, ids = inputs()
    hidden, head = hidden.detach().bfloat16().requires_grad_(), head.detach().bfloat16().requires_grad_()
    seen, _ = token_log_probs(hidden, head, ids)
    seen.sum().backward()
    assert seen.dtype == torch.float32
    assert hidden.grad.dtype == head.grad.dtype == torch.bfloat16


def test_a_long_trajectory_takes_the_memory_of_a_few_chunks():
    """In a process of its own, since a peak never falls."""
    program = (
        "import resource, torch; from verl.models.log_probs import token_log_probs; torch.set_num_threads(1)\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "hidden, head, ids = torch.randn(3000, 8), torch.randn(50_000, 8), torch.zeros(3000, dtype=torch.long)\n"
        "token_log_probs(hidden[:4], head, ids[:4]); before = peak()\n"
        "token_log_probs(hidden, head, ids, with_entropy=True); print(peak() - before)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    # All logits at once are 572 MiB, twice that with their logarithms; a chunk and its scratch are 64.
    assert int(run.stdout) < 110
