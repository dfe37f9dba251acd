"""Writes the quickstart's warm-up data: demonstrations of the training goals, and the same under exchanged item names.

    python examples/quickstart/make_demonstrations.py --train-file items.json --out demonstrations.jsonl

A small model would learn by heart which goal takes which recipe, and fail on every other goal. Where each copy gives
the items names of its own, all that helps is to look the recipe up in the list of commands, as for a goal never seen.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from agentgym_rl.data.conversations import Conversation, write_conversations
from agentgym_rl.data.demonstrations import demonstrate
from agentgym_rl.data.items import load_items
from agentgym_rl.envs.registry import get_spec
from agentgym_rl.envs.textcraft.environment import recipe_book
from agentgym_rl.types import Message

OPENING_MESSAGES = 2
"""Instruction and acknowledgement: they name no items."""
INVENTED_SHARE = 0.05
"""Share of made-up words in new names, so that the model also meets words that the tokenizer cuts into pieces."""


class Renamer:
    """Gives the items of a conversation other names, built from the words of the training goals' items."""

    def __init__(self, conversations: Sequence[Conversation], dice: random.Random) -> None:
        book = recipe_book()
        self._items = frozenset({*book.by_item, *book.by_tag, *book.uses, *book.raw_items})
        # Longest first, so that "dark oak log" is not taken for "oak log".
        names = "|".join(map(re.escape, sorted(self._items, key=len, reverse=True)))
        self._pattern = re.compile(rf"\bminecraft:(\w+)|\b({names})\b")
        self._words = sorted({word for row in conversations for name in self._names_in(row) for word in name.split()})
        self._dice = dice

    def rename(self, conversation: Conversation) -> Conversation:
        """The same episode in a world where every item is called otherwise."""
        names: dict[str, str] = {}

        def other_name(match: re.Match[str]) -> str:
            item = match[2] or match[1].replace("_", " ")
            if item not in names:
                names[item] = self._fresh_name(names.values())
            return names[item] if match[2] else "minecraft:" + names[item].replace(" ", "_")

        opening, episode = conversation.messages[:OPENING_MESSAGES], conversation.messages[OPENING_MESSAGES:]
        renamed = (Message(m.role, self._pattern.sub(other_name, m.content)) for m in episode)
        return Conversation(conversation.item_id, (*opening, *renamed), conversation.train_flags)

    def _names_in(self, conversation: Conversation) -> Iterator[str]:
        for message in conversation.messages[OPENING_MESSAGES:]:
            yield from (match[2] for match in self._pattern.finditer(message.content) if match[2])

    def _fresh_name(self, taken: Collection[str]) -> str:
        """A name of one to three words that neither a real item nor one of ``taken`` has."""
        while True:
            name = " ".join(self._word() for _ in range(self._dice.choice((1, 2, 2, 2, 3))))
            if name not in self._items and name not in taken:
                return name

    def _word(self) -> str:
        word = self._dice.choice(self._words)
        if self._dice.random() >= INVENTED_SHARE:
            return word
        other = self._dice.choice(self._words)
        return word[: self._dice.randint(1, len(word))] + other[self._dice.randrange(len(other)) :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train-file", type=Path, required=True, help="item list of the training goals")
    parser.add_argument("--out", type=Path, required=True, help="conversations to write")
    parser.add_argument("--renamed", type=int, default=11, help="further copies of each under other names")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    items = load_items(options.train_file, "textcraft")
    real = demonstrate(items, get_spec("textcraft"), "act")
    renamer = Renamer(real, random.Random(options.seed))
    renamed = [renamer.rename(row) for _ in range(options.renamed) for row in real]
    write_conversations(options.out, [*real, *renamed])
    print(f"demonstrations: {len(real)} as they are and {len(renamed)} with other item names")


if __name__ == "__main__":
    main()
