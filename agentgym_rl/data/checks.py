"""What a look at conversations can find wrong before a model is trained on them.

What cannot be trained on is an error that names the rows; what is merely suspicious comes back as lines for the user.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from agentgym_rl.data.conversations import Conversation
from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Role

_MOST_SHOWN = 3
_BAR_WIDTH = 30


def check_roles(rows: Sequence[Conversation], where: str) -> None:
    """Raise `ConfigError` for rows that no rollout could have: ``where`` names the file.

    A row needs an assistant message, and from the first one that is trained on, user and assistant take turns.
    """
    broken = [f"row {number} ({row.item_id}): {fault}" for number, row in enumerate(rows, 1) if (fault := _fault(row))]
    if broken:
        more = f"; and {len(broken) - _MOST_SHOWN} rows more" if len(broken) > _MOST_SHOWN else ""
        raise ConfigError(f"{where}: {'; '.join(broken[:_MOST_SHOWN])}{more}")


def _fault(row: Conversation) -> str:
    """What is wrong with a row's roles; empty when nothing is."""
    roles = [message.role for message in row.messages]
    if Role.ASSISTANT not in roles:
        return "has no assistant message"
    start = _first_trained(row)
    for index in range(max(start, 1), len(roles)):
        is_answer, follows_answer = (role == Role.ASSISTANT for role in (roles[index], roles[index - 1]))
        if is_answer == follows_answer or roles[index] == Role.SYSTEM:
            allowed = "a user's" if follows_answer else "the assistant's"
            return f"message {index} is the {roles[index]}'s and follows the {roles[index - 1]}'s: must be {allowed}"
    if start == 0:
        return "begins with an assistant message that is trained on: nothing precedes it"
    return ""


def _first_trained(row: Conversation) -> int:
    """Index of the first assistant message that is trained on, else of the last assistant message."""
    answers = [index for index, message in enumerate(row.messages) if message.role == Role.ASSISTANT]
    return next((index for index in answers if row.train_flags[index] is not False), answers[-1])


def describe_rows(rows: Sequence[Conversation], *, held_out: Collection[str] = ()) -> list[str]:
    """Lines about the rows: ids that come twice, equal rows, ids that stand in ``held_out``, empty messages."""
    lines = []
    per_item = Counter(row.item_id for row in rows if row.item_id)
    repeated = {item: count for item, count in per_item.items() if count > 1}
    if repeated:
        lines.append(
            f"{len(repeated)} of {len(per_item)} item ids have several rows, up to {max(repeated.values())}: "
            f"{_shown(sorted(repeated))}"
        )
    texts = Counter((row.messages, row.train_flags) for row in rows)
    num_equal = sum(count - 1 for count in texts.values())
    if num_equal:
        lines.append(f"warning: {num_equal} rows equal an earlier row, word for word")
    shared = sorted(set(per_item) & set(held_out))
    if shared:
        lines.append(f"warning: {len(shared)} item ids are trained on and held out: {_shown(shared)}")
    return lines + _describe_empty(rows)


def _describe_empty(rows: Sequence[Conversation]) -> list[str]:
    trained: list[str] = []
    others: list[str] = []
    for number, row in enumerate(rows, 1):
        for message, flag in zip(row.messages, row.train_flags, strict=True):
            if not message.content.strip():
                (trained if message.role == Role.ASSISTANT and flag is not False else others).append(f"row {number}")
    lines = []
    if trained:
        lines.append(f"warning: {len(trained)} empty answers are trained on: {_shown(trained)}")
    if others:
        lines.append(f"warning: {len(others)} other messages are empty: {_shown(others)}")
    return lines


def _shown(names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(names[:_MOST_SHOWN]) + (", ..." if len(names) > _MOST_SHOWN else "")


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of a row, and how many of them are trained on."""

    length: int
    trained: int


def describe_tokens(counts: Sequence[TokenCounts]) -> list[str]:
    """Lines about the tokens: share with loss, and a histogram of lengths by powers of two."""
    lengths = sorted(count.length for count in counts)
    total, trained = sum(lengths), sum(count.trained for count in counts)
    lines = [
        f"{total} tokens, {trained} of them ({trained / max(total, 1):.1%}) with loss; "
        f"lengths from {lengths[0]} to {lengths[-1]}, median {lengths[len(lengths) // 2]}"
    ]
    bins = Counter(max(length - 1, 0).bit_length() for length in lengths)
    most = max(bins.values())
    for exponent in range(min(bins), max(bins) + 1):
        bar = "#" * -(-bins[exponent] * _BAR_WIDTH // most)
        lines.append(f"{f'to {2**exponent}':>10} tokens {bins[exponent]:>7} {bar}".rstrip())
    return lines
