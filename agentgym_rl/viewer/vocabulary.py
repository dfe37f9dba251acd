"""What token ids spell, from a ``tokenizer.json``, without the libraries that models need."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from agentgym_rl.rollout.token_values import TOKEN_VALUES_FOLDER, TOKENIZER_FILE
from agentgym_rl.viewer.library import natural

_NUM_VOCABULARIES = 4
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_SETTINGS_FILE = "settings.json"
_CHECKPOINTS = "global_step_*/actor/huggingface"


class _Added(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _Settings(msgspec.Struct):
    model_path: str = msgspec.field(name="model.path")


class _Tokenizer(msgspec.Struct):
    model: _Model
    decoder: Any = None
    pre_tokenizer: Any = None
    added_tokens: list[_Added] = []


def find_tokenizer(run_folder: Path, root: Path) -> Path | None:
    """The tokenizer that the run left beside its token values, or else in its newest checkpoint; of an evaluation that
    of its model, where this lies below ``root``."""
    own = run_folder / TOKEN_VALUES_FOLDER / TOKENIZER_FILE
    if own.is_file():
        return own
    checkpoints = run_folder.glob(f"{_CHECKPOINTS}/{TOKENIZER_FILE}")
    newest = max(checkpoints, key=lambda path: natural(str(path)), default=None)
    return _tokenizer_of_model(run_folder / _SETTINGS_FILE, root) if newest is None else newest


def _tokenizer_of_model(settings_file: Path, root: Path) -> Path | None:
    """What an evaluation's settings say, as far as it is no way out of what the viewer was asked to show."""
    try:
        settings = msgspec.json.decode(settings_file.read_bytes(), type=_Settings)
        path = Path(settings.model_path, TOKENIZER_FILE).resolve()
        return path if path.is_relative_to(root) and path.is_file() else None
    except (OSError, ValueError):
        return None


def spell(path: Path, ids: Iterable[int]) -> list[str] | None:
    """The text of each id, alone; bytes that are no whole character are written ``\\xe2``. None for an unreadable file.

    An id that the tokenizer does not know is written ``<12345>``.
    """
    try:
        vocabulary = _load(str(path), path.stat().st_mtime_ns)
    except (OSError, msgspec.DecodeError):
        return None
    return [vocabulary.get(id, f"<{id}>") for id in ids]


@functools.lru_cache(_NUM_VOCABULARIES)
def _load(path: str, changed_at: int) -> Mapping[int, str]:
    tokenizer = msgspec.json.decode(Path(path).read_bytes(), type=_Tokenizer)
    vocab = tokenizer.model.vocab
    pairs = vocab.items() if isinstance(vocab, dict) else ((entry[0], id) for id, entry in enumerate(vocab))
    write = _writer(tokenizer)
    return {id: write(token) for token, id in pairs} | {added.id: added.content for added in tokenizer.added_tokens}


def _writer(tokenizer: _Tokenizer) -> Callable[[str], str]:
    """How a token of the vocabulary reads as text."""
    kinds = _kinds(tokenizer.decoder) | _kinds(tokenizer.pre_tokenizer)
    if "ByteLevel" in kinds:
        return _from_byte_level
    if kinds & {"Metaspace", "ByteFallback"}:
        return _from_metaspace
    return str


def _kinds(part: Any) -> set[str]:
    """The types of a decoder or pre-tokenizer and of what it is made of."""
    if not isinstance(part, dict):
        return set()
    inner = [*(part.get("decoders") or []), *(part.get("pretokenizers") or [])]
    return {str(part.get("type"))}.union(*(_kinds(each) for each in inner))


def _from_byte_level(token: str) -> str:
    """Byte-level BPE writes each byte as one printable character."""
    table = _byte_of()
    if any(character not in table for character in token):
        return token
    return bytes(table[character] for character in token).decode("utf-8", "backslashreplace")


@functools.cache
def _byte_of() -> dict[str, int]:
    """Printable bytes of Latin-1 stand for themselves, the others for the characters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _from_metaspace(token: str) -> str:
    """SentencePiece writes a blank as ``▁`` and a byte without a token of its own as ``<0xE2>``."""
    if (match := _BYTE_TOKEN.fullmatch(token)) is not None:
        byte = int(match[1], 16)
        return chr(byte) if byte < 0x80 else f"\\x{byte:02x}"
    return token.replace("▁", " ")
