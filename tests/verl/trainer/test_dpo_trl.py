"""An independent judge of the preference losses: TRL's own trainer, where it is installed (the extra ``judges``).

The same model, the same tokens: loss, metrics and gradients must agree.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models import save_tiny_model, tiny_qwen2, tiny_tokenizer
from support.pairs import TokenPair, token_pairs

from verl.config import DPOAlgorithmConfig, ModelConfig, OptimConfig
from verl.trainer.dpo import batch_of_pairs
from verl.workers.dpo import PreferenceTrainer

trl = pytest.importorskip("trl", minversion="1.16")
datasets = pytest.importorskip("datasets")

BETA = 0.3


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "hinge"])
def test_trl_finds_the_same_loss_metrics_and_gradients(loss_type: str, tmp_path: Path) -> None:
    pairs = token_pairs([(9, 4), (5, 11), (7, 7)])
    reference = tiny_qwen2(seed=1)
    theirs = trl_update(loss_type, pairs, tiny_qwen2(), reference, tmp_path)

    folder = save_tiny_model(tmp_path / "model")
    learner = PreferenceTrainer(
        ModelConfig(path=str(folder)),
        OptimConfig(lr=0.0),
        DPOAlgorithmConfig(loss_type=loss_type, beta=BETA),
        device="cpu",
        total_updates=1,
        grad_clip=0.0,
        max_token_len=40,
    )
    batch = batch_of_pairs([pair.example for pair in pairs])
    batch = batch.replace(ref_log_probs_T=reference_log_probs(reference, pairs))
    ours = learner.update(batch, len(pairs))
    assert ours["train/loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert ours["train/grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    for name in ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


def trl_update(loss_type: str, pairs: list[TokenPair], model, reference, folder: Path) -> dict[str, float]:
    """Loss and metrics as TRL computes them, and the norm of its gradient."""
    rows = {"prompt": ["w1"] * 3, "chosen": ["w2"] * 3, "rejected": ["w3"] * 3}
    trainer = trl.DPOTrainer(
        model,
        reference,
        args=trl.DPOConfig(
            output_dir=str(folder / "trl"), loss_type=[loss_type], beta=BETA, use_cpu=True, report_to=[], bf16=False
        ),
        train_dataset=datasets.Dataset.from_dict(rows),
        processing_class=tiny_tokenizer(),
    )
    sides = [(pair.prompt, pair.chosen) for pair in pairs] + [(pair.prompt, pair.rejected) for pair in pairs]
    width = max(len(prompt) + len(completion) for prompt, completion in sides)

    def padded(rows: list[list[int]]) -> torch.Tensor:
        return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])

    inputs = {
        "input_ids": padded([[*prompt, *completion] for prompt, completion in sides]),
        "attention_mask": padded([[1] * (len(prompt) + len(completion)) for prompt, completion in sides]),
        "completion_mask": padded([[0] * len(prompt) + [1] * len(completion) for prompt, completion in sides]),
    }
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    norms = [parameter.grad.norm() for parameter in trainer.model.parameters() if parameter.grad is not None]
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return metrics | {"loss": loss.item(), "grad_norm": torch.stack(norms).norm().item()}


def reference_log_probs(reference, pairs: list[TokenPair]) -> torch.Tensor:
    """``T``: of all tokens of both sides, one plain forward pass each."""
    columns = []
    for pair in pairs:
        for completion in (pair.chosen, pair.rejected):
            ids = torch.tensor([[*pair.prompt, *completion]])
            with torch.no_grad():
                log_p = reference(input_ids=ids).logits.log_softmax(-1)
            columns.append(torch.cat([torch.zeros(1), log_p[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]]))
    return torch.cat(columns)
