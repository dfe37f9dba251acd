"""One request to an OpenAI-compatible ``/chat/completions``: what is sent, and what may come back."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import requests

from agentgym_rl.client.addresses import environment_token
from agentgym_rl.client.connection import CONNECT_TIMEOUT_S, retry_after_s, session_for
from agentgym_rl.errors import ConfigError, EngineError
from agentgym_rl.seeds import derive_seed
from agentgym_rl.types import FinishReason, Message, encodable

_PASSING = (408, 409, 425, 429)
_WRONG_INPUT = (401, 402, 403, 404)
_NO_MONEY = ("insufficient_quota", "billing_hard_limit_reached")
# What the servers in use call a conversation that is too long for the model, in a field of its own ...
_CONTEXT_FULL = ("context_length_exceeded", "context_window_exceeded", "exceed_context_size_error")
# ... or in a sentence. Tokens per minute and bytes of a request are limits of other kinds.
_TOO_LONG = (400, 413, 422)
_CONTEXT_WORDS = re.compile(
    r"context ?(length|window|size|limit)|context_length_exceeded|maximum model length|(prompt|input) is too long"
    r"|token count .*exceeds the maximum|`max_new_tokens` must be <=",
    re.IGNORECASE | re.DOTALL,
)
_CUT = ("length", "max_tokens", "model_length", "model_context_window_exceeded")
_ENDED = ("stop", "eos", "eos_token", "end_turn", "stop_sequence", "tool_calls", "function_call")
_BROKEN_OFF = ("error", "abort", "aborted", "cancelled", "insufficient_system_resource")
# As many as every server takes.
_NUM_SEEDS = 2**31
_SHOWN = 300
_LOOK_S = 10.0
# No key is sent to a server that it was not meant for.
_OPENAI = "api.openai.com"
_OPENAI_KEY = "OPENAI_API_KEY"


@dataclass(frozen=True)
class HostedModel:
    """A model and how it is asked."""

    api_base: str
    """The URL that ``/chat/completions`` is under, such as ``https://api.openai.com/v1``."""
    model: str
    key: str | None = field(default=None, repr=False)
    """Sent as a bearer token; None sends none."""
    key_variable: str = ""
    """Where the key came from, or would, for messages."""
    max_tokens: int = 512
    """Of one turn, in the model's own tokens."""
    temperature: float = 1.0
    """0 means greedy, as far as the server has that."""
    top_p: float = 1.0
    sends_seed: bool = False
    """Send a seed of each turn's own; not all servers know the field."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of every request; null leaves one out that would be sent."""
    timeout_s: float = 300.0
    """For one answer as a whole."""

    def __post_init__(self) -> None:
        if not self.api_base.startswith(("http://", "https://")):
            raise ConfigError(f"--api-base {self.api_base!r}: must be a URL such as https://api.openai.com/v1")
        for name, value, least in (("max-tokens", self.max_tokens, 1), ("temperature", self.temperature, 0)):
            if not value >= least:
                raise ConfigError(f"--{name} {value!r}: must be at least {least}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p {self.top_p!r}: must be in (0, 1]")
        if self.timeout_s <= 0:
            raise ConfigError(f"--request-timeout {self.timeout_s!r}: must be above 0 seconds")

    @property
    def url(self) -> str:
        return f"{self.api_base.rstrip('/')}/chat/completions"

    def request(self, messages: Sequence[Message], seed: int | None) -> dict[str, Any]:
        """The body of a request for the next message."""
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": str(message.role), "content": message.content} for message in messages],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": _sent_seed(seed) if self.sends_seed and seed is not None else None,
            **self.body,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def ask(self, messages: Sequence[Message]) -> Answer:
        """The next message, by one request on a connection of its own; raises `EngineError` where there is none."""
        with contextlib.closing(Endpoint(self)) as endpoint:
            try:
                outcome = endpoint.ask(self.request(messages, None))
            except ConfigError as error:
                raise EngineError(str(error)) from error
        if isinstance(outcome, Refusal):
            raise EngineError(outcome.message)
        return outcome


