"""Training on preference pairs: of two trajectories of an item, make the better one likelier than the other.

Both sides of a pair are tokens as `verl.trainer.sft` would train on them. What they have in common at their beginning
tells them apart in nothing, so it is prompt: no loss is taken there.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.data.checks import check_roles
from agentgym_rl.data.conversations import Conversation
from agentgym_rl.data.pairs import Pair, read_pairs
from agentgym_rl.errors import ConfigError
from agentgym_rl.files import whole_file
from agentgym_rl.types import Item
from verl.config import DPOConfig, ModelConfig
from verl.models.loading import load_tokenizer
from verl.protocol import DataProto
from verl.single_controller.base import WorkerGroup, WorkerSpec
from verl.trainer.data_trainer import (
    DataPlan,
    DataTrainer,
    Update,
    learner_setup,
    order_rows,
    rollout_setup,
    run_training,
)
from verl.trainer.examples import Example, RowEncoder, TrainingData
from verl.trainer.item_order import ItemOrder
from verl.trainer.plan import resolve_threads
from verl.utils.balancing import balanced_partition
from verl.utils.devices import resolve_device
from verl.utils.tracking import Tracker

REFERENCE_FILE = "reference_log_probs.npz"
_PAIRS_PER_CALL = 256


@dataclass(frozen=True, eq=False)
class PairExample:
    """Both sides as tokens; each has something to train on, all of it after the common beginning."""

    chosen: Example
    rejected: Example

    @property
    def sides(self) -> tuple[Example, Example]:
        return self.chosen, self.rejected

    @property
    def num_tokens(self) -> int:
        return len(self.chosen.ids) + len(self.rejected.ids)


def encode_pairs(pairs: Sequence[Pair], encoder: RowEncoder) -> list[PairExample]:
    """The pairs that have a difference to train on; the others are counted aloud with the reason.

    Raises `ConfigError` as the encoder does, and when no pair is left.
    """
    examples: list[PairExample] = []
    dropped: Counter[str] = Counter()
    for number, pair in enumerate(pairs, 1):
        where = f"data.train_file row {number} ({pair.item_id})"
        cut_before = encoder.num_cut
        chosen, rejected = (
            encoder.encode(side, f"{where}, {name}")
            for name, side in (("chosen", pair.chosen), ("rejected", pair.rejected))
        )
        start = common_length(chosen.ids, rejected.ids)
        example = PairExample(chosen.without_loss_before(start), rejected.without_loss_before(start))
        if all(side.num_trained for side in example.sides):
            examples.append(example)
        else:
            dropped[_why_dropped(example, start, was_cut=encoder.num_cut > cut_before)] += 1
    for line in encoder.lines():
        print(line, flush=True)
    for reason, count in dropped.items():
        print(f"warning: {count} of {len(pairs)} pairs are left out: {reason}", flush=True)
    if not examples:
        raise ConfigError(f"data.train_file: none of its {len(pairs)} pairs has a difference to train on")
    return examples


def common_length(one_T: np.ndarray, other_T: np.ndarray) -> int:
    """Tokens that both begin with."""
    shorter = min(len(one_T), len(other_T))
    differs = np.flatnonzero(one_T[:shorter] != other_T[:shorter])
    return int(differs[0]) if len(differs) else shorter


def _why_dropped(example: PairExample, start: int, *, was_cut: bool) -> str:
    if start == len(example.chosen.ids) == len(example.rejected.ids):
        return "cut before they differ" if was_cut else "both sides are the same"
    return "nothing after their common beginning is trained on, on one side or both"


def batch_of_pairs(pairs: Sequence[PairExample]) -> DataProto:
    """Both sides of each pair side by side, the chosen one first, under one group id."""
    sides = [side for pair in pairs for side in pair.sides]
    batch = DataProto.from_sequences([side.ids for side in sides], [side.loss_mask for side in sides])
    return batch.replace(group_ids_B=torch.arange(len(pairs)).repeat_interleave(2))


def share_pairs(batch: DataProto, world_size: int) -> list[DataProto]:
    """Shares of whole pairs with about equal numbers of tokens; with fewer pairs than ranks some are empty."""
    lengths_P = batch.lengths_B.view(-1, 2).sum(1).tolist()
    parts = balanced_partition(lengths_P, world_size)
    return [batch.select([row for pair in part for row in (2 * pair, 2 * pair + 1)]) for part in parts]


class ReferenceLogProbs:
    """The reference's log-probs of all loss tokens: computed once by the workers, then kept in a file."""

    def __init__(self, values: Sequence[np.ndarray]) -> None:
        """``values``: float32 nats of the loss tokens of each pair, chosen side first."""
        self._values = list(values)

    @classmethod
    def zeros(cls, pairs: Sequence[PairExample]) -> ReferenceLogProbs:
        """Of no reference at all."""
        return cls([np.zeros(sum(side.num_trained for side in pair.sides), np.float32) for pair in pairs])

    @classmethod
    def compute(cls, pairs: Sequence[PairExample], workers: WorkerGroup) -> ReferenceLogProbs:
        """By the ``ref_log_probs`` of `DPOWorker`s."""
        values: list[np.ndarray] = [np.zeros(0, np.float32)] * len(pairs)
        # Of about equal length side by side, so that ranks and micro-batches are even.
        order = sorted(range(len(pairs)), key=lambda index: pairs[index].num_tokens)
        with tqdm(total=len(pairs), desc="reference", unit=" pairs", leave=False, disable=None) as bar:
            for start in range(0, len(order), _PAIRS_PER_CALL):
                chunk = order[start : start + _PAIRS_PER_CALL]
                shares = share_pairs(batch_of_pairs([pairs[index] for index in chunk]), workers.world_size)
                results = workers.call_each("ref_log_probs", [(share,) for share in shares])
                for share, result_T in zip(shares, results, strict=True):
                    for place, values_T in zip(share.group_ids_B[::2].tolist(), _by_pair(share, result_T), strict=True):
                        values[chunk[place]] = values_T
                bar.update(len(chunk))
        return cls(values)

    def of(self, indices: Sequence[int], batch: DataProto) -> torch.Tensor:
        """float32 ``T``: for the batch that holds the pairs at ``indices``; 0 where there is no loss."""
        values_T = torch.zeros(batch.num_tokens)
        values_T[batch.loss_mask_T] = torch.from_numpy(np.concatenate([self._values[index] for index in indices]))
        return values_T

    def save(self, path: Path, key: str) -> None:
        """Write a file that `load` finds whole or not at all."""
        lengths = np.array([len(values) for values in self._values])
        with whole_file(path) as file:
            np.savez(file, key=np.array(key), lengths=lengths, values=np.concatenate(self._values))

    @classmethod
    def load(cls, path: Path, key: str) -> ReferenceLogProbs | None:
        """What `save` wrote under the same key; None when there is none."""
        if not path.is_file():
            return None
        with np.load(path) as file:
            if str(file["key"]) != key:
                return None
            return cls(np.split(file["values"], np.cumsum(file["lengths"])[:-1]))


