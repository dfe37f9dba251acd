"""From a tokenizer's chat template to token increments: what stands before, between and after a trajectory's turns.

A trajectory is append-only, so it needs three things of a template: the ids of the opening prompt, the ids that follow
an assistant turn's end-of-turn token (separator, user header, observation, next generation prompt), and that token.
All are read off renders of probe conversations; nothing here knows a model's control strings.

Contents are put into the *rendered* scaffold, never through the template, and only the scaffold may produce control
tokens: a control string inside a content is encoded as plain text.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Protocol

from agentgym_rl.errors import ConfigError
from agentgym_rl.types import Message, Role

logger = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    eos_token_id: int | None
    unk_token_id: int | None

    @property
    def all_special_ids(self) -> list[int]: ...

    @property
    def added_tokens_decoder(self) -> dict[int, Any]: ...

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, **options: Any
    ) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> Any: ...


@dataclass(frozen=True, slots=True)
class EncodedText:
    """Token ids and, for each, the index of the message that it belongs to (equal lengths)."""

    ids: tuple[int, ...]
    sequence_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EncodedConversation:
    """A whole conversation as a rollout would have recorded it; three columns of equal length."""

    ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    """1 on the text and the end-of-turn token of every trained assistant message."""
    sequence_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Plain text, or ids of the scaffold that no neighbour can change, owned by a message."""

    owner: int
    text: str = ""
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Trim:
    """Which ends of a content the template strips of white space."""

    left: bool
    right: bool

    def __call__(self, content: str) -> str:
        content = content.lstrip() if self.left else content
        return content.rstrip() if self.right else content


_THOUGHT = "<think>\nweigh it\n</think>\n\nact"
_PADDING = " \n"
_MAX_REMEMBERED = 500_000
"""Tokens of the texts whose ids are remembered: about 20 MiB."""
_REWRITING = (
    "this chat template rewrites earlier messages %s; trajectories stay append-only, so their ids are what was sampled "
    "and differ from a fresh render"
)


def _slot(index: int) -> str:
    """A content that stands for message ``index`` in a render: plain letters, found again unchanged."""
    return f"QZslot{index}zQ"


