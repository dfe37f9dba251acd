"""Preference pairs: two trajectories of one item, of which one did better. Their files, and how they are made.

A row is ``{item_id, chosen, rejected}``; each side is a conversation with its ``reward`` (see `conversations`). A list
of messages is read as well, and ``prompt``, messages that both sides begin with.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from agentgym_rl.data.conversations import Conversation, parse_row, read_rows, write_rows
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Message, Role, Trajectory


@dataclass(frozen=True, slots=True)
class Pair:
    """Two conversations about the same item."""

    chosen: Conversation
    rejected: Conversation
    chosen_reward: float | None = None
    rejected_reward: float | None = None

    @property
    def item_id(self) -> str:
        return self.chosen.item_id

    def to_row(self) -> dict[str, Any]:
        """The row's JSON form."""
        sides = {}
        for name, side, reward in (
            ("chosen", self.chosen, self.chosen_reward),
            ("rejected", self.rejected, self.rejected_reward),
        ):
            fields = side.to_row()
            del fields["item_id"]
            sides[name] = {"reward": reward, **fields}
        return {"item_id": self.item_id, **sides}


def read_pairs(path: str | Path) -> list[Pair]:
    """All rows of a ``.json`` or ``.jsonl`` file; raises `ConfigError` naming file, row and field."""
    pairs = [parse_pair(row, where) for row, where in read_rows(Path(path))]
    if not pairs:
        raise ConfigError(f"{path} has no rows")
    return pairs


def write_pairs(path: str | Path, pairs: Iterable[Pair]) -> None:
    """Write a file that `read_pairs` reads back; its folder is made; `ConfigError` for another suffix."""
    write_rows(path, (pair.to_row() for pair in pairs))


def parse_pair(row: Any, where: str) -> Pair:
    """Read one row; ``where`` names it in errors, such as ``pairs.jsonl line 3``."""
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where}: expected an object with chosen and rejected, got {str(row)[:80]!r}")
    (chosen, chosen_reward), (rejected, rejected_reward) = (_side(row, name, where) for name in ("chosen", "rejected"))
    return Pair(chosen, rejected, chosen_reward, rejected_reward)


def _side(row: Mapping[str, Any], name: str, where: str) -> tuple[Conversation, float | None]:
    side = row.get(name)
    fields: dict[str, Any] = dict(side) if isinstance(side, Mapping) else {"conversations": side}
    reward = fields.get("reward")
    if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
        raise ConfigError(f"{where}: field {name}.reward must be a number or null, got {str(reward)[:80]!r}")
    conversation = parse_row({"item_id": row.get("item_id", ""), **fields}, f"{where}: {name}")
    if row.get("prompt") is None:
        return conversation, reward
    prompt = parse_row({"conversations": row["prompt"]}, f"{where}: prompt")
    # Both sides begin with it, so nothing of it can be preferred: none of its answers is trained on.
    flags = (*(False for _ in prompt.messages), *conversation.train_flags)
    return Conversation(conversation.item_id, (*prompt.messages, *conversation.messages), flags), reward


# -------------------------------------------------------------------------------------------------------------- making


@dataclass(frozen=True)
class PairRules:
    """Which two trajectories of an item make a pair."""

    min_gap: float = 0.0
    """The chosen one's score is higher by more than 0, and by at least this."""
    threshold: float | None = None
    """The chosen one has at least this score; None: it is one that the task counts as a success."""
    per_item: int = 1
    """Pairs of one item, at most."""
    seed: int = 0
    """Among pairs that are as good, chance decides."""

    def __post_init__(self) -> None:
        if self.min_gap < 0:
            raise ConfigError(f"min_gap={self.min_gap}: must be at least 0")
        if self.per_item < 1:
            raise ConfigError(f"per_item={self.per_item}: must be at least 1")


@dataclass(frozen=True)
class MadePairs:
    """Pairs, and what came of the items."""

    pairs: tuple[Pair, ...]
    num_items: int
    without: Mapping[str, int]
    """Why items have no pair -> how many of them."""

    def lines(self) -> list[str]:
        """What to tell the user."""
        num_paired = len({pair.item_id for pair in self.pairs})
        told = [f"{len(self.pairs)} pairs of {num_paired} of {self.num_items} items"]
        return told + [f"{count} items without: {reason}" for reason, count in self.without.items()]


