"""Served models that may play: OpenAI-compatible addresses, such as vLLM's."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import requests

from agentgym_rl.errors import EngineError
from agentgym_rl.types import Message

KEY_VARIABLE = "OPENAI_API_KEY"
_SHOWN = 300


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model behind an address; the key is read from ``OPENAI_API_KEY``."""

    name: str
    """What it is called here and there."""
    url: str
    """Up to and including ``/v1``."""
    max_tokens: int = 512
    """Of one turn."""
    timeout_s: float = 120.0

    def answer(self, messages: Sequence[Message], temperature: float) -> tuple[str, float]:
        """The next assistant turn, and the seconds that it took; raises `EngineError` that names model and address."""
        key = os.environ.get(KEY_VARIABLE, "")
        body = {
            "model": self.name,
            "messages": [{"role": str(message.role), "content": message.content} for message in messages],
            "temperature": temperature,
            "max_tokens": self.max_tokens,
        }
        start = time.monotonic()
        try:
            response = requests.post(
                f"{self.url.rstrip('/')}/chat/completions",
                json=body,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=self.timeout_s,
            )
        except requests.RequestException as error:
            raise self._failure(f"{type(error).__name__}: {error}") from error
        return self._text_in(response), time.monotonic() - start

    def _text_in(self, response: requests.Response) -> str:
        if response.status_code != 200:
            raise self._failure(f"HTTP {response.status_code}: {response.text[:_SHOWN]}")
        try:
            text = response.json()["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._failure(f"no choices[0].message.content in {response.text[:_SHOWN]!r}") from error
        if not isinstance(text, str):
            raise self._failure(f"its answer is {text!r}, no text")
        return text

    def _failure(self, problem: str) -> EngineError:
        return EngineError(f"model {self.name!r} at {self.url}: {problem}")
