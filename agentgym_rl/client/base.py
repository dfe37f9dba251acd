"""EnvClient: one session of an environment server, as agents use it."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar, Self

from agentgym_rl.agent.actions import parse_action
from agentgym_rl.agent.strategies import conversation_start
from agentgym_rl.client.connection import CONNECT_TIMEOUT_S, Connection, Reply
from agentgym_rl.errors import EnvError, EnvProtocolError, EnvServerError
from agentgym_rl.types import Message, StepOutput

_CLOSE_TIMEOUT_S = 5.0
_SHOWN = 300
"""Characters of an unexpected answer that an error repeats."""


class EnvClient:
    """One session. It is created with the client and closed by `close`; for one thread at a time.

    A subclass names the task and describes it; one whose server answers in another form overrides `_read_reset` and
    `_read_step`. Every failure of the server is an `EnvError` that says at which task, item, step and URL it arose.
    """

    task: ClassVar[str]
    """The task name."""
    task_description: ClassVar[str]
    """Rules and forms of actions, for the agent; how to lay out an answer is not part of it."""
    action_forms: ClassVar[tuple[str, ...]] = ()
    """The kinds of actions, as the agent may write them."""
    example_action: ClassVar[str]
    """An action that is always allowed."""
    reward_is_cumulative: ClassVar[bool] = False
    """True when `step` reports the score so far, false when it reports the reward of that step."""
    max_score: ClassVar[float] = 1.0
    """The highest score of an episode."""
    success_score: ClassVar[float | None] = None
    """The least score that counts as success; None: `max_score`."""
    reward_scale: ClassVar[float] = 1.0
    """Training and evaluation multiply rewards by it: 0.01 where scores go up to 100, so that they go up to 1."""
    runs_inline: ClassVar[bool] = False
    """True for an environment in this very process whose calls take microseconds and never wait: they are then made
    where they are needed, without a thread. A slow one would hold up every other trajectory."""
    takes_games: ClassVar[bool] = False
    """True when `reset` also takes the path of a game in place of an index, and item files may list such paths."""
    handle_field: ClassVar[str] = "id"

    def __init__(
        self,
        env_server_base: str,
        data_len: int = 1,
        timeout: float = 60.0,
        *,
        max_retries: int = 10,
        connect_timeout: float = CONNECT_TIMEOUT_S,
    ) -> None:
        """Create a session on the server at ``env_server_base``.

        ``data_len``: number of task instances, which `len` returns. ``timeout``: seconds for one call, waiting for a
        place on a full server included. ``max_retries``: tries after the first, where nothing can have run twice.
        ``connect_timeout``: seconds for one try to connect. A token in ``AGENTGYM_TOKEN`` is sent with every call.
        """
        self.env_server_base = env_server_base.rstrip("/")
        self.data_len = data_len
        self.info: dict[str, Any] = {"observation": "", "reward": 0.0, "done": False}
        """What the latest call reported: ``observation``, ``reward``, ``done``."""
        self.viewer_state: Any = None
        """What the latest answer told beyond the observation, as plain JSON: the collector keeps it with the trajectory
        for the viewer's panel, and the agent never sees it. None where there is nothing."""
        self.on_reset: Callable[[bool], None] | None = None
        """Told after each reset whether the server made it."""
        self._item: int | None = None
        self._step = 0
        self._closed = False
        self._connection = Connection(
            self.env_server_base, timeout_s=timeout, max_retries=max_retries, connect_timeout_s=connect_timeout
        )
        try:
            self._handle = self._create()
        except EnvError:
            self._connection.close()
            raise

    def __len__(self) -> int:
        return self.data_len

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def retries(self) -> int:
        """Requests of this session that were sent again so far."""
        return self._connection.retries

    @property
    def is_closed(self) -> bool:
        return self._closed

    @classmethod
    def succeeds_from(cls) -> float:
        """The least score that counts as success."""
        return cls.max_score if cls.success_score is None else cls.success_score

    @property
    def conversation_start(self) -> tuple[Message, Message]:
        """Instruction and acknowledgement that open a conversation, for an agent that answers in the ReAct form."""
        return conversation_start(self)

    def reset(self, idx: int) -> str:
        """Begin task instance ``idx``; returns its first observation."""
        self._item, self._step = idx, 0
        content = self._post("reset", {"data_idx": idx})
        self.info = {"observation": self._read_reset(content), "reward": 0.0, "done": False}
        return self.observation()

    def observation(self) -> str:
        """The latest observation."""
        observation: str = self.info["observation"]
        return observation

    observe = observation

    def available_actions(self) -> list[str]:
        """Actions that make sense now; from a server that cannot tell, the kinds of actions."""
        reply = self._guarded(lambda: self._connection.get("available_actions", {self.handle_field: self._handle}))
        if reply.status == 404:
            return list(self.action_forms)
        actions = self._content(reply, "available_actions")
        if not isinstance(actions, list) or not all(isinstance(action, str) for action in actions):
            raise EnvProtocolError(self._at("available_actions", f"expected a list of strings, got {_shown(actions)}"))
        return actions

    def step(self, text: str) -> StepOutput:
        """Execute the action in an assistant's turn.

        ``reward`` is this step's, or the score so far where `reward_is_cumulative`. A turn without an action costs no
        call: the observation says what is expected, and no reward is paid.
        """
        self._step += 1
        action = parse_action(text)
        output = self._not_understood() if action is None else self._execute(action)
        self.info = {"observation": output.state, "reward": output.reward, "done": output.done}
        return output

    def close(self) -> None:
        """End the session on the server as far as it can be reached. Never raises; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(EnvError):
            timeout_s = min(_CLOSE_TIMEOUT_S, self._connection.timeout_s)
            self._connection.post("close", {self.handle_field: self._handle}, timeout_s=timeout_s, max_retries=0)
        self._connection.close()

    # ------------------------------------------------------------------------------- what a subclass may override

    def _create(self) -> int:
        """The handle of a fresh session; some servers send a first observation with it."""
        content = self._content(self._guarded(lambda: self._connection.post("create", {})), "create")
        handle = self._field(content, self.handle_field, "create")
        if not isinstance(handle, int) or isinstance(handle, bool):
            raise EnvProtocolError(self._at("create", f"{self.handle_field}={handle!r} is not an int"))
        self.info["observation"] = content.get("observation", "")
        return handle

    def _read_reset(self, content: Any) -> str:
        """The first observation in the answer to ``/reset``."""
        return self._text(content, "observation", "reset")

    def _read_step(self, content: Any) -> StepOutput:
        """The outcome in the answer to ``/step``."""
        return StepOutput(
            state=self._text(content, "observation", "step"),
            reward=self._number(content, "reward", "step"),
            done=self._truth(content, "done", "step"),
        )

    # ---------------------------------------------------------------------------------------------------- calls

    def _execute(self, action: str) -> StepOutput:
        return self._read_step(self._post("step", {"action": action}))

    def _not_understood(self) -> StepOutput:
        text = f"No action found. Write one line with one action, for example:\nAction: {self.example_action}"
        return StepOutput(text, self.info["reward"] if self.reward_is_cumulative else 0.0, False)

    def _post(self, path: str, fields: dict[str, Any]) -> Any:
        fields, succeeds = {self.handle_field: self._handle, **fields}, False
        try:
            content = self._content(self._guarded(lambda: self._connection.post(path, fields)), path)
            succeeds = True
        finally:
            if path == "reset" and self.on_reset is not None:
                self.on_reset(succeeds)
        return content

    def _guarded(self, call: Callable[[], Reply]) -> Reply:
        """Run a call; its error says for which item and step it was made."""
        try:
            reply = call()
        except EnvError as error:
            raise type(error)(f"{self._where()}: {error}") from error
        return reply

    def _content(self, reply: Reply, path: str) -> Any:
        """The content of a good answer; raises `EnvServerError` for any other."""
        if reply.status != 200:
            raise EnvServerError(self._at(path, f"HTTP {reply.status}: {_shown(reply.content)}"))
        if isinstance(reply.content, dict) and "error" in reply.content:
            raise EnvServerError(self._at(path, f"the environment reports: {_shown(reply.content['error'])}"))
        return reply.content

    def _where(self) -> str:
        item = "" if self._item is None else f" item {self.task}_{self._item} step {self._step}"
        return f"{self.task}{item}"

    def _at(self, path: str, problem: str) -> str:
        return f"{self._where()}: {self.env_server_base}/{path}: {problem}"

    # --------------------------------------------------------------------------------------- fields of an answer

    def _field(self, content: Any, name: str, path: str) -> Any:
        if not isinstance(content, dict) or name not in content:
            raise EnvProtocolError(self._at(path, f"no {name!r} in the answer {_shown(content)}"))
        return content[name]

    def _text(self, content: Any, name: str, path: str) -> str:
        value = self._field(content, name, path)
        if not isinstance(value, str):
            raise EnvProtocolError(self._at(path, f"{name}={value!r} is not a string"))
        return value

    def _number(self, content: Any, name: str, path: str) -> float:
        value = self._field(content, name, path)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise EnvProtocolError(self._at(path, f"{name}={value!r} is not a finite number"))
        return float(value)

    def _truth(self, content: Any, name: str, path: str) -> bool:
        value = self._field(content, name, path)
        if not isinstance(value, bool):
            raise EnvProtocolError(self._at(path, f"{name}={value!r} is not true or false"))
        return value


def _shown(content: Any) -> str:
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
