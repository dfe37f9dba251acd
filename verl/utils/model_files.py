"""What a look at the files in a model's folder can find wrong, without torch or transformers.

transformers makes an empty tokenizer of a folder that has none, and tells neither which file of weights is cut off nor
that a token has no row in the embeddings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentgym_rl.errors import ConfigError
from verl.config import ModelConfig
from verl.models.shapes import read_config, read_json_object

_TOKENIZER = "tokenizer.json"
_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
"""What `tokenizer.json` is made from where it is absent."""
PROBE = "Thought: the door is closed, so I open it.\nAction: open door 1"
"""Plain text, of which a tokenizer must make at least one token."""
_LENGTH_BYTES = 8
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def check_policy_files(config: ModelConfig, key: str = "model.path") -> None:
    """`check_weight_files`, and the tokenizer: that it is there, encodes text, and has no token beyond the embeddings.

    Raises `ConfigError`, in which ``key`` is what the user gave the folder by.
    """
    folder, fields = Path(config.path), read_config(config.path) or {}
    check_weight_files(config, key)
    if (folder / _TOKENIZER).is_file():
        _check_tokenizer(folder, fields, f"{key}={config.path!r}")
    elif not config.trust_remote_code and not any((folder / name).is_file() for name in _OTHER_TOKENIZERS):
        raise ConfigError(
            f"{key}={config.path!r}: holds no tokenizer: {_TOKENIZER} is missing, and {', '.join(_OTHER_TOKENIZERS)} "
            "as well; copy it from the model that these weights come from"
        )


def check_weight_files(config: ModelConfig, key: str = "model.path") -> None:
    """Find files of weights that are missing or cut off, by their headers; raises `ConfigError` that names them."""
    folder, where = Path(config.path), f"{key}={config.path!r}"
    for name in _weight_files(folder, where):
        if not (folder / name).is_file():
            raise ConfigError(f"{where}: {name} is missing, which {_INDEX} names")
        _check_safetensors(folder / name, where)


def _weight_files(folder: Path, where: str) -> list[str]:
    if (folder / _SINGLE).is_file():
        return [_SINGLE]
    if not (folder / _INDEX).is_file():
        return []
    weights = read_json_object(folder / _INDEX, f"{where}: {_INDEX}").get("weight_map", {})
    return sorted(set(weights.values()))


def _check_safetensors(file: Path, where: str) -> None:
    """The format: 8 bytes with the header's length, the header in JSON, and all tensors, whose places it tells."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
            raise ConfigError(f"{where}: {file.name} is cut off, or is no safetensors file: it has {size} bytes")
        try:
            header = json.loads(opened.read(length))
            ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ConfigError(f"{where}: {file.name} is no safetensors file: its header cannot be read") from None
    whole = _LENGTH_BYTES + length + max(ends, default=0)
    if size < whole:
        raise ConfigError(f"{where}: {file.name} is cut off: it has {size} bytes of {whole}")


def _check_tokenizer(folder: Path, fields: Mapping[str, Any], where: str) -> None:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / _TOKENIZER))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{where}: {_TOKENIZER} cannot be read: {error}") from error
    check_encodes(tokenizer.encode(PROBE, add_special_tokens=False).ids, where)
    largest = max([*tokenizer.get_vocab(with_added_tokens=True).values(), *_added_ids(folder, where)])
    num_rows = fields.get("vocab_size", (fields.get("text_config") or {}).get("vocab_size"))
    if isinstance(num_rows, int) and largest >= num_rows:
        raise ConfigError(
            f"{where}: config.json has vocab_size={num_rows}, and the tokenizer has ids up to {largest}: "
            "they are not of the same model"
        )


def check_encodes(ids: list[int], where: str) -> None:
    """Raise `ConfigError` unless something came of `PROBE`."""
    if not ids:
        raise ConfigError(f"{where}: its tokenizer encodes {PROBE!r} to no tokens: is its vocabulary empty?")


def _added_ids(folder: Path, where: str) -> list[int]:
    """Of the tokens that ``tokenizer_config.json`` adds."""
    file = folder / "tokenizer_config.json"
    added = read_json_object(file, f"{where}: {file.name}").get("added_tokens_decoder", {}) if file.is_file() else {}
    return [int(number) for number in added]