class ChatTemplate:
    """Token increments of one tokenizer's chat template; see the module's text.

    Raises `ConfigError` at construction when the tokenizer has no template, when the template refuses a conversation of
    alternating user and assistant messages (with the template's own words), or when nothing can end a turn.
    Warns once when the template rewrites history: ids stay as they were sampled, so they differ from a fresh render.
    A template that does so only after some prompts, as one that moves the system message along, is warned of at the
    first prompt with those roles.
    """

    def __init__(self, tokenizer: Tokenizer, *, warns: bool = True, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """``warns``: False in all but one of the processes that share a run. ``tools``: functions that the template
        declares in every prompt, in its own format; see `with_tools`."""
        self._tokenizer, self._warns = tokenizer, warns
        self._tools = [dict(tool) for tool in tools]
        self._with_tools: dict[str, ChatTemplate] = {}
        self._render_errors = _template_errors()
        self._layouts: dict[tuple[Role, ...], list[_Piece | int]] = {}
        self._remembered: dict[tuple[str, bool], tuple[int, ...]] = {}
        self._num_remembered = 0
        self._added = {int(id): token for id, token in tokenizer.added_tokens_decoder.items()}
        self._unknown_id = tokenizer.unk_token_id
        probe = [_slot_message(Role.USER, 0), _slot_message(Role.ASSISTANT, 1), _slot_message(Role.USER, 2)]
        render = self._render(probe, add_generation_prompt=True)
        answer_header, turn_gap, ending = self._split_at_slots(render, (0, 1), (1, 2), (2, None))
        self._closings = {
            Role.USER: _after(self._render(probe[:1], add_generation_prompt=False), _slot(0)),
            Role.ASSISTANT: _after(self._render(probe[:2], add_generation_prompt=False), _slot(1)),
        }
        self._trims = {role: self._find_trim(role) for role in (Role.USER, Role.ASSISTANT)}
        self._set_control_tokens(self._render(probe, add_generation_prompt=True))
        self._context = self._find_context()
        self.rewrites_history = self._finds_rewriting()
        """True when a fresh render of a longer conversation changes what stood earlier, whatever the prompt."""
        self.end_of_turn_id, turn_tail, gap = self._find_end_of_turn(turn_gap)
        """The token that ends an assistant turn."""
        eos = tokenizer.eos_token_id
        self.stop_token_ids = (
            (self.end_of_turn_id,) if eos in (None, self.end_of_turn_id) else (self.end_of_turn_id, eos)
        )
        """Tokens at which an engine must stop: end-of-turn, and the model's end-of-text where that differs."""
        self._answer_head, self._answer_tail = self._find_answer_frame(answer_header, ending), turn_tail
        self._answer_opening = ending[len(answer_header) :] if ending.startswith(answer_header) else ""
        self._turn_end = turn_gap[: len(turn_gap) - len(gap)]
        self._observation_layout = self._observation_frame(gap, ending, self._closings[Role.USER])
        self._tool_layout = self._tool_frame() if self._tools else None
        if self._warns and self.rewrites_history:
            logger.warning(_REWRITING, "(such as removing their thoughts)")

    # ---------------------------------------------------------------------------------------------------------- tools

    @property
    def declares_tools(self) -> bool:
        """True when every prompt lists functions in the template's own format."""
        return bool(self._tools)

    @property
    def answer_role(self) -> Role:
        """Whose message the environment's answer to an action is: the tool's where the template has a frame for it."""
        return Role.USER if self._tool_layout is None else Role.TOOL

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        """The same template declaring ``tools`` (JSON schemas of functions); itself where it has no format for them."""
        if not tools or self._tools:
            return self
        key = json.dumps(list(tools))
        if key not in self._with_tools:
            shown = ChatTemplate(self._tokenizer, warns=False, tools=tools) if self._takes(tools) else self
            self._with_tools[key] = shown
        return self._with_tools[key]

    def _takes(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        probe = [{"role": "user", "content": _slot(0)}]
        try:
            render = str(
                self._tokenizer.apply_chat_template(
                    probe, tokenize=False, add_generation_prompt=True, tools=[dict(tool) for tool in tools]
                )
            )
        except self._render_errors:
            return False
        return all(tool["function"]["name"] in render for tool in tools)

    # ------------------------------------------------------------------------------------------------------- encoding

    def encode_prompt(self, messages: Sequence[Message]) -> EncodedText:
        """Ids of an opening conversation, generation prompt included.

        The generation prompt's tokens belong to the coming assistant message, index ``len(messages)``.
        Raises `ConfigError` when the last message is not the user's or the template refuses the order of roles.
        """
        if not messages or messages[-1].role != Role.USER:
            raise ConfigError("a prompt must end with a user message: the assistant speaks next")
        roles = tuple(Role(message.role) for message in messages)
        if roles not in self._layouts:
            self._layouts[roles] = self._layout(roles)
            self._warn_of_rewriting_after(roles)
        pieces = [
            piece if isinstance(piece, _Piece) else _Piece(piece, self._trim(messages[piece]))
            for piece in self._layouts[roles]
        ]
        return self._encode(pieces, at_start=True)

    def encode_observation(self, text: str, message_index: int, role: Role = Role.USER) -> EncodedText:
        """Ids that follow an assistant turn's end-of-turn: separator, observation in its frame, generation prompt.

        ``role``: `Role.TOOL` for the frame of a function's result; the user's where the template has none.

        ``message_index`` is the observation's: the separator counts to the message before, the generation prompt to the
        one after. Control strings in ``text`` come out as plain text.
        """
        is_result = role == Role.TOOL and self._tool_layout is not None
        content = _Piece(0, self._result(text) if is_result else self._trims[Role.USER](text))
        layout = self._tool_layout if is_result and self._tool_layout is not None else self._observation_layout
        pieces = [piece if isinstance(piece, _Piece) else content for piece in layout]
        encoded = self._encode(pieces, at_start=False)
        return EncodedText(encoded.ids, tuple(message_index + offset for offset in encoded.sequence_ids))

    def encode_answer(self, text: str) -> tuple[int, ...]:
        """Ids of an assistant's text as the model would write it after a generation prompt, end-of-turn included.

        What the generation prompt already writes of it, such as the tag that opens a thought, is not written again.
        """
        text = text.removeprefix(self._answer_opening)
        content = text if self.rewrites_history else self._trims[Role.ASSISTANT](text)
        piece = _Piece(0, self._answer_head + content + self._answer_tail)
        return (*self._encode([piece], at_start=False).ids, self.end_of_turn_id)

    def encode_conversation(
        self, messages: Sequence[Message], train_flags: Sequence[bool | None] | None = None
    ) -> EncodedConversation:
        """Ids of a finished conversation, exactly as a rollout that sampled its assistant texts would have them.

        ``train_flags`` has one entry per message; an assistant message is trained on unless its flag is False.
        Everything before the first trained message is the prompt. User messages after the last assistant's are left
        out, as a rollout leaves out what no turn follows. Raises `ConfigError` for a conversation without an assistant
        or whose roles do not alternate after the prompt.
        """
        flags = list(train_flags) if train_flags is not None else [None] * len(messages)
        start, end = _trained_span(messages, flags)
        prompt = self.encode_prompt(messages[:start])
        ids, mask, owners = list(prompt.ids), [0] * len(prompt.ids), list(prompt.sequence_ids)
        for index in range(start, end):
            part, is_trained = self._encode_message(messages, index), flags[index] is not False
            ids += part.ids
            owners += part.sequence_ids
            mask += [int(is_trained and messages[index].role == Role.ASSISTANT)] * len(part.ids)
        return EncodedConversation(tuple(ids), tuple(mask), tuple(owners))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of sampled ids, without special tokens and without what ended the turn."""
        kept = [int(id) for id in ids]
        while kept and kept[-1] in self.stop_token_ids:
            kept.pop()
        return str(self._tokenizer.decode(kept, skip_special_tokens=True))

    def _encode_message(self, messages: Sequence[Message], index: int) -> EncodedText:
        message, follows_answer = messages[index], messages[index - 1].role == Role.ASSISTANT
        if (message.role in (Role.USER, Role.TOOL)) != follows_answer:
            raise ConfigError(f"message {index} is the {message.role}'s: after the prompt, roles must alternate")
        if follows_answer:
            return self.encode_observation(message.content, index, message.role)
        answer = self.encode_answer(message.content)
        return EncodedText(answer, (index,) * len(answer))

    def _trim(self, message: Message) -> str:
        trim = self._trims.get(Role(message.role))
        return trim(message.content) if trim else message.content

    def _encode(self, pieces: Sequence[_Piece], *, at_start: bool) -> EncodedText:
        """Encode pieces: neighbouring plain texts as one string, as a full render would be; control tokens by id."""
        ids: list[int] = []
        owners: list[int] = []
        run: list[_Piece] = []
        for piece in pieces:
            if piece.ids is None:
                run.append(piece)
                continue
            self._encode_run(run, ids, owners, at_start=at_start)
            run, at_start = [], False
            ids.extend(piece.ids)
            owners.extend([piece.owner] * len(piece.ids))
        self._encode_run(run, ids, owners, at_start=at_start)
        return EncodedText(tuple(ids), tuple(owners))

    def _encode_run(self, run: Sequence[_Piece], ids: list[int], owners: list[int], *, at_start: bool) -> None:
        text = "".join(piece.text for piece in run)
        if not text:
            return
        encoded = self._encode_plain(text, at_start=at_start)
        ids.extend(encoded)
        run = [piece for piece in run if piece.text]
        if all(piece.owner == run[0].owner for piece in run):
            owners.extend([run[0].owner] * len(encoded))
        else:
            owners.extend(self._run_owners(run, len(encoded), at_start=at_start))

    def _run_owners(self, run: Sequence[_Piece], num_ids: int, *, at_start: bool) -> list[int]:
        """Share one string's tokens among its pieces by the token count of each prefix."""
        owners: list[int] = []
        prefix = ""
        for piece in run[:-1]:
            prefix += piece.text
            end = min(num_ids, len(self._encode_plain(prefix, at_start=at_start)))
            owners.extend([piece.owner] * (end - len(owners)))
        return owners + [run[-1].owner] * (num_ids - len(owners))

    def _encode_plain(self, text: str, *, at_start: bool) -> tuple[int, ...]:
        """`_encode_untrusted`, remembered: instructions recur in every trajectory, observations in those of a group."""
        ids = self._remembered.get((text, at_start))
        if ids is None:
            ids = tuple(self._encode_untrusted(text, at_start=at_start))
            self._num_remembered += len(ids) + 1
            if self._num_remembered > _MAX_REMEMBERED:
                self._remembered.clear()
                self._num_remembered = len(ids) + 1
            self._remembered[text, at_start] = ids
        return ids

    def _encode_untrusted(self, text: str, *, at_start: bool) -> list[int]:
        """Ids of text that must hold no control token; control strings in it are cut so that none is recognised."""
        ids = self._encode_text(text, at_start=at_start)
        if self._control_ids.isdisjoint(ids):
            return ids
        parts = self._cut_control_strings(text)
        cut = self._encode_text(parts[0], at_start=at_start)
        cut += [id for part in parts[1:] for id in self._encode_text(part, at_start=False)]
        # The token for unknown text may be a control token too. Any other that is left has no string in the text: a
        # normalizer made it, such as NFKC from full-width letters, and it cannot be cut.
        return [id for id in cut if id not in self._control_ids or id == self._unknown_id]

    def _cut_control_strings(self, text: str) -> list[str]:
        """Cut every control string after its first character; no part then holds a whole one."""
        parts, start = [], 0
        while match := self._control_pattern.search(text, start):
            parts.append(text[start : match.start() + 1])
            start = match.start() + 1
        return [*parts, text[start:]]

    def _encode_text(self, text: str, *, at_start: bool) -> list[int]:
        if at_start or not self._context:
            return self._tokenizer.encode(text, add_special_tokens=False)
        return self._tokenizer.encode(self._context + text, add_special_tokens=False)[1:]

    # -------------------------------------------------------------------------------------------- reading the template

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        conversation = [{"role": str(message.role), "content": message.content} for message in messages]
        options = {"tools": self._tools} if self._tools else {}
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    conversation, tokenize=False, add_generation_prompt=add_generation_prompt, **options
                )
            )
        except self._render_errors as error:
            roles = ", ".join(str(message.role) for message in messages)
            raise ConfigError(f"the chat template refuses messages of roles {roles}: {error}") from error

    def _split_at_slots(self, render: str, *gaps: tuple[int, int | None]) -> list[str]:
        """The texts between pairs of slots; ``None`` stands for the render's end."""
        parts = []
        for left, right in gaps:
            start = _find_slot(render, left) + len(_slot(left))
            parts.append(render[start : len(render) if right is None else _find_slot(render, right)])
        return parts

    def _find_trim(self, role: Role) -> _Trim:
        contents = [_PADDING + _slot(index) + _PADDING for index in range(3)]
        messages = [Message(r, c) for r, c in zip((Role.USER, Role.ASSISTANT, Role.USER), contents, strict=True)]
        render = self._render(messages, add_generation_prompt=True)
        slot = _slot(0 if role == Role.USER else 1)
        return _Trim(left=_PADDING + slot not in render, right=slot + _PADDING not in render)

    def _set_control_tokens(self, render: str) -> None:
        """Control tokens: all special ones, and whatever added token the template writes itself."""
        special = {id for id, token in self._added.items() if token.special} | set(self._tokenizer.all_special_ids)
        in_template = {id for id, token in self._added.items() if str(token) in render}
        self._control_ids = frozenset(special | in_template)
        self._control_tokens = {str(self._added[id]): id for id in self._control_ids if id in self._added}
        by_length = sorted(self._control_tokens, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, by_length)) or r"(?!)")

    def _find_context(self) -> str:
        """A control string to encode text behind, or nothing when that makes no difference.

        Tokenizers that mark the start of a text by a space token must not mark the start of each piece.
        """
        for text, id in self._control_tokens.items():
            if getattr(self._added[id], "rstrip", False):
                continue
            ids = self._tokenizer.encode(text + "a", add_special_tokens=False)
            if ids[:1] == [id]:
                return "" if ids[1:] == self._tokenizer.encode("a", add_special_tokens=False) else text
        return ""

    def _finds_rewriting(self, opening: tuple[Role, ...] = (Role.USER,)) -> bool:
        """Whether two turns with thoughts after a prompt of these roles change what stood before them."""
        roles = (*opening, Role.ASSISTANT, Role.USER, Role.ASSISTANT, Role.USER)
        messages = [_slot_message(role, index) for index, role in enumerate(roles)]
        for index in (len(opening), len(opening) + 2):
            messages[index] = Message(Role.ASSISTANT, _THOUGHT)
        ends = (len(opening), len(opening) + 2, len(roles))
        renders = [self._render(messages[:end], add_generation_prompt=True) for end in ends]
        grows = all(later.startswith(earlier) for earlier, later in pairwise(renders))
        return not grows or renders[-1].count(_THOUGHT) != 2

    def _warn_of_rewriting_after(self, opening: tuple[Role, ...]) -> None:
        if self._warns and not self.rewrites_history and self._finds_rewriting(opening):
            logger.warning(_REWRITING, f"after a prompt of roles {', '.join(opening)}")

    def _find_end_of_turn(self, gap: str) -> tuple[int, str, str]:
        """The end-of-turn token, the text that a turn has before it, and the text between it and the observation."""
        match = self._control_pattern.search(self._closings[Role.ASSISTANT])
        if match is not None and gap.startswith(self._closings[Role.ASSISTANT][: match.end()]):
            return self._control_tokens[match.group()], gap[: match.start()], gap[match.end() :]
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(
                "the chat template ends an assistant message with no special token and the tokenizer has no eos_token: "
                "nothing can end a turn"
            )
        return self._tokenizer.eos_token_id, "", gap

    def _find_answer_frame(self, header: str, ending: str) -> str:
        """The text that the template writes between generation prompt and assistant's content (often nothing)."""
        return header[len(ending) :] if header.startswith(ending) and not self.rewrites_history else ""

    def _observation_frame(self, gap: str, ending: str, user_closing: str) -> list[_Piece | int]:
        """What follows an assistant's end-of-turn; 0 stands where the content goes."""
        token = self._added.get(self.end_of_turn_id)
        separator, header = _split_off(gap, self._separator())
        closing, generation_prompt = _split_off(ending, user_closing)
        if getattr(token, "rstrip", False):
            separator, header = (separator.lstrip(), header) if separator.strip() else ("", header.lstrip())
        head = self._split_scaffold((separator, -1), (header, 0))
        tail = self._split_scaffold((closing, 0), (generation_prompt, 1))
        return self._compile([*head, 0, *tail], at_start=False)

    def _tool_frame(self) -> list[_Piece | int] | None:
        """The frame of a function's result after an assistant's turn; None where the template has none."""
        probe = [_slot_message(Role.USER, 0), _slot_message(Role.ASSISTANT, 1), _slot_message(Role.TOOL, 2)]
        try:
            render = self._render(probe, add_generation_prompt=True)
            gap, ending = self._split_at_slots(render, (1, 2), (2, None))
            closing = _after(self._render(probe, add_generation_prompt=False), _slot(2))
            self._result = self._find_result_form()
        except ConfigError:
            return None
        if not gap.startswith(self._turn_end):
            return None
        return self._observation_frame(gap[len(self._turn_end) :], ending, closing)

    def _find_result_form(self) -> Callable[[str], str]:
        """What the template makes of a result's text: nothing, blanks cut off, or a JSON string (as Llama's does)."""
        padded = _PADDING + _slot(2) + _PADDING
        probe = [_slot_message(Role.USER, 0), _slot_message(Role.ASSISTANT, 1), Message(Role.TOOL, padded)]
        render = self._render(probe, add_generation_prompt=True)
        if _as_json_text(padded) in render:
            return _as_json_text
        slot = _slot(2)
        return _Trim(left=_PADDING + slot not in render, right=slot + _PADDING not in render)

    def _separator(self) -> str:
        """What the template writes after the end-of-turn token even when nothing follows."""
        closing = self._closings[Role.ASSISTANT]
        match = self._control_pattern.search(closing)
        return closing[match.end() :] if match else closing

    def _layout(self, roles: tuple[Role, ...]) -> list[_Piece | int]:
        """The scaffold of a prompt with messages of these roles; an int stands where that message's content goes."""
        slots = [_slot_message(role, index) for index, role in enumerate(roles)]
        render = self._render(slots, add_generation_prompt=True)
        order = sorted(range(len(roles)), key=lambda index: _find_slot(render, index))
        layout: list[_Piece | int] = []
        start, previous = 0, None
        for index in order:
            position = _find_slot(render, index)
            layout += self._own_scaffold(render[start:position], roles, previous, index)
            layout.append(index)
            start, previous = position + len(_slot(index)), index
        layout += self._own_scaffold(render[start:], roles, previous, len(roles))
        return self._compile(layout, at_start=True)

    def _compile(self, layout: list[_Piece | int], *, at_start: bool) -> list[_Piece | int]:
        """Encode once what stands between control tokens without touching a content."""
        compiled: list[_Piece | int] = []
        for is_text, group in groupby(layout, key=lambda entry: isinstance(entry, int) or entry.ids is None):
            entries = list(group)
            run = [entry for entry in entries if isinstance(entry, _Piece)]
            if not is_text or len(run) < len(entries):
                compiled += entries
                continue
            encoded = self._encode(run, at_start=at_start and not compiled)
            tokens = zip(encoded.sequence_ids, encoded.ids, strict=True)
            for owner, own in groupby(tokens, key=lambda token: token[0]):
                compiled.append(_Piece(owner, ids=tuple(id for _, id in own)))
        return compiled

    def _own_scaffold(self, text: str, roles: tuple[Role, ...], previous: int | None, following: int) -> list[_Piece]:
        """Share the scaffold between two contents: the closing is the earlier message's, the rest the later one's."""
        if previous is None:
            return self._split_scaffold((text, following))
        for role in (roles[previous], Role.USER):
            closing, rest = _split_off(text, self._closings.get(role, ""))
            if closing:
                return self._split_scaffold((closing, previous), (rest, following))
        return self._split_scaffold((text, following))

    def _split_scaffold(self, *parts: tuple[str, int]) -> list[_Piece]:
        """Cut scaffold texts, each with its owner, into control tokens and plain text."""
        pieces: list[_Piece] = []
        for text, owner in parts:
            start = 0
            for match in self._control_pattern.finditer(text):
                pieces.append(_Piece(owner, text[start : match.start()]))
                pieces.append(_Piece(owner, ids=(self._control_tokens[match.group()],)))
                start = match.end()
            pieces.append(_Piece(owner, text[start:]))
        return self._swallow_space([piece for piece in pieces if piece.text or piece.ids])

    def _swallow_space(self, pieces: list[_Piece]) -> list[_Piece]:
        """Remove the white space that a control token declares to be part of itself, as a tokenizer does."""
        swallowed = list(pieces)
        for position, piece in enumerate(pieces):
            token = self._added.get(piece.ids[0]) if piece.ids else None
            before, after = position - 1, position + 1
            if getattr(token, "lstrip", False) and before >= 0 and swallowed[before].ids is None:
                swallowed[before] = _Piece(swallowed[before].owner, swallowed[before].text.rstrip())
            if getattr(token, "rstrip", False) and after < len(pieces) and swallowed[after].ids is None:
                swallowed[after] = _Piece(swallowed[after].owner, swallowed[after].text.lstrip())
        return swallowed