def make_pairs(
    trajectories: Iterable[Trajectory], rules: PairRules, *, experts: Iterable[Conversation] = ()
) -> MadePairs:
    """Pairs of trajectories of the same item that begin with the same messages; faults are left out.

    ``experts`` are conversations that are preferred to every trajectory of their item that is not good enough to be
    chosen itself (Song et al. 2024, https://arxiv.org/abs/2403.02502). Of an item's pairs those come first whose sides
    stand in fewest pairs so far, then those with the widest gap. The same input gives the same pairs, in any order.
    """
    by_item: dict[str, list[_Sample]] = {}
    for trajectory in trajectories:
        if not trajectory.masked:
            by_item.setdefault(trajectory.item.item_id, []).append(_Sample.of(trajectory, rules))
    for conversation in experts:
        by_item.setdefault(conversation.item_id, []).append(_Sample.expert(conversation))
    pairs: list[Pair] = []
    without: Counter[str] = Counter()
    for _, samples in sorted(by_item.items()):
        candidates = _candidates(samples, rules)
        if not candidates:
            without[_why_none(samples, rules)] += 1
        pairs += _pick(candidates, rules)
    return MadePairs(tuple(pairs), len(by_item), dict(without))


@dataclass(frozen=True, eq=False)
class _Sample:
    """One side of possible pairs."""

    conversation: Conversation
    score: float
    """Infinite for an expert's."""
    is_good: bool
    """It may be chosen."""
    opening: tuple[Message, ...]
    """The messages before the first turn."""

    @classmethod
    def of(cls, trajectory: Trajectory, rules: PairRules) -> _Sample:
        is_good = trajectory.success if rules.threshold is None else trajectory.score >= rules.threshold
        turns = trajectory.turn_messages
        opening = trajectory.messages[: turns[0]] if turns else trajectory.messages
        return cls(Conversation.of(trajectory), trajectory.score, is_good, opening)

    @classmethod
    def expert(cls, conversation: Conversation) -> _Sample:
        shown = [
            index
            for index, message in enumerate(conversation.messages)
            if message.role == Role.ASSISTANT and conversation.train_flags[index] is not False
        ]
        opening = conversation.messages[: shown[0]] if shown else conversation.messages
        return cls(conversation, math.inf, True, opening)

    @property
    def reward(self) -> float | None:
        return self.score if math.isfinite(self.score) else None


_Candidate = tuple[_Sample, _Sample]


def _candidates(samples: Sequence[_Sample], rules: PairRules) -> list[_Candidate]:
    ordered = sorted(samples, key=lambda sample: (sample.score, str(sample.conversation.messages)))
    return [
        (better, worse)
        for better, worse in product([sample for sample in ordered if sample.is_good], ordered)
        if better.score > worse.score
        and better.score - worse.score >= rules.min_gap
        and not (math.isinf(better.score) and worse.is_good)
        and better.opening == worse.opening
        and better.conversation.messages != worse.conversation.messages
    ]


def _why_none(samples: Sequence[_Sample], rules: PairRules) -> str:
    if len(samples) < 2:
        return "a single sample"
    if not any(sample.is_good for sample in samples):
        return "no sample is good enough to be chosen"
    if all(sample.is_good for sample in samples):
        return "no sample is bad enough to be rejected"
    scores = [sample.score for sample in samples]
    if max(scores) == min(scores) or max(scores) - min(scores) < rules.min_gap:
        return "no two samples differ enough in score"
    return "samples that differ in score begin with different messages"


def _pick(candidates: Sequence[_Candidate], rules: PairRules) -> Iterator[Pair]:
    """The best of them, one after the other; see `make_pairs`."""
    if not candidates:
        return
    left = list(candidates)
    random.Random(f"{rules.seed} {candidates[0][0].conversation.item_id}").shuffle(left)
    uses: Counter[int] = Counter()

    def rank(pair: _Candidate) -> tuple[int, float]:
        better, worse = pair
        return uses[id(better)] + uses[id(worse)], worse.score - better.score

    for _ in range(min(rules.per_item, len(left))):
        better, worse = min(left, key=rank)
        left.remove((better, worse))
        uses.update([id(better), id(worse)])
        yield Pair(better.conversation, worse.conversation, better.reward, worse.reward)
