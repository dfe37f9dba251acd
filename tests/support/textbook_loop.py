"""GRPO as a textbook has it: the yardstick of what a whole training run does to the weights.

One sequence at a time, all logits at once, plain autograd: nothing is packed, cut into chunks or shared.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from agentgym_rl.types import Trajectory


class TextbookLoop:
    """A policy and its optimizer; every step makes ``epochs`` updates on all of its trajectories."""

    def __init__(
        self,
        model: Path,
        *,
        temperature: float,
        lr: float,
        warmup: int,
        weight_decay: float,
        grad_clip: float,
        entropy: float,
    ) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=lr)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda n: min((n + 1) / warmup, 1.0))
        self._temperature, self._grad_clip, self._entropy = temperature, grad_clip, entropy

    def log_probs_and_entropy(self, trajectory: Trajectory) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the trajectory's sampled tokens."""
        ids = torch.from_numpy(trajectory.input_ids).long()
        positions = torch.from_numpy(trajectory.loss_mask).nonzero()[:, 0]
        logits = self.model(input_ids=ids[None]).logits[0] / self._temperature
        log_p = logits[positions - 1].log_softmax(-1)
        return log_p.gather(1, ids[positions, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    def step(self, trajectories: Sequence[Trajectory], *, epochs: int) -> None:
        """Updates of PPO's clipped loss, a mean over all sampled tokens."""
        advantages = _group_advantages(trajectories)
        num_tokens = sum(int(trajectory.loss_mask.sum()) for trajectory in trajectories)
        old = [self.log_probs_and_entropy(trajectory)[0].detach() for trajectory in trajectories]
        for _ in range(epochs):
            loss = torch.zeros(())
            for trajectory, advantage, old_log_probs in zip(trajectories, advantages, old, strict=True):
                log_probs, entropy = self.log_probs_and_entropy(trajectory)
                ratio = (log_probs - old_log_probs).exp()
                gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                loss = loss - (gain.sum() + self._entropy * entropy.sum()) / num_tokens
            self._optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._grad_clip)
            self._optimizer.step()
            self._schedule.step()


def _group_advantages(trajectories: Sequence[Trajectory]) -> list[float]:
    """Score less the mean of the trajectories of the same item, over their standard deviation."""
    groups: dict[int, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.item.index].append(trajectory.score)
    return [
        (t.score - statistics.mean(groups[t.item.index])) / (statistics.stdev(groups[t.item.index]) + 1e-6)
        for t in trajectories
    ]
