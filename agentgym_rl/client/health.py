"""What an environment server says of itself."""

from __future__ import annotations

from typing import Any

from agentgym_rl.client.connection import Connection
from agentgym_rl.errors import EnvProtocolError

_CONNECT_S = 3.0
_ANSWER_S = 10.0


def read_health(address: str, *, max_retries: int = 3) -> dict[str, Any]:
    """The fields of ``/health``; empty for a server that does not have it, as AgentGym's do not.

    ``max_retries``: further tries where the connection breaks, as it may for a moment while a server or a network is
    under load. Raises `EnvError` when the server does not answer.
    """
    connection = Connection(address, timeout_s=_ANSWER_S, max_retries=max_retries, connect_timeout_s=_CONNECT_S)
    try:
        content = connection.get("health").content
    except EnvProtocolError:
        return {}
    finally:
        connection.close()
    return content if isinstance(content, dict) else {}
