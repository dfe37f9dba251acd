"""Log-probabilities of given tokens and KL from hidden states, without ever holding all logits of a long batch.

Axes: ``S`` positions asked for, ``C`` positions of one chunk, ``D`` hidden size, ``V`` vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from verl.trainer.core_algos import full_kl

CHUNK_BYTES = 32 * 2**20
"""float32 logits worked on at once."""
KEEP_BYTES = 512 * 2**20
"""float32 logits kept from forward to backward; beyond this the backward pass computes them again, chunk by chunk."""


def token_log_probs(
    hidden_SD: torch.Tensor,
    head_VD: torch.Tensor,
    ids_S: torch.Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of ``ids_S[s]`` under the distribution that ``hidden_SD[s]`` gives for the next token.

    ``head_VD`` is the output layer's weight; logits are divided by ``temperature``. Returns float32 nats ``S``, and the
    entropy ``S`` (nats) when asked. Both carry gradients to ``hidden_SD`` and ``head_VD``. ``chunk`` is the number of
    positions worked on at once; None takes as many as fit `CHUNK_BYTES`.
    """
    chunk = chunk or max(CHUNK_BYTES // (4 * len(head_VD)), 1)
    keep = torch.is_grad_enabled() and 4 * len(ids_S) * len(head_VD) <= KEEP_BYTES
    log_probs_S, entropy_S = _TokenLogProbs.apply(hidden_SD, head_VD, ids_S, temperature, with_entropy, chunk, keep)
    return log_probs_S, entropy_S


class OutputStates(NamedTuple):
    """What a model's distributions of the next token at ``S`` positions follow from."""

    hidden_SD: torch.Tensor
    head_VD: torch.Tensor


def token_kl(
    policy: OutputStates, reference: OutputStates, *, temperature: float = 1.0, chunk: int | None = None
) -> torch.Tensor:
    """KL(policy || reference) over the whole vocabulary at each position, float32 nats ``S``.

    Carries gradients to the states of ``policy``; the logits of a chunk are computed again in the backward pass.
    ``temperature`` and ``chunk`` are as those of `token_log_probs`.
    """
    chunk = chunk or max(CHUNK_BYTES // (4 * len(policy.head_VD)), 1)

    def chunk_kl(hidden_CD: torch.Tensor, ref_hidden_CD: torch.Tensor) -> torch.Tensor:
        ref_log_p_CV = _logits(ref_hidden_CD, reference.head_VD, temperature).log_softmax(-1)
        return full_kl(_logits(hidden_CD, policy.head_VD, temperature).log_softmax(-1), ref_log_p_CV)

    parts = zip(policy.hidden_SD.split(chunk), reference.hidden_SD.split(chunk), strict=True)
    return torch.cat([checkpoint(chunk_kl, *part, use_reentrant=False, preserve_rng_state=False) for part in parts])


class _TokenLogProbs(torch.autograd.Function):
    """By hand, because autograd would keep logits, softmax and log-softmax: three tensors ``[S, V]``, each of them
    the size of all activations of a small model."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_SD: torch.Tensor,
        head_VD: torch.Tensor,
        ids_S: torch.Tensor,
        temperature: float,
        with_entropy: bool,
        chunk: int,
        keep: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        log_probs, log_sums, entropies, kept = [], [], [], []
        scratch_CV, logits_buffer_CV = (_buffer(hidden_SD, head_VD, chunk) for _ in range(2))
        for hidden_CD, ids_C in zip(hidden_SD.split(chunk), ids_S.split(chunk), strict=True):
            if keep:
                logits_CV = _logits(hidden_CD, head_VD, temperature)
            else:
                logits_CV = _logits_into(logits_buffer_CV, hidden_CD, head_VD, temperature)
            exp_CV, log_sum_C = _log_sum(logits_CV, scratch_CV[: len(ids_C)])
            log_probs.append(logits_CV.gather(-1, ids_C[:, None])[:, 0] - log_sum_C)
            log_sums.append(log_sum_C)
            if with_entropy:
                total_C = exp_CV.sum(-1)
                entropies.append(log_sum_C - exp_CV.mul_(logits_CV).sum(-1) / total_C)
            if keep:
                kept.append(logits_CV)
        entropy_S = torch.cat(entropies) if with_entropy else None
        ctx.save_for_backward(hidden_SD, head_VD, ids_S, torch.cat(log_sums), entropy_S, *kept)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return torch.cat(log_probs), entropy_S

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad_S, grad_entropy_S = grads
        if grad_S is None and grad_entropy_S is None:
            return (None,) * 7
        hidden_SD, head_VD, ids_S, log_sums_S, entropy_S, *kept = ctx.saved_tensors
        grad_hidden_SD = torch.empty_like(hidden_SD)
        grad_head_VD = torch.zeros_like(head_VD, dtype=torch.float32)
        buffer_CV = _buffer(hidden_SD, head_VD, ctx.chunk)
        for index, start in enumerate(range(0, len(ids_S), ctx.chunk)):
            part = slice(start, start + ctx.chunk)
            if kept:
                log_p_CV = torch.sub(kept[index], log_sums_S[part, None], out=buffer_CV[: len(kept[index])])
            else:
                log_p_CV = _logits_into(buffer_CV, hidden_SD[part], head_VD, ctx.temperature)
                log_p_CV.sub_(log_sums_S[part, None])
            grad_CV = _grad_logits(
                log_p_CV,
                ids_S[part],
                None if grad_S is None else grad_S[part],
                None if grad_entropy_S is None else grad_entropy_S[part],
                entropy_S[part] if entropy_S is not None else None,
            )
            grad_CV = grad_CV.div_(ctx.temperature).to(hidden_SD.dtype)
            torch.mm(grad_CV, head_VD, out=grad_hidden_SD[part])
            grad_head_VD += grad_CV.T @ hidden_SD[part]
        return grad_hidden_SD, grad_head_VD.to(head_VD.dtype), None, None, None, None, None


def _logits(hidden_CD: torch.Tensor, head_VD: torch.Tensor, temperature: float) -> torch.Tensor:
    logits_CV = (hidden_CD @ head_VD.T).float()
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)


def _buffer(hidden_SD: torch.Tensor, head_VD: torch.Tensor, chunk: int) -> torch.Tensor:
    """float32 ``[C, V]`` that every chunk is worked on in: fresh tensors of that size would each cost page faults, and
    malloc scatters their holes over a heap many times as large."""
    return hidden_SD.new_empty((min(chunk, len(hidden_SD)), len(head_VD)), dtype=torch.float32)


def _logits_into(
    buffer_CV: torch.Tensor, hidden_CD: torch.Tensor, head_VD: torch.Tensor, temperature: float
) -> torch.Tensor:
    """`_logits` in the first rows of the buffer."""
    logits_CV = buffer_CV[: len(hidden_CD)]
    if hidden_CD.dtype == torch.float32:
        torch.mm(hidden_CD, head_VD.T, out=logits_CV)
    else:
        logits_CV.copy_(hidden_CD @ head_VD.T)
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)


def _log_sum(logits_CV: torch.Tensor, scratch_CV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Exponentials of logits below the largest, in ``scratch_CV``, and the logarithm of the sum of all ``[C]``."""
    largest_C = logits_CV.amax(-1)
    exp_CV = torch.sub(logits_CV, largest_C[:, None], out=scratch_CV).exp_()
    return exp_CV, exp_CV.sum(-1).log_().add_(largest_C)


def _grad_logits(
    log_p_CV: torch.Tensor,
    ids_C: torch.Tensor,
    grad_C: torch.Tensor | None,
    grad_entropy_C: torch.Tensor | None,
    entropy_C: torch.Tensor | None,
) -> torch.Tensor:
    """d log p(id) / d logit_j = [j = id] - p_j, and d entropy / d logit_j = -p_j (log p_j + entropy)."""
    slope = 0.0 if grad_C is None else -grad_C[:, None]
    if grad_entropy_C is not None and entropy_C is not None:
        slope = slope - grad_entropy_C[:, None] * (log_p_CV + entropy_C[:, None])
    grad_CV = log_p_CV.exp_().mul_(slope)
    if grad_C is not None:
        grad_CV.scatter_add_(-1, ids_C[:, None], grad_C[:, None])
    return grad_CV
