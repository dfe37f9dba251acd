"""The toy world of the training benchmark: say the letter that is shown, three times; and a model small enough for it.

A turn shows one of three letters. Answering with that letter pays a third, with another of the three a thirtieth, with
anything else nothing: a policy that draws one of the three at random earns .4, a perfect one 1. An answer is one token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from agentgym_rl.agent.strategies import conversation_start
from agentgym_rl.client.base import EnvClient
from agentgym_rl.envs.base import Environment
from agentgym_rl.envs.registry import EnvSpec, register
from agentgym_rl.types import StepOutput

TASK = "letters"
LETTERS = "abc"
TURNS = 3
RIGHT, ALMOST = 1 / 3, 1 / 30
"""What an answer pays: the letter shown, another of the three."""
RANDOM_SCORE = TURNS * (RIGHT + 2 * ALMOST) / 3

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL_TOKENS = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def letters_of(item: int) -> str:
    """The letters that item ``item`` shows, one a turn."""
    return "".join(random.Random(item).choices(LETTERS, k=TURNS))


def pay(shown: str, answer: str) -> float:
    """The reward of one turn."""
    return RIGHT if answer == shown else ALMOST if answer in LETTERS and answer else 0.0


class LettersClient(EnvClient):
    """Plays in this process: there is no server."""

    task = TASK
    task_description = "Say it."
    example_action = "a"
    runs_inline = True

    def __init__(self, env_server_base: str, **_: object) -> None:
        self.env_server_base = env_server_base

    def reset(self, idx: int) -> str:
        self._letters, self._turn = letters_of(idx), 0
        return self.observation()

    def observation(self) -> str:
        return self._letters[min(self._turn, TURNS - 1)]

    observe = observation

    def step(self, text: str) -> StepOutput:
        reward = pay(self._letters[self._turn], text)
        self._turn += 1
        return StepOutput(self.observation(), reward, self._turn == TURNS)

    def close(self) -> None:
        """Nothing to close."""


def register_task() -> None:
    """Make the task known to this process."""
    register(EnvSpec(TASK, "Letters", Environment, LettersClient, 10**6, 36999, lambda: "1"))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    wrapped.chat_template = TEMPLATE
    return wrapped


def make_model(vocab_size: int, *, seed: int = 0) -> Qwen2ForCausalLM:
    """A Qwen2 of about 100,000 parameters."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,  # at the usual .02 so small a net hardly tells letters apart
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=256,
    )
    return Qwen2ForCausalLM(config).float()


def save_model(folder: Path, *, seed: int = 0) -> Path:
    """Write a model that answers one of the three letters, whatever is shown; returns ``folder``."""
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer), seed=seed)
    answer_at_random(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def answer_at_random(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, steps: int = 60) -> None:
    """Train ``model``, in place, to answer with a letter that has nothing to do with the one shown."""
    draw = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    answers = answer_positions(tokenizer)
    for _ in range(steps):
        ids_BT = torch.tensor([encode(tokenizer, draw.choices(LETTERS, k=2 * TURNS)) for _ in range(16)])
        labels_BT = torch.full_like(ids_BT, -100)
        labels_BT[:, answers] = ids_BT[:, answers]
        loss = model(input_ids=ids_BT, labels=labels_BT).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def encode(tokenizer: PreTrainedTokenizerFast, letters: Sequence[str]) -> list[int]:
    """Ids of a whole episode; ``letters`` are shown and answered in turn. All episodes have one length."""
    messages = [{"role": str(m.role), "content": m.content} for m in conversation_start(LettersClient, "act")]
    for index, letter in enumerate(letters):
        messages.append({"role": "assistant" if index % 2 else "user", "content": letter})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=len(letters) % 2 == 1)
    return tokenizer.encode(text, add_special_tokens=False)


def answer_positions(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Where in an episode the answers stand."""
    return [len(encode(tokenizer, "a" * (2 * turn + 1))) for turn in range(TURNS)]
