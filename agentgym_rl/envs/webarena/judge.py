"""A language model that says whether two answers mean the same."""

from __future__ import annotations

import re

from agentgym_rl.client.connection import environment_token
from agentgym_rl.errors import EngineError, EnvServerError
from agentgym_rl.hosted.endpoint import HostedModel
from agentgym_rl.types import Message, Role

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


class Judge:
    """A model behind an OpenAI-compatible address."""

    def __init__(self, url: str, model: str) -> None:
        """``url``: up to and including ``/v1``. The key is read from ``JUDGE_API_KEY``."""
        self._model = HostedModel(
            url,
            model,
            environment_token(KEY_VARIABLE),
            KEY_VARIABLE,
            temperature=0.0,
            body={"max_tokens": None, "top_p": None},  # as the server has them: it may think before its word
            timeout_s=_TIMEOUT_S,
        )

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
                text = self._model.ask([Message(Role.USER, prompt)]).text
            except EngineError as error:
                trouble = str(error)
                continue
            verdicts = _VERDICT.findall(text)
            if verdicts:
                return bool(verdicts[-1].lower() == "yes")
            trouble = f"neither yes nor no in {text[:200]!r}"
        raise EnvServerError(
            f"the judge {self._model.model} at {self._model.api_base} gave no verdict in {_TRIES} tries: {trouble}"
        )