def find_key(api_base: str, variable: str | None = None) -> tuple[str | None, str]:
    """The key of the environment variable that was named, at OpenAI ``OPENAI_API_KEY``, else none; and its variable.

    Raises `ConfigError` for a variable that is not set.
    """
    variable = variable or (_OPENAI_KEY if urlsplit(api_base).hostname == _OPENAI else None)
    if variable is None:
        return None, ""
    key = environment_token(variable)
    if key is None:
        raise ConfigError(f"{variable}: this environment variable holds the model's key, and is not set")
    return key, variable


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model wrote, and what it cost."""

    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt's."""
    completion_tokens: int
    """What the model thought unseen included, where the server counts it."""
    model: str
    """As the server calls it, usually with its date."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """No answer."""

    message: str
    may_pass: bool
    """True when the same request may be answered later."""
    is_context_full: bool = False
    """True when the conversation leaves the model no room for an answer."""
    wait_s: float | None = None
    """What the server asks to wait before anything is sent again."""


class Endpoint:
    """Sends requests, from any number of threads."""

    def __init__(self, model: HostedModel) -> None:
        self.model = model
        self._own = threading.local()
        self._sessions: list[requests.Session] = []
        self._lock = threading.Lock()

    def ask(self, body: Mapping[str, Any]) -> Answer | Refusal:
        """Send one request, once. Raises `ConfigError` when no request can be answered: a wrong key, model or URL."""
        what = f"{self.model.model} at {self.model.url}"
        began = time.monotonic()
        try:
            response = self._session().post(
                self.model.url,
                data=json.dumps(body).encode(),
                headers={"Content-Type": "application/json"},
                timeout=(min(CONNECT_TIMEOUT_S, self.model.timeout_s), self.model.timeout_s),
                allow_redirects=False,
            )
        except requests.RequestException as error:
            after = f"after {time.monotonic() - began:.1f} s: {type(error).__name__}: {error}"
            return Refusal(f"{what}: no answer {after}", may_pass=True)
        if response.status_code != 200:
            return self._refusal(what, response)
        try:
            return _read(json.loads(response.content))
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
            return Refusal(f"{what}: HTTP 200 without an answer ({problem}): {_shown(response)}", may_pass=True)

    def check_reachable(self) -> None:
        """Raise `ConfigError` when no server is there; one that does not know this path is."""
        base = self.model.api_base.rstrip("/")
        try:
            self._session().get(f"{base}/models", timeout=(CONNECT_TIMEOUT_S, _LOOK_S), allow_redirects=False)
        except requests.Timeout as error:
            if isinstance(error, requests.ConnectTimeout):
                raise ConfigError(f"--api-base {base}: no connection within {CONNECT_TIMEOUT_S:g} s") from error
        except requests.RequestException as error:
            raise ConfigError(f"--api-base {base}: no server answers there: {error}") from error

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            for session in self._sessions:
                session.close()

    def _session(self) -> requests.Session:
        if not hasattr(self._own, "session"):
            self._own.session = session_for(self.model.api_base, self.model.key)
            with self._lock:
                self._sessions.append(self._own.session)
        session: requests.Session = self._own.session
        return session

    def _refusal(self, what: str, response: requests.Response) -> Refusal:
        status = response.status_code
        message = f"{what}: HTTP {status}: {_shown(response)}"
        if _says_context_is_full(response):
            return Refusal(message, may_pass=False, is_context_full=True)
        if status in _WRONG_INPUT or any(code in response.text for code in _NO_MONEY):
            raise ConfigError(f"{message} ({self._about_the_key()})")
        return Refusal(message, may_pass=status in _PASSING or status >= 500, wait_s=retry_after_s(response))

    def _about_the_key(self) -> str:
        if self.model.key is not None:
            return f"the key is taken from {self.model.key_variable}"
        if self.model.key_variable:
            return f"no key was sent: {self.model.key_variable} is not set"
        return "no key was sent; --api-key-env names the variable that holds it"


def _sent_seed(seed: int) -> int:
    """Of all bits of a turn's seed: the lowest alone tell turns apart, and hardly items."""
    return derive_seed("hosted model", seed) % _NUM_SEEDS


def _says_context_is_full(response: requests.Response) -> bool:
    """Whether a refusal is for the conversation's length: by its code, and where it has none by its words."""
    error = _error_in(response)
    if any(error.get(name) in _CONTEXT_FULL for name in ("code", "type")):
        return True
    words = [*(error.get(name) for name in ("error", "message", "detail")), str(error.get("metadata"))]
    text = "\n".join(word for word in words if isinstance(word, str))
    return response.status_code in _TOO_LONG and _CONTEXT_WORDS.search(text) is not None


def _error_in(response: requests.Response) -> dict[str, Any]:
    """The object that tells what is wrong; of another form of body, one with its text as the message."""
    try:
        content = json.loads(response.content)
    except (RecursionError, ValueError):
        content = response.text
    if not isinstance(content, dict):
        return {"message": str(content)}
    error = content.get("error")
    return error if isinstance(error, dict) else content


def _read(content: Any) -> Answer:
    """The answer in a body; raises for one of another form, and for one that the model did not end itself."""
    choice, usage = content["choices"][0], content.get("usage") or {}
    if error := choice.get("error") or content.get("error"):
        raise ValueError(f"it holds an error: {error!s:.{_SHOWN}}")
    text = choice["message"].get("content") or ""
    if isinstance(text, list):
        text = "".join(part.get("text", "") for part in text)
    if not isinstance(text, str):
        raise TypeError(f"content is {type(text).__name__}, must be a string")
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        text=encodable(text),
        finish_reason=_read_end(choice.get("finish_reason"), text),
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        cached_tokens=int(details.get("cached_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens") or 0),
        model=encodable(str(content.get("model", ""))),
    )


def _read_end(reason: Any, text: str) -> FinishReason:
    """Why the model wrote no more; raises `ValueError` where the server ended it, or kept all the text back."""
    if reason is None or reason in _ENDED:
        return FinishReason.STOP
    if reason in _CUT:
        return FinishReason.LENGTH
    if reason in _BROKEN_OFF or not isinstance(reason, str) or not text:
        raise ValueError(f"finish_reason is {reason!r}, with {len(text)} characters of text")
    return FinishReason.STOP


def _shown(response: requests.Response) -> str:
    text = " ".join(response.text.split())
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
