"""A small tokenizer with a ChatML template, for benchmarks that need no model."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentgym_rl.agent.chat import ChatTemplate

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = "Crafted 4 minecraft:oak_planks. Inventory: [oak log] (1) Thought: I need a log.\nAction: get 1 oak log\nuser\n"


def make_chat() -> ChatTemplate:
    """The template of `make_tokenizer`."""
    return ChatTemplate(make_tokenizer())


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of a few hundred entries behind a ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    wrapped.chat_template = TEMPLATE
    return wrapped
