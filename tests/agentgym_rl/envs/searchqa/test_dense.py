"""The dense retriever, with a tiny random encoder: texts that share words are near each other even so."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from agentgym_rl.envs.searchqa import dense
from agentgym_rl.envs.searchqa.corpus import Corpus
from agentgym_rl.envs.searchqa.dense import DenseRetriever, Encoder
from agentgym_rl.errors import ConfigError

faiss = pytest.importorskip("faiss")

TEXTS = ("Nairobi is the capital of Kenya", "Bamako lies on the river Niger", "Tokyo has many trains")


def make_encoder(folder: Path, *, seed: int = 0, size: int = 32) -> Path:
    words = ["[PAD]", "[UNK]", "query", "passage", ":", *sorted({word for text in TEXTS for word in text.split()})]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=size,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=300,
        initializer_range=0.5,
    )
    BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"contents": f"{text.split()[0]}\n{text}"}) + "\n" for text in TEXTS))
    return Corpus.open(path, tmp_path / "cache")


def open_dense(corpus: Corpus, encoder: Path, cache: Path, index: Path | None = None) -> DenseRetriever:
    return DenseRetriever.open(corpus, cache, encoder=str(encoder), index=index)


def test_vectors_have_unit_length_whatever_else_is_in_the_batch(encoder: Path) -> None:
    loaded = Encoder(str(encoder))
    together = loaded.encode(["query: Kenya", "query: the river Niger lies on the river Niger"], 64)
    alone = loaded.encode(["query: Kenya"], 64)
    assert together.shape == (2, 32)
    assert (together**2).sum(1) == pytest.approx([1, 1], abs=1e-5)
    assert together[0] == pytest.approx(alone[0], abs=1e-5)  # padding takes no part in the mean


def test_the_nearest_passages_are_found(corpus: Corpus, encoder: Path, tmp_path: Path) -> None:
    retriever = open_dense(corpus, encoder, tmp_path / "cache")
    for text in TEXTS:
        assert retriever.search(text, 1)[0].text == text
    assert len(retriever.search("Kenya", 99)) == 3
    assert retriever.search(" ", 3) == []
    assert len(retriever.search("Kenya " * 100_000 + "Ünïcödé \ud83d", 1)) == 1


def test_the_index_is_kept_for_this_encoder_and_made_anew_for_another(
    corpus: Corpus, encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    open_dense(corpus, encoder, cache)
    assert len(list(cache.glob("dense-*[0-9a-f]"))) == 1
    other = make_encoder(tmp_path / "other", seed=1)
    open_dense(corpus, other, cache)
    assert len(list(cache.glob("dense-*[0-9a-f]"))) == 2
    monkeypatch.setattr(dense, "_build_index", None)
    open_dense(corpus, encoder, cache)


def test_an_index_that_does_not_fit_is_refused(corpus: Corpus, encoder: Path, tmp_path: Path) -> None:
    cache, given = tmp_path / "cache", tmp_path / "given.faiss"
    for size, width, message in ((2, 32, "holds 2 vectors, the corpus .* has 3"), (3, 8, "have 8 features, .* 32")):
        index = faiss.IndexFlatIP(width)
        index.add(Encoder(str(encoder)).encode(list(TEXTS[:size]), 64)[:, :width].copy())
        faiss.write_index(index, str(given))
        with pytest.raises(ConfigError, match=message):
            open_dense(corpus, encoder, cache, given)
    given.write_text("no index")
    with pytest.raises(ConfigError, match="is no FAISS index"):
        open_dense(corpus, encoder, cache, given)


def test_what_is_missing_is_said(
    corpus: Corpus, encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"encoder='.*empty': does not load"):
        open_dense(corpus, tmp_path / "empty", tmp_path / "cache")
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ConfigError, match=r"needs faiss: run pip install 'agentgym-rl\[searchqa-dense\]'"):
        open_dense(corpus, encoder, tmp_path / "cache")
