"""A language model that says whether two answers mean the same."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import requests

from agentgym_rl.errors import EnvServerError

KEY_VARIABLE = "JUDGE_API_KEY"
_TIMEOUT_S = 60.0
_TRIES = 3
_VERDICT = re.compile(r"\b(yes|no)\b", re.IGNORECASE)

_SAME = """A person was asked: {question}
The right answer is: {reference}
The person answered: {answer}
Does the answer say the same as the right answer, whatever its words? Answer with one word, yes or no."""

_IMPOSSIBLE = """A person was asked to do this: {question}
It cannot be done. The reason is: {reference}
The person reported: {answer}
Does the report say, or clearly mean, that it cannot be done, and does it not contradict that reason? Answer with one \
word, yes or no."""


@dataclass(frozen=True)
class Judge:
    """A model behind an OpenAI-compatible address; the key is read from ``JUDGE_API_KEY``."""

    url: str
    """Up to and including ``/v1``."""
    model: str

    def same_meaning(self, *, question: str, reference: str, answer: str) -> bool:
        """Whether ``answer`` says what ``reference`` says; raises `EnvServerError` when no verdict comes."""
        return self._ask(_SAME.format(question=question, reference=reference, answer=answer))

    def says_impossible(self, *, question: str, reason: str, answer: str) -> bool:
        """Whether ``answer`` says that the task cannot be done, for that reason."""
        return self._ask(_IMPOSSIBLE.format(question=question, reference=reason, answer=answer))

    def _ask(self, prompt: str) -> bool:
        trouble = ""
        for _ in range(_TRIES):
            try:
                text = self._complete(prompt)
            except (requests.RequestException, KeyError, IndexError, TypeError, ValueError) as error:
                trouble = f"{type(error).__name__}: {error}"
                continue
            verdicts = _VERDICT.findall(text)
            if verdicts:
                return bool(verdicts[-1].lower() == "yes")
            trouble = f"neither yes nor no in {text[:200]!r}"
        raise EnvServerError(f"the judge {self.model} at {self.url} gave no verdict in {_TRIES} tries: {trouble}")

    def _complete(self, prompt: str) -> str:
        key = os.environ.get(KEY_VARIABLE, "")
        response = requests.post(
            f"{self.url.rstrip('/')}/chat/completions",
            json={"model": self.model, "messages": [{"role": "user", "content": prompt}], "temperature": 0},
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=_TIMEOUT_S,
        )
        response.raise_for_status()
        return str(response.json()["choices"][0]["message"]["content"])