def _by_pair(share: DataProto, values_T: torch.Tensor) -> list[np.ndarray]:
    """The values of each pair's loss tokens."""
    lengths = share.sampled_lengths_B.view(-1, 2).sum(1).tolist()
    return [part.numpy().astype(np.float32) for part in values_T[share.loss_mask_T].split(lengths)]


def reference_key(model: ModelConfig, pairs: Sequence[PairExample]) -> str:
    """Tells one reference and set of tokens from another."""
    digest = hashlib.sha256()
    for side in chain.from_iterable(pair.sides for pair in pairs):
        digest.update(np.int64(len(side.ids)).tobytes() + side.ids.tobytes() + side.loss_mask.tobytes())
    files = [path.stat() for path in sorted(Path(model.path).glob("*.safetensors"))]
    weights = [(status.st_size, status.st_mtime_ns) for status in files]
    return json.dumps([model.path, model.dtype, weights, digest.hexdigest()])


class DPOTrainer(DataTrainer[int]):
    """Trains a model on pairs, which rows name by their index, with `DPOWorker`s."""

    kind = "dpo"

    def __init__(
        self,
        config: DPOConfig,
        plan: DataPlan,
        order: ItemOrder[int],
        pairs: Sequence[PairExample],
        *,
        workers: WorkerGroup,
        tracker: Tracker,
    ) -> None:
        """Computes the reference's log-probs first, unless the run's folder holds them."""
        super().__init__(config, plan, order, workers=workers, tracker=tracker)
        self._pairs = pairs
        self._reference = self._reference_log_probs(config)

    def make_update(self, rows: Sequence[int]) -> Update:
        batch = batch_of_pairs([self._pairs[index] for index in rows])
        batch = batch.replace(ref_log_probs_T=self._reference.of(rows, batch))
        shares = share_pairs(batch, self._workers.world_size)
        return Update(tuple((share, len(rows)) for share in shares), batch.num_tokens)

    def _reference_log_probs(self, config: DPOConfig) -> ReferenceLogProbs:
        if config.algorithm.reference_free:
            return ReferenceLogProbs.zeros(self._pairs)
        model = reference_model(config)
        path, key = self._plan.root / REFERENCE_FILE, reference_key(model, self._pairs)
        known = ReferenceLogProbs.load(path, key)
        if known is not None:
            return known
        # At the very beginning the model that is trained is the reference, and no second one is needed.
        needs_model = config.ref.path is not None or self._plan.resume_from is not None
        if needs_model:
            self._workers.call_all("load_reference", model, config.ref)
        reference = ReferenceLogProbs.compute(self._pairs, self._workers)
        if needs_model:
            self._workers.call_all("drop_reference")
        reference.save(path, key)
        return reference


