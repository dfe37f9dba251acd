"""Supervised training on conversations, with exactly the token ids that a rollout of them would have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.data.checks import check_roles
from agentgym_rl.data.conversations import Conversation, read_conversations
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Item
from verl.config import SFTConfig
from verl.models.loading import load_tokenizer
from verl.protocol import DataProto
from verl.single_controller.base import WorkerSpec
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
from verl.trainer.mini_batches import share_mini_batch
from verl.trainer.plan import resolve_threads
from verl.utils.devices import resolve_device


def encode(rows: Sequence[Conversation], encoder: RowEncoder) -> list[Example]:
    """The rows that have something to train on; the others are counted aloud, as is what ``encoder`` has to say.

    Raises `ConfigError` as the encoder does, and when no row is left.
    """
    examples = [
        encoder.encode(row, f"data.train_file row {number} ({row.item_id})") for number, row in enumerate(rows, 1)
    ]
    kept = [example for example in examples if example.num_trained]
    if not kept:
        raise ConfigError(f"data.train_file: none of its {len(rows)} rows has a token to train on")
    for line in encoder.lines():
        print(line, flush=True)
    if len(kept) < len(rows):
        num_empty = len(rows) - len(kept)
        print(f"warning: {num_empty} of {len(rows)} rows have no token to train on and are left out", flush=True)
    return kept


class SFTTrainer(DataTrainer[Example]):
    """Trains a model on examples with `SFTWorker`s."""

    kind = "sft"

    def make_update(self, rows: Sequence[Example]) -> Update:
        batch = DataProto.from_sequences([row.ids for row in rows], [row.loss_mask for row in rows])
        shared = share_mini_batch(batch, self._workers.world_size)
        return Update(tuple((share, shared.totals) for share in shared.shares), batch.num_tokens)


def read_sft_data(config: SFTConfig, chat: ChatTemplate | None) -> TrainingData[Example]:
    """Read and check the rows, and encode them; without ``chat`` they are not encoded."""
    rows = read_conversations(config.data.train_file)
    check_roles(rows, f"data.train_file={config.data.train_file}")
    if chat is None:
        return TrainingData("conversations", tuple(rows), None)
    encoder = RowEncoder(chat, max_length=config.data.max_length, truncation=config.data.truncation)
    examples = encode(rows, encoder)
    counts = tuple(example.counts for example in examples)
    return TrainingData("conversations", tuple(rows), tuple(examples), counts)


def run_sft(config: SFTConfig, *, val_items: Sequence[Item] = ()) -> Path:
    """Read, check and encode the data, say what is planned, start the workers, train; the folder of the model."""
    device = resolve_device(config.trainer.device)
    data = read_sft_data(config, ChatTemplate(load_tokenizer(config.model.absolute())))
    order = order_rows(data.examples or (), config.data)
    plan = DataPlan.of(config, order, val_items, kind=SFTTrainer.kind)
    print(data.describe(held_out={item.item_id for item in val_items}), flush=True)
    print(plan.describe(config, order, device), flush=True)
    spec = WorkerSpec(
        "verl.workers.sft_worker:SFTWorker",
        (learner_setup(config, plan), rollout_setup(config)),
        num_threads=resolve_threads(config.trainer),
        device=device,
    )
    return run_training(
        lambda workers, tracker: SFTTrainer(config, plan, order, workers=workers, tracker=tracker), spec, config, plan
    )
