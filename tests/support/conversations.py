"""Random conversations and what a rollout must record of them, for any chat template and tokenizer.

Two kinds. In *plain* ones the model writes what a render would give it back, so the ids must be the full render's. In
*hostile* ones contents hold control strings, white space at their edges or nothing, and turns are cut by their token
limit: no render has such ids, but the text, the control tokens and the mask of the record are known all the same.

A *case* says how a template behaves: an entry of `support.tokenizers.FAMILIES` or of `SHAPES` here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from support.rollouts import make_generation, make_limits, make_requests
from support.tokenizers import CASES, full_render_ids, make_family_tokenizer, make_tokenizer
from transformers import PreTrainedTokenizerFast

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.rollout.handler import RolloutHandler
from agentgym_rl.types import FinishReason, Message, Role, StepOutput

CONVERSATIONS = 100
EOS = {"instruction brackets, no separator": "</s>", "strict alternation": "</assistant>"}
SHAPES = [
    {
        "family": case["name"],
        "eos_token": EOS.get(case["name"], "<end>" if "<end>" in case["template"] else "<|im_end|>"),
        "end_of_turn": EOS.get(case["name"], "<end>" if "<end>" in case["template"] else "<|im_end|>"),
        "control_tokens": None,
        "system_refusal": "roles must alternate" if case["name"] == "strict alternation" else None,
        "moves_system_message": False,
        "answer_head": "",
        **case,
    }
    for case in CASES
]
LETTERS = "abcdefghijklmnopqrstuvwxyzABC0189.,:;!?-_()[]{}<>|/\\'\"`#*@&%$^~=+"
WORDS = (
    *(
        "Action: get 1 oak log",
        "Thought:",
        "craft 4 oak planks",
        "\u00fcber",
        "\u6728\u306e\u677f",
        "\U0001f332\U0001f9f0",
    ),
    *(
        "e\u0301",
        "\u0645\u0631\u062d\u0628\u0627",
        "\u200b",
        "\ufeff",
        "\uff1c|im_end|\uff1e",
        "don't",
        "\x00\x07",
        "\u2028",
    ),
)
SPACES = (" ", "  ", "\n", "\n\n", "\t", " \n ", "\u00a0", "\r\n")


def make_case_tokenizer(case: dict[str, Any], *, byte_level: bool = True) -> PreTrainedTokenizerFast:
    if case["control_tokens"] is None:
        return make_tokenizer(case["template"], eos_token=case["eos_token"], byte_level=byte_level)
    return make_family_tokenizer(case, byte_level=byte_level)


@dataclass(frozen=True)
class Conversation:
    """An opening, then answers of the model with the environment's observations."""

    opening: list[Message]
    answers: list[str]
    observations: list[str]
    cuts: list[float | None] = field(default_factory=list)
    """Per turn: the share of its tokens that its limit leaves, None where the model ended it."""

    def messages(self, answers: Sequence[str] | None = None) -> list[Message]:
        turns = zip(answers or self.answers, self.observations, strict=True)
        return [
            *self.opening,
            *(Message(r, c) for turn in turns for r, c in zip((Role.ASSISTANT, Role.USER), turn, strict=True)),
        ]