def reference_model(config: DPOConfig) -> ModelConfig:
    """The reference: never with an adapter of its own."""
    model = config.model.absolute()
    if config.ref.path is None:
        return ModelConfig(path=model.path, **_loading_options(model))
    return ModelConfig(path=config.ref.path, **_loading_options(model)).absolute()


def _loading_options(model: ModelConfig) -> dict[str, Any]:
    return {
        "trust_remote_code": model.trust_remote_code,
        "dtype": model.dtype,
        "external_lib": model.external_lib,
    }


def _joined(pair: Pair) -> Conversation:
    """Both sides as one, for what is said of rows."""
    sides = (pair.chosen, pair.rejected)
    flags = tuple(flag for side in sides for flag in side.train_flags)
    return Conversation(pair.item_id, tuple(message for side in sides for message in side.messages), flags)


def read_dpo_data(config: DPOConfig, chat: ChatTemplate | None) -> TrainingData[PairExample]:
    """Read and check the pairs, and encode them; without ``chat`` they are not encoded."""
    data = config.data
    pairs = read_pairs(data.train_file)
    for name, sides in (("chosen", [p.chosen for p in pairs]), ("rejected", [p.rejected for p in pairs])):
        check_roles(sides, f"data.train_file={data.train_file}, {name}")
    rows = tuple(_joined(pair) for pair in pairs)
    if chat is None:
        return TrainingData("pairs", rows, None)
    examples = encode_pairs(pairs, RowEncoder(chat, max_length=data.max_length, truncation=data.truncation))
    return TrainingData("pairs", rows, tuple(examples), tuple(side.counts for each in examples for side in each.sides))


def run_dpo(config: DPOConfig, *, val_items: Sequence[Item] = ()) -> Path:
    """Read, check and encode the pairs, say what is planned, start the workers, train; the folder of the model."""
    device = resolve_device(config.trainer.device)
    data = read_dpo_data(config, ChatTemplate(load_tokenizer(config.model.absolute())))
    examples = data.examples or ()
    order = order_rows(range(len(examples)), config.data)
    plan = DataPlan.of(config, order, val_items, kind=DPOTrainer.kind)
    print(data.describe(held_out={item.item_id for item in val_items}), flush=True)
    print(plan.describe(config, order, device), flush=True)
    spec = WorkerSpec(
        "verl.workers.dpo_worker:DPOWorker",
        (learner_setup(config, plan), rollout_setup(config), config.algorithm),
        num_threads=resolve_threads(config.trainer),
        device=device,
    )
    return run_training(
        lambda workers, tracker: DPOTrainer(config, plan, order, examples, workers=workers, tracker=tracker),
        spec,
        config,
        plan,
    )
