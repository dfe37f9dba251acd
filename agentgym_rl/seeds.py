"""Seeds: every random stream is derived from a run's seed and from what it is for."""

from __future__ import annotations

import hashlib

_SEED_BITS = 63


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2^63) that depends on every part and on their order, and on nothing else.

    The same parts give the same seed in every process: sampling seeds made this way are the same with any number of
    workers and after a resume.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _SEED_BITS)
