"""A tokenizer of characters, for models whose own tokens nobody sees.

The collector records token ids. A hosted model takes and gives messages, so here a token is a character (its Unicode
code point) and each role's beginning and a message's end have ids beyond all of Unicode. The chat template made of it
turns a record into messages and back without loss, by the same code that serves every other model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.types import Message, Role

_BEYOND_UNICODE = 0x110000
END_ID = _BEYOND_UNICODE
"""Ends a message."""
_ROLE_IDS = {role: _BEYOND_UNICODE + 1 + number for number, role in enumerate(Role)}
_ROLES = {id: role for role, id in _ROLE_IDS.items()}


@dataclass(frozen=True)
class _Mark:
    """A control token, as a tokenizer describes one."""

    content: str
    special: bool = True

    def __str__(self) -> str:
        return self.content


_MARKS = {END_ID: _Mark("<|end|>"), **{id: _Mark(f"<|{role}|>") for role, id in _ROLE_IDS.items()}}


class CharacterTokenizer:
    """The part of a Hugging Face tokenizer that a chat template needs; contents never become control tokens."""

    eos_token_id: int | None
    unk_token_id: int | None

    def __init__(self) -> None:
        self.eos_token_id, self.unk_token_id = END_ID, None

    @property
    def all_special_ids(self) -> list[int]:
        return list(_MARKS)

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        return dict(_MARKS)

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, **options: Any
    ) -> str:
        messages = [f"<|{message['role']}|>{message['content']}<|end|>" for message in conversation]
        return "".join(messages) + ("<|assistant|>" if add_generation_prompt else "")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(map(ord, text))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(id) for id in token_ids if id < _BEYOND_UNICODE)


def character_chat() -> ChatTemplate:
    """The chat template of a hosted model."""
    return ChatTemplate(CharacterTokenizer())


def messages_of(ids: Sequence[int]) -> list[Message]:
    """The messages that a record holds; the empty one that the model is to write is left out."""
    messages: list[Message] = []
    role: Role | None = None
    text: list[str] = []
    for id in ids:
        if id in _ROLES:
            role, text = _ROLES[id], []
        elif id == END_ID and role is not None:
            messages.append(Message(role, "".join(text)))
        else:
            text.append(chr(id))
    return messages
