"""Tiny models and tokenizers for tests, made in memory: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCAB_SIZE = 64
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|> ' + message['role'] + ' ' + message['content'] + ' <|im_end|> ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"
)


def tiny_qwen2(
    *, seed: int = 0, vocab_size: int = VOCAB_SIZE, hidden_size: int = 32, num_layers: int = 2, num_kv_heads: int = 2
) -> Qwen2ForCausalLM:
    """A float32 Qwen2 with 4 heads, tied embeddings and random weights large enough to tell tokens apart."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config).float().eval()


def tiny_tokenizer(vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Words ``w0``, ``w1``, ... split at blanks, with a ChatML-like template."""
    specials = ["<pad>", "<|im_end|>", "<|im_start|>", "<unk>", "system", "user", "assistant"]
    words = specials + [f"w{index}" for index in range(vocab_size - len(specials))]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )


def save_tiny_model(folder: Path, **options: int) -> Path:
    """Write `tiny_qwen2` (with its options) and `tiny_tokenizer` as a Hugging Face folder; returns ``folder``."""
    tiny_qwen2(**options).save_pretrained(folder)
    tiny_tokenizer(options.get("vocab_size", VOCAB_SIZE)).save_pretrained(folder)
    return folder
