"""A language model that says whether two answers mean the same."""

from __future__ import annotations

import re

from agentgym_rl.agent.actions import end_of_thinking
from agentgym_rl.client.addresses import environment_token
from agentgym_rl.errors import EngineError, EnvServerError
from agentgym_rl.hosted.endpoint import HostedModel
from agentgym_rl.types import Message, Role

KEY_VARIABLE = "JUDGE_API_KEY"
_TIMEOUT_S = 60.0
_TRIES = 3
_VERDICT = re.compile(
    r"(?<![^\W_])(yes|no(?![ \t]+(?!(?:because|since|as|it|the|this|that|they)\b)[a-z]))(?![^\W_])", re.IGNORECASE
)
"""Yes or no as a word of its own, in markup or not. In "no contradiction" the no belongs to the next word."""

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
            verdict = _verdict(text)
            if verdict is not None:
                return verdict
            trouble = f"neither a plain yes nor a plain no in {text[:200]!r}"
        raise EnvServerError(
            f"the judge {self._model.model} at {self._model.api_base} gave no verdict in {_TRIES} tries: {trouble}"
        )


def _verdict(text: str) -> bool | None:
    """The yes or no that an answer begins with, or else all that it says; None when there is none, or they differ."""
    answer = text[end_of_thinking(text) :]
    verdicts = list(_VERDICT.finditer(answer))
    if not verdicts or "<think>" in answer:  # it was cut off while it thought
        return None
    said = [verdict[1].lower() == "yes" for verdict in verdicts]
    is_first_word = not re.search(r"[^\W_]", answer[: verdicts[0].start()])
    return said[0] if is_first_word or len(set(said)) == 1 else None
