"""What a step on the letters costs at the least: a plain PyTorch loop with no more than the task asks for.

Generation is one batch with a KV cache, three forward passes for three one-token turns; then group advantages and one
update of PPO's loss. All episodes have one length, so that nothing is padded. No logs, no faults, no other task.
Axes: ``B`` trajectories, ``T`` tokens of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from letters import TURNS, answer_positions, encode, letters_of, pay
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache


@dataclass(frozen=True, eq=False)
class Episodes:
    """One step's trajectories."""

    ids_BT: torch.Tensor
    scores_B: torch.Tensor


class PlainLoop:
    """GRPO on the letters, with one update a step."""

    def __init__(self, model_folder: Path, *, lr: float, entropy_coeff: float = 0.0) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model_folder)
        self._model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=lr, weight_decay=0.01, fused=True)
        self._answers = torch.tensor(answer_positions(self._tokenizer))
        self._entropy_coeff = entropy_coeff

    def step(self, items: Sequence[int], n: int) -> float:
        """Train on ``n`` episodes of each item; returns their mean score."""
        episodes = self.rollout([item for item in items for _ in range(n)])
        self.update(episodes, n)
        return float(episodes.scores_B.mean())

    @torch.inference_mode()
    def rollout(self, items: Sequence[int]) -> Episodes:
        """One episode per item."""
        shown = [letters_of(item) for item in items]
        scripts_BT = torch.tensor([encode(self._tokenizer, _with_gaps(letters)) for letters in shown])
        scores_B, cache, start = torch.zeros(len(items)), DynamicCache(config=self._model.config), 0
        for turn, position in enumerate(self._answers.tolist()):
            new_BT = scripts_BT[:, start:position]
            output = self._model(input_ids=new_BT, past_key_values=cache, use_cache=True, logits_to_keep=1)
            answers_B = torch.multinomial(output.logits[:, -1].softmax(-1), 1)[:, 0]
            scripts_BT[:, position] = answers_B
            texts = self._tokenizer.batch_decode(answers_B[:, None], skip_special_tokens=True)
            scores_B += torch.tensor([pay(s[turn], text) for s, text in zip(shown, texts, strict=True)])
            start = position
        return Episodes(scripts_BT, scores_B)

    def update(self, episodes: Episodes, n: int) -> None:
        """One step of AdamW on the policy gradient of group advantages and the entropy."""
        # In float32 a group of equal scores would get advantages of some hundredths out of rounding.
        groups = episodes.scores_B.double().view(-1, n)
        advantages_BN = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
        advantages_B = advantages_BN.float().view(-1, 1)
        ids_BT = episodes.ids_BT.clone()
        hidden = self._model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
        log_p = log_softmax(self._model.lm_head(hidden[:, self._answers - 1]), -1)
        log_probs = log_p.gather(-1, ids_BT[:, self._answers, None])[..., 0]
        ratio = (log_probs - log_probs.detach()).exp()
        loss = -torch.minimum(ratio * advantages_B, ratio.clamp(0.8, 1.2) * advantages_B).mean()
        loss = loss + self._entropy_coeff * (log_p.exp() * log_p).sum(-1).mean()
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()


def _with_gaps(letters: str) -> list[str]:
    """What is shown, with any letter standing for each answer but the last."""
    return [part for letter in letters for part in (letter, letter)][: 2 * TURNS]
