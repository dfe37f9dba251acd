"""Makes the quickstart's base model: a small Qwen2 with random weights and a tokenizer made from the task's own text.

    python examples/quickstart/make_model.py --train-file items.json --out saves/quickstart/base --seed 0

Only training goals are read, so words of held-out goals reach the tokenizer just where training goals share them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from agentgym_rl.data.demonstrations import demonstrate
from agentgym_rl.data.items import load_items
from agentgym_rl.envs.registry import get_spec

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with ChatML's control tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(
    vocab_size: int, *, hidden_size: int, num_layers: int, num_heads: int, eos_token_id: int
) -> Qwen2ForCausalLM:
    """A Qwen2 with random weights from torch's current seed; its embeddings are also its output layer."""
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=eos_token_id,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    prepare_induction(model)
    return model


EMBEDDING_STD = 0.3
"""Large against what the layers add at first, so that a token stays recognisable behind them."""
PREVIOUS_TOKEN_LOGIT = 6.0
MATCH_GAIN = 0.7


@torch.no_grad()
def prepare_induction(model: Qwen2ForCausalLM) -> None:
    """Start the first two layers near induction heads, which copy what followed an earlier occurrence of a token.

    Any pretrained language model has them (Olsson et al. 2022, "In-context Learning and Induction Heads"); from noise
    they would take a model of this size longer to form than the whole quickstart takes. Heads of the first layer look a
    few tokens back (by their biases, which rotary embeddings turn into an offset) and pass on what they see; heads of
    the second look for places where that equals the current token, and pass on the token found there.
    """
    config = model.config
    hidden, num_heads = config.hidden_size, config.num_attention_heads
    size = hidden // num_heads
    model.model.embed_tokens.weight.normal_(std=EMBEDDING_STD)
    seen, passed_on, copied = (torch.linalg.qr(torch.randn(hidden, hidden))[0] for _ in range(3))
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    blocks = [slice(head * size, (head + 1) * size) for head in range(num_heads)]
    for head, offset in enumerate((1, 1, 1, 2, 3)[:num_heads]):
        block = blocks[head]
        first.q_proj.bias[block], first.k_proj.bias[block] = _look_back(offset, size, model)
        first.v_proj.weight[block] += seen[block]
        first.o_proj.weight[:, block] += EMBEDDING_STD * passed_on[block].T
    for head, block in enumerate(blocks):
        matched = blocks[head % 3]
        second.q_proj.weight[block] += MATCH_GAIN * seen[matched]
        second.k_proj.weight[block] += MATCH_GAIN * passed_on[matched]
        second.v_proj.weight[block] += copied[block]
        second.o_proj.weight[:, block] += copied[block].T


def _look_back(offset: int, size: int, model: Qwen2ForCausalLM) -> tuple[torch.Tensor, torch.Tensor]:
    """Biases of queries and keys, ``[size]`` each, whose product is largest at keys ``offset`` tokens before."""
    angles = offset * model.model.rotary_emb.inv_freq
    query, key = torch.zeros(size), torch.zeros(size)
    query[: size // 2] = PREVIOUS_TOKEN_LOGIT
    key[: size // 2] = PREVIOUS_TOKEN_LOGIT * torch.cos(angles)
    key[size // 2 :] = PREVIOUS_TOKEN_LOGIT * torch.sin(angles)
    return query, key


def environment_text(task: str, train_file: Path) -> Iterator[str]:
    """Every message of the demonstrations of the training goals."""
    for conversation in demonstrate(load_items(train_file, task), get_spec(task), "act"):
        yield from (message.content for message in conversation.messages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="textcraft", help="one that has an expert")
    parser.add_argument("--train-file", type=Path, required=True, help="item list of the training goals")
    parser.add_argument("--out", type=Path, required=True, help="folder to write model and tokenizer to")
    parser.add_argument("--vocab-size", type=int, default=1500)
    parser.add_argument("--hidden-size", type=int, default=96)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--num-heads", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    disable_progress_bar()
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer(environment_text(options.task, options.train_file), options.vocab_size)
    model = make_model(
        len(tokenizer),
        hidden_size=options.hidden_size,
        num_layers=options.num_layers,
        num_heads=options.num_heads,
        eos_token_id=tokenizer.eos_token_id,
    )
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(f"base model: {model.num_parameters():,} parameters, {len(tokenizer)} tokens in {options.out}")


if __name__ == "__main__":
    main()
