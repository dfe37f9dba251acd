"""Small real tokenizers: byte-level BPE trained on a few sentences, with any chat template."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CASES = json.loads((Path(__file__).parents[1] / "cases" / "chat_templates.json").read_text())
TEMPLATES = {case["name"]: case["template"] for case in CASES}
CHATML = TEMPLATES["chatml"]
FAMILIES = json.loads((Path(__file__).parents[1] / "cases" / "model_templates.json").read_text())

CONTROL_STRINGS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]"),
    *("<user>", "</user>", "<assistant>", "</assistant>", "<now>", "<end>"),
)
SENTENCES = (
    "Crafting commands: craft 4 oak planks using 1 oak log",
    "Goal: craft oak planks. Inventory: [oak log] (1)",
    "Thought: I need a log first.\n\nAction: get 1 oak log\nsystem\nuser\nassistant\n",
    "Got 1 oak log. Crafted 4 minecraft:oak_planks. Could not find enough items.",
    "hello world you are a helpful agent, what do you do next?",
)


@cache
def _trained_bpe(byte_level: bool, control_strings: tuple[str, ...]) -> str:
    tokenizer = Tokenizer(models.BPE(unk_token=None if byte_level else "<unk>"))
    if byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        # As published ones of this kind do, it joins no line break with what stands beside it.
        line_breaks = pre_tokenizers.Split("\n", behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [line_breaks, pre_tokenizers.Metaspace(prepend_scheme="first")]
        )
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = [chr(code) for code in range(32, 127)] + ["\n", "▁"]
    trainer = trainers.BpeTrainer(
        vocab_size=500 if byte_level else 300,
        special_tokens=[*control_strings, "<unk>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer.to_str()


def make_tokenizer(
    template: str = CHATML,
    *,
    bos_token: str | None = None,
    eos_token: str | None = "<|im_end|>",
    byte_level: bool = True,
    control_strings: tuple[str, ...] = CONTROL_STRINGS,
    extra_tokens: tuple[AddedToken, ...] = (),
) -> PreTrainedTokenizerFast:
    """A tokenizer with ``template``; without ``byte_level`` it marks the start of a text, as sentencepiece ones do."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained_bpe(byte_level, control_strings)),
        bos_token=bos_token,
        eos_token=eos_token,
        pad_token="<|endoftext|>" if "<|endoftext|>" in control_strings else eos_token,
        unk_token=None if byte_level else "<unk>",
    )
    if extra_tokens:
        tokenizer.add_tokens(list(extra_tokens))
    tokenizer.chat_template = template
    return tokenizer


def make_family_tokenizer(case: dict[str, Any], *, byte_level: bool = True) -> PreTrainedTokenizerFast:
    """A small tokenizer with the template and exactly the control tokens of a model family of `FAMILIES`."""
    return make_tokenizer(
        case["template"],
        bos_token=case["bos_token"],
        eos_token=case["eos_token"],
        byte_level=byte_level,
        control_strings=tuple(case["control_tokens"]),
        extra_tokens=tuple(AddedToken(text, special=False, normalized=False) for text in case["added_tokens"]),
    )


def full_render_ids(
    tokenizer: PreTrainedTokenizerFast, messages: list, *, add_generation_prompt: bool = True
) -> list[int]:
    """The ids that the tokenizer itself gives for a whole conversation."""
    conversation = [{"role": str(message.role), "content": message.content} for message in messages]
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=add_generation_prompt)
    return tokenizer.encode(text, add_special_tokens=False)
