"""Supervised training on conversations, with exactly the token ids that a rollout of them would have."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.data.conversations import Conversation, read_conversations
from agentgym_rl.errors import ConfigError
from verl.config import SFTConfig
from verl.models.loading import load_tokenizer
from verl.protocol import DataProto
from verl.single_controller.base import WorkerGroup, WorkerSpec
from verl.single_controller.start import start_workers
from verl.trainer.item_order import ItemOrder
from verl.trainer.mini_batches import share_mini_batch
from verl.trainer.plan import describe_machine, resolve_threads
from verl.utils.checkpoint import HUGGINGFACE_FOLDER
from verl.utils.devices import resolve_device
from verl.utils.tracking import Tracker, make_tracker
from verl.workers.sft_worker import SFTSetup

CONSOLE_COLUMNS = {
    "loss": "train/loss",
    "grad": "train/grad_norm",
    "lr": "train/lr",
    "tokens/s": "perf/tokens_per_s",
}


@dataclass(frozen=True)
class Example:
    """One conversation as tokens; two columns of equal length."""

    ids: tuple[int, ...]
    loss_mask: tuple[int, ...]


def encode(rows: Sequence[Conversation], chat: ChatTemplate, *, max_length: int) -> list[Example]:
    """The rows that have something to train on; the others are counted aloud.

    Raises `ConfigError` for a row longer than ``max_length`` tokens, and when no row is left.
    """
    examples, num_empty = [], 0
    for number, row in enumerate(rows, start=1):
        try:
            encoded = chat.encode_conversation(row.messages, row.train_flags)
        except ConfigError as error:
            raise ConfigError(f"data.train_file row {number} ({row.item_id}): {error}") from error
        if len(encoded.ids) > max_length:
            raise ConfigError(
                f"data.train_file row {number} ({row.item_id}): {len(encoded.ids)} tokens, "
                f"more than data.max_length={max_length}"
            )
        if any(encoded.loss_mask):
            examples.append(Example(encoded.ids, encoded.loss_mask))
        else:
            num_empty += 1
    if not examples:
        raise ConfigError(f"data.train_file: none of its {len(rows)} rows has a token to train on")
    if num_empty:
        print(f"warning: {num_empty} of {len(rows)} rows have no token to train on and are left out", flush=True)
    return examples


class SFTTrainer:
    """Trains a model on examples with the workers it is given."""

    def __init__(
        self, config: SFTConfig, order: ItemOrder[Example], *, steps: int, workers: WorkerGroup, tracker: Tracker
    ) -> None:
        """``workers`` are `SFTWorker`s."""
        self._config, self._order, self._steps = config, order, steps
        self._workers, self._tracker = workers, tracker

    def fit(self) -> int:
        """Train until the last step, or until ``trainer.max_time_s`` is over; the number of steps made."""
        began, limit_s = time.monotonic(), self._config.trainer.max_time_s
        for step in tqdm(range(1, self._steps + 1), desc="sft", unit=" steps", leave=False, disable=None):
            self._tracker.log(step, self.train_step(step))
            if limit_s is not None and time.monotonic() - began >= limit_s:
                return step
        return self._steps

    def train_step(self, step: int) -> dict[str, float]:
        """One optimizer step on batch ``step``, counted from 1; returns its metrics."""
        began = time.perf_counter()
        examples = self._order.batch(step)
        batch = DataProto.from_sequences([e.ids for e in examples], [e.loss_mask for e in examples])
        shared = share_mini_batch(batch, self._workers.world_size)
        metrics: dict[str, float] = self._workers.call_each(
            "update", [(share, shared.totals) for share in shared.shares]
        )[0]
        step_s = time.perf_counter() - began
        return metrics | {
            "train/epoch": float(self._order.epoch_of(step)),
            "timing_s/step": step_s,
            "perf/tokens_per_s": batch.num_tokens / step_s,
        }

    def export(self, folder: Path) -> None:
        """Write the model to ``folder``: aside first, so that a killed run leaves no half of it there."""
        aside = folder.with_name(folder.name + ".unfinished")
        shutil.rmtree(aside, ignore_errors=True)
        self._workers.call_all("export", aside)
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)


def run_sft(config: SFTConfig) -> None:
    """Read and encode the data, say what is planned, start the workers, train, export."""
    device, folder = resolve_device(config.trainer.device), Path(config.trainer.default_local_dir).resolve()
    model = config.model.absolute()
    rows = read_conversations(config.data.train_file)
    examples = encode(rows, ChatTemplate(load_tokenizer(model)), max_length=config.data.max_length)
    order = ItemOrder(examples, batch_size=config.data.train_batch_size, seed=config.data.seed)
    steps = config.trainer.total_training_steps or config.trainer.total_epochs * order.batches_per_epoch
    print(_describe(config, examples, order, steps, device), flush=True)
    setup = SFTSetup(
        model=model,
        optim=config.optim,
        max_token_len=config.trainer.max_token_len_per_gpu,
        grad_clip=config.trainer.grad_clip,
        total_updates=steps,
        seed=config.trainer.seed,
    )
    spec = WorkerSpec(
        "verl.workers.sft_worker:SFTWorker", (setup,), num_threads=resolve_threads(config.trainer), device=device
    )
    tracker = make_tracker(
        config.trainer,
        folder,
        config=dataclasses.asdict(config),
        console_columns=CONSOLE_COLUMNS,
        console_every=config.trainer.log_freq,
    )
    with tracker, start_workers(spec, config.trainer, config.ray_init) as workers:
        trainer = SFTTrainer(config, order, steps=steps, workers=workers, tracker=tracker)
        steps_made = trainer.fit()
        trainer.export(folder / HUGGINGFACE_FOLDER)
    print(f"trained {steps_made} of {steps} steps; the model is in {folder / HUGGINGFACE_FOLDER}", flush=True)


def _describe(
    config: SFTConfig, examples: Sequence[Example], order: ItemOrder[Example], steps: int, device: str
) -> str:
    num_tokens = sum(len(example.ids) for example in examples)
    num_trained = sum(sum(example.loss_mask) for example in examples)
    limit = "" if config.trainer.max_time_s is None else f", at most {config.trainer.max_time_s:g} s"
    return (
        f"plan: {len(examples)} conversations with {num_tokens} tokens, {num_trained} of them trained on\n"
        f"      {steps} steps of {config.data.train_batch_size}, {order.batches_per_epoch} an epoch{limit}\n"
        f"      {describe_machine(config.trainer, device)}"
    )