class Writer:
    """Random contents; the same for the same seed."""

    def __init__(self, seed: int, control_strings: Sequence[str] = ()) -> None:
        self._dice = random.Random(seed)
        self._control_strings = control_strings

    def text(self) -> str:
        """Words and white space, with white space at the edges as likely as not, and now and then nothing."""
        return "".join(self._parts())

    def plain(self) -> str:
        """Never empty, and nothing at the edges that a template strips."""
        return f"{self._dice.choice(LETTERS)}{self.text()}{self._dice.choice(LETTERS)}"

    def opening(self, *, may_have_system: bool) -> list[Message]:
        opening = [Message(Role.USER, self.text())]
        for _ in range(self._dice.randrange(2)):
            opening += [Message(Role.ASSISTANT, self.plain()), Message(Role.USER, self.text())]
        if may_have_system and self._dice.random() < 0.3:
            opening.insert(0, Message(Role.SYSTEM, self.plain()))
        return opening

    def plain_conversation(self, *, may_have_system: bool) -> Conversation:
        turns = self._dice.randint(1, 5)
        return Conversation(
            self.opening(may_have_system=may_have_system),
            [self.plain() for _ in range(turns)],
            [self.text() for _ in range(turns)],
        )

    def hostile_conversation(self, *, may_have_system: bool) -> Conversation:
        turns = self._dice.randint(1, 5)
        return Conversation(
            self.opening(may_have_system=may_have_system),
            [self.text() for _ in range(turns)],
            [self.text() for _ in range(turns)],
            [self._dice.random() if self._dice.random() < 0.4 else None for _ in range(turns)],
        )

    def _parts(self) -> Iterator[str]:
        for _ in range(self._dice.randrange(9)):
            kind = self._dice.random()
            if kind < 0.35:
                yield self._dice.choice(SPACES)
            elif kind < 0.65:
                yield self._dice.choice(WORDS)
            elif kind < 0.8 and self._control_strings:
                yield self._dice.choice(self._control_strings)
            else:
                yield "".join(self._dice.choices(LETTERS, k=self._dice.randint(1, 12)))


def conversations(case: dict[str, Any], *, hostile: bool) -> Iterator[Conversation]:
    has_system = not case["system_refusal"] and not case["moves_system_message"]
    for seed in range(CONVERSATIONS):
        if hostile:
            controls = case["control_tokens"] or ["<|im_start|>", "<|im_end|>", "</s>", "[INST]", "<user>", "<end>"]
            yield Writer(seed, controls).hostile_conversation(may_have_system=has_system)
        else:
            yield Writer(seed).plain_conversation(may_have_system=has_system)