def _as_json_text(text: str) -> str:
    """``text`` as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _slot_message(role: Role, index: int) -> Message:
    return Message(role, _slot(index))


def _find_slot(render: str, index: int) -> int:
    position = render.find(_slot(index))
    if position < 0:
        raise ConfigError(f"the chat template drops message {index}: the model would never see it")
    return position


def _after(render: str, slot: str) -> str:
    return render[render.index(slot) + len(slot) :]


def _split_off(text: str, prefix: str) -> tuple[str, str]:
    return (prefix, text[len(prefix) :]) if prefix and text.startswith(prefix) else ("", text)


def _trained_span(messages: Sequence[Message], flags: Sequence[bool | None]) -> tuple[int, int]:
    """First message that a rollout would have sampled, and the end of the last assistant message."""
    if len(flags) != len(messages):
        raise ConfigError(f"{len(flags)} train flags for {len(messages)} messages: one per message is needed")
    answers = [index for index, message in enumerate(messages) if message.role == Role.ASSISTANT]
    if not answers:
        raise ConfigError("the conversation has no assistant message")
    return next((index for index in answers if flags[index] is not False), answers[-1]), answers[-1] + 1


def _template_errors() -> tuple[type[Exception], ...]:
    """What rendering may raise for a refused conversation; jinja2 comes with any tokenizer that has templates."""
    try:
        from jinja2 import TemplateError
    except ImportError:
        return (ValueError,)
    return (TemplateError, ValueError)
