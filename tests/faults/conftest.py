"""The model that runs which are stopped start from."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models import tiny_qwen2
from support.tokenizers import make_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Qwen2 with a ChatML tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), make_tokenizer()
    tiny_qwen2(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