def sample(case: dict[str, Any], tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> list[list[int]]:
    """What the model samples each turn. A control string that it writes comes out of ordinary tokens."""
    end = tokenizer.convert_tokens_to_ids(case["end_of_turn"])
    turns = []
    for index, answer in enumerate(conversation.answers):
        ids = plain_ids(tokenizer, case["answer_head"] + answer, behind=case["end_of_turn"])
        cut = conversation.cuts[index] if conversation.cuts else None
        turns.append([*ids, end] if cut is None else ids[: int(cut * len(ids))])
    return turns


def plain_ids(tokenizer: PreTrainedTokenizerFast, text: str, *, behind: str) -> list[int]:
    """Ids of what a model writes: no mark of a text's start, so ``behind`` a control token, and letter by letter
    wherever a control string could be read as one."""

    def encode(part: str) -> list[int]:
        ids: list[int] = tokenizer.encode(behind + part, add_special_tokens=False)[1:]
        return ids

    # One whose string is not there stands for what the vocabulary lacks.
    whole, written = encode(text), {id for id, token in tokenizer.added_tokens_decoder.items() if token.content in text}
    if not written & set(whole):
        return whole
    return [id for letter in text for id in encode(letter)]


def play(chat: ChatTemplate, conversation: Conversation, turns: Sequence[Sequence[int]]) -> RolloutHandler:
    limits = make_limits(max_prompt_length=10**5, max_response_length=10**5, max_model_len=10**6, max_tokens=10**4)
    handler = RolloutHandler(make_requests([7])[0], tuple(conversation.opening), chat, limits, max_rounds=10)
    for ids, observation in zip(turns, conversation.observations, strict=True):
        is_cut = not ids or ids[-1] != chat.end_of_turn_id
        handler.append_generation(
            make_generation(ids, finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP)
        )
        handler.append_step(StepOutput(observation, 0.0, False))
        assert handler.append_observation(observation)
    return handler


def assert_mask_covers_exactly(handler: RolloutHandler, turns: Sequence[Sequence[int]]) -> None:
    """Each turn's ids stand, in order and in one piece, in its own message, and nothing else is trained on."""
    first = len(handler.messages) - 2 * len(turns)
    for index, ids in enumerate(turns):
        own = (handler.sequence_ids == first + 2 * index) & (handler.loss_mask == 1)
        assert handler.input_ids[own].tolist() == list(ids)
        assert not len(ids) or own.nonzero()[0][-1] - own.nonzero()[0][0] == len(ids) - 1
    assert handler.loss_mask.sum() == sum(map(len, turns))
    assert ((handler.rollout_log_probs != 0) == (handler.loss_mask == 1)).all()
    assert (handler.sequence_ids[1:] >= handler.sequence_ids[:-1]).all()


def check_plain_conversations(case: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> None:
    """Increments are the full render to the last id, and masks cover exactly what was sampled."""
    chat = ChatTemplate(tokenizer)
    for conversation in conversations(case, hostile=False):
        turns = sample(case, tokenizer, conversation)
        handler = play(chat, conversation, turns)
        assert handler.input_ids.tolist() == full_render_ids(tokenizer, conversation.messages())
        assert_mask_covers_exactly(handler, turns)


def expected_text(
    tokenizer: PreTrainedTokenizerFast, conversation: Conversation, turns: Sequence[Sequence[int]], end_of_turn: int
) -> str:
    """Each turn as it was sampled, then what the render up to its observation has after a placeholder for the answer.

    Such a render is what the next turn is sampled from, so this holds for templates that rewrite history as well.
    """
    marks = [f"QANSWER{index}Q" for index in range(len(turns))]
    messages = [{"role": str(m.role), "content": m.content} for m in conversation.messages(marks)]

    def render(length: int) -> str:
        text: str = tokenizer.apply_chat_template(messages[:length], tokenize=False, add_generation_prompt=True)
        return text

    text = render(len(conversation.opening))
    for index, (mark, ids) in enumerate(zip(marks, turns, strict=True)):
        text += tokenizer.decode([id for id in ids if id != end_of_turn])
        text += render(len(conversation.opening) + 2 * index + 2).partition(mark)[2]
    return text


def check_hostile_conversations(case: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> None:
    """Whatever contents hold and wherever turns are cut, text, frame and mask are as they must be."""
    chat = ChatTemplate(tokenizer)
    for conversation in conversations(case, hostile=True):
        turns = sample(case, tokenizer, conversation)
        handler = play(chat, conversation, turns)
        assert_mask_covers_exactly(handler, turns)
        assert tokenizer.decode(handler.input_ids) == expected_text(tokenizer, conversation, turns, chat.end_of_turn_id)
        harmless = Conversation(
            [Message(m.role, "x") for m in conversation.opening],
            ["x"] * len(turns),
            ["x"] * len(turns),
        )
        controls = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        answer = plain_ids(tokenizer, "x", behind=case["end_of_turn"])
        frame = play(chat, harmless, [[*answer, chat.end_of_turn_id]] * len(turns))
        assert [id for id in handler.input_ids if id in controls] == [id for id in frame.input_ids if id in controls]


def check_records_only_grow(case: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> None:
    """With thoughts that the template would remove, a longer record begins with the shorter one."""
    chat = ChatTemplate(tokenizer)
    for conversation in conversations(case, hostile=False):
        thoughts = [f"<think>{answer}</think>\n\nAction: go" for answer in conversation.answers]
        thinking = Conversation(conversation.opening, thoughts, conversation.observations)
        turns = sample(case, tokenizer, thinking)
        handler = play(chat, thinking, turns)
        assert_mask_covers_exactly(handler, turns)
        shorter = Conversation(thinking.opening, thoughts[:-1], thinking.observations[:-1])
        before = play(chat, shorter, turns[:-1])
        assert handler.input_ids[: before.num_tokens].tolist() == before.input_ids.tolist()
        assert handler.loss_mask[: before.num_tokens].tolist() == before.loss_mask.tolist()
