"""From conversations to token examples: what supervised and preference training read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.data.checks import TokenCounts, describe_rows, describe_tokens
from agentgym_rl.data.conversations import Conversation, TokenRecord
from agentgym_rl.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Example:
    """One conversation as tokens; two columns of equal length."""

    ids: np.ndarray
    """int32."""
    loss_mask: np.ndarray
    """int8."""

    @property
    def counts(self) -> TokenCounts:
        return TokenCounts(len(self.ids), self.num_trained)

    @property
    def num_trained(self) -> int:
        return int(self.loss_mask.sum())

    def cut(self, length: int) -> Example:
        """The first so many tokens."""
        return Example(self.ids[:length], self.loss_mask[:length])

    def without_loss_before(self, position: int) -> Example:
        """The same, with nothing trained on before ``position``."""
        mask = self.loss_mask.copy()
        mask[:position] = 0
        return replace(self, loss_mask=mask)


ExampleT = TypeVar("ExampleT")


@dataclass(frozen=True, eq=False)
class TrainingData(Generic[ExampleT]):
    """What a run trains on, read and checked."""

    name: str
    """What a row is, of several: ``conversations`` or ``pairs``."""
    conversations: tuple[Conversation, ...]
    """A row as one conversation each."""
    examples: tuple[ExampleT, ...] | None
    """What has something to train on; None where there is no tokenizer to encode it with."""
    counts: tuple[TokenCounts, ...] = ()
    """Of the examples' sequences."""

    def __len__(self) -> int:
        """Rows that are trained on, as far as is known."""
        return len(self.conversations if self.examples is None else self.examples)

    def describe(self, *, held_out: Collection[str]) -> str:
        """A few lines for the user; ``held_out`` are ids of items that are validated on."""
        lines = describe_rows(self.conversations, held_out=held_out)
        tokens = describe_tokens(self.counts) if self.counts else ["how many tokens they have is not known yet"]
        return "\n      ".join([f"data: {len(self)} {self.name}", *lines, *tokens])


class RowEncoder:
    """Turns conversations into examples and counts what it met on the way.

    Where a row holds the tokens of a rollout and they are this tokenizer's, these are taken as they were sampled; else
    its messages are encoded as a rollout that sampled their texts would have recorded them.
    """

    def __init__(self, chat: ChatTemplate, *, max_length: int, truncation: str = "error") -> None:
        """``truncation``: ``error`` or ``right``, what becomes of rows above ``max_length`` tokens."""
        self._chat, self._max_length, self._truncation = chat, max_length, truncation
        self.num_recorded = 0
        self.num_foreign = 0
        """Rows whose tokens are another tokenizer's or template's."""
        self.num_cut = 0

    def encode(self, row: Conversation, where: str) -> Example:
        """The example of a row; it may have nothing to train on. Raises `ConfigError`, in which ``where`` names the
        row: for one that the template refuses, or that is too long."""
        try:
            example = self._recorded(row) or self._encoded(row)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        if len(example.ids) <= self._max_length:
            return example
        if self._truncation == "error":
            raise ConfigError(
                f"{where}: {len(example.ids)} tokens, more than data.max_length={self._max_length}; raise it, or take "
                "data.truncation=right"
            )
        self.num_cut += 1
        return example.cut(self._max_length)

    def lines(self) -> list[str]:
        """What a user should know of the rows that were encoded."""
        lines = []
        if self.num_recorded:
            lines.append(f"{self.num_recorded} rows are trained on with the very tokens that were sampled")
        if self.num_foreign:
            lines.append(
                f"warning: {self.num_foreign} rows hold tokens of another tokenizer or chat template; their texts were "
                "encoded anew"
            )
        if self.num_cut:
            lines.append(f"warning: {self.num_cut} rows were cut to data.max_length={self._max_length} tokens")
        return lines

    def _encoded(self, row: Conversation) -> Example:
        encoded = self._chat.encode_conversation(row.messages, row.train_flags)
        return Example(np.array(encoded.ids, np.int32), np.array(encoded.loss_mask, np.int8))

    def _recorded(self, row: Conversation) -> Example | None:
        if row.record is None:
            return None
        if not self._is_own(row, row.record):
            self.num_foreign += 1
            return None
        self.num_recorded += 1
        # A flag that was set to false after the rollout takes its message out.
        left_out = [index for index, flag in enumerate(row.train_flags) if flag is False]
        mask = np.array(row.record.loss_mask, np.int8)
        mask[np.isin(row.record.sequence_ids, left_out)] = 0
        return Example(np.array(row.record.input_ids, np.int32), mask)

    def _is_own(self, row: Conversation, record: TokenRecord) -> bool:
        """Whether this template frames the message before the first sampled one with the same ids.

        The opening before it may hold more than the messages do, such as the declarations of functions.
        """
        if 1 not in record.loss_mask:
            return False
        first = record.loss_mask.index(1)
        sampled = record.sequence_ids[first]
        frame = self._chat.encode_observation(row.messages[sampled - 1].content, sampled - 1)
        own = [id for id, owner in zip(frame.ids, frame.sequence_ids, strict=True) if owner >= sampled - 1]
        return list(record.input_ids[first - len(own) : first]) == own
