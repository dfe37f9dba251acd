"""One small tree of errors, by who broke."""

from __future__ import annotations


class AgentGymError(Exception):
    """Base of all errors that this project raises on purpose."""


class ConfigError(AgentGymError, ValueError):
    """The user's input is wrong: names the key or item, the value seen and what is allowed."""


class EnvError(AgentGymError):
    """An environment or its server failed; the message carries task, item, URL and step where known."""


class EnvTimeout(EnvError):
    """No answer in time."""


class EnvUnreachable(EnvError):
    """No connection to the server."""


class EnvServerError(EnvError):
    """The server answered with an error, or the environment reported one of its own."""


class EnvFull(EnvServerError):
    """The server turned a call away for want of room until the time for it was over."""


class EnvProtocolError(EnvError):
    """The server's answer is not of the protocol's form."""


class EngineError(AgentGymError):
    """The inference engine failed."""


class ContextFullError(EngineError):
    """The sequence so far leaves the model no room for another turn: no failure, but an end by length."""


class TooManyFailures(AgentGymError):
    """So many trajectories of a step were faults that training on the rest would mislead; carries the first cause."""


class TrainingDiverged(AgentGymError):
    """Updates are not finite any more: going on would change nothing, or ruin the weights."""
