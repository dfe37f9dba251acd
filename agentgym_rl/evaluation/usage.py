"""What a hosted model's answers cost: a line for each in ``usage.jsonl``, faults and repeated samples included."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from agentgym_rl.errors import ConfigError

if TYPE_CHECKING:
    from agentgym_rl.hosted.endpoint import Answer


@dataclass(frozen=True, slots=True)
class Prices:
    """In any currency, per million tokens."""

    prompt: float
    completion: float
    cached: float | None = None
    """Of a prompt's tokens that the server had in its cache; None: as ``prompt``."""


@dataclass(frozen=True, slots=True)
class Usage:
    """All answers of an evaluation, those of earlier runs included."""

    answers: int
    tries: int
    """Requests; more than answers where some were repeated."""
    prompt_tokens: int
    cached_tokens: int
    """Of the prompts'."""
    completion_tokens: int
    models: tuple[str, ...]
    """As the server called them."""

    def __str__(self) -> str:
        return (
            f"{self.answers} answers of {', '.join(self.models)} in {self.tries} requests: {self.prompt_tokens} prompt "
            f"tokens ({self.cached_tokens} of them cached), {self.completion_tokens} completion tokens"
        )

    def cost(self, prices: Prices) -> float:
        """In the prices' currency."""
        cached = prices.prompt if prices.cached is None else prices.cached
        prompts = (self.prompt_tokens - self.cached_tokens) * prices.prompt + self.cached_tokens * cached
        return (prompts + self.completion_tokens * prices.completion) / 1e6


class UsageLog:
    """Appends a line per answer; a context manager."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
        self._file = path.open("a", encoding="utf-8")
        if is_torn:  # by a process that died while it wrote
            self._file.write("\n")

    def write(self, trajectory_id: str, answer: Answer, *, tries: int, seconds: float) -> None:
        row = {
            "trajectory": trajectory_id,
            "prompt_tokens": answer.prompt_tokens,
            "cached_tokens": answer.cached_tokens,
            "completion_tokens": answer.completion_tokens,
            "tries": tries,
            "seconds": round(seconds, 3),
            "model": answer.model,
        }
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()


def read_usage(path: Path) -> Usage:
    """The sum over a file's lines; torn ones are left out. Raises `ConfigError` for a line of another form."""
    rows = list(_rows(path))
    try:
        return Usage(
            answers=len(rows),
            tries=sum(row["tries"] for row in rows),
            prompt_tokens=sum(row["prompt_tokens"] for row in rows),
            cached_tokens=sum(row["cached_tokens"] for row in rows),
            completion_tokens=sum(row["completion_tokens"] for row in rows),
            models=tuple(sorted({row["model"] for row in rows})),
        )
    except (LookupError, TypeError) as error:
        raise ConfigError(f"{path}: a line is no answer's usage: {type(error).__name__}: {error}") from None


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue
