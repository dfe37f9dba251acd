"""Finding passages by embeddings: an E5 encoder and a FAISS index. Loaded only when it is chosen.

Texts are embedded as the E5 models were trained (Wang et al., "Text Embeddings by Weakly-Supervised Contrastive
Pre-training", 2022): ``query: `` or ``passage: `` before the text, the mean over its tokens, unit length. The inner
product of two is then their similarity.

Axes: ``N`` texts, ``T`` tokens of the longest, ``D`` features.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentgym_rl.envs.searchqa.corpus import Corpus, Passage
from agentgym_rl.envs.searchqa.files import made_once
from agentgym_rl.envs.searchqa.retrievers import MAX_QUERY_WORDS, Retriever
from agentgym_rl.errors import ConfigError

_INDEX_FILE = "passages.faiss"
_BATCH = 64
_MAX_PASSAGE_TOKENS = 256
_MAX_QUERY_TOKENS = 256
_MISSING = "the dense retriever needs {}: run pip install 'agentgym-rl[searchqa-dense]'"


class Encoder:
    """Texts to unit vectors. Safe to use from several threads."""

    def __init__(self, name: str) -> None:
        """``name``: of a model on the Hugging Face hub, or a folder; raises `ConfigError` when it does not load."""
        try:
            import torch
            from transformers import AutoModel, AutoTokenizer
        except ImportError as error:
            raise ConfigError(_MISSING.format(error.name)) from None
        self._torch = torch
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(name)
            self._model = AutoModel.from_pretrained(name).to(self._device).eval()
        except (OSError, ValueError) as error:
            raise ConfigError(f"encoder={name!r}: does not load: {error}") from error
        # A fast tokenizer keeps its truncation as a state, and one encoding at a time fills the device.
        self._lock = threading.Lock()

    def encode(self, texts: Sequence[str], max_tokens: int) -> np.ndarray:
        """float32 ``[N, D]``."""
        with self._lock, self._torch.inference_mode():
            inputs = self._tokenizer(
                list(texts), max_length=max_tokens, truncation=True, padding=True, return_tensors="pt"
            ).to(self._device)
            states_NTD = self._model(**inputs).last_hidden_state.float()
            mask_NT1 = inputs["attention_mask"].unsqueeze(-1).to(states_NTD.dtype)
            means_ND = (states_NTD * mask_NT1).sum(1) / mask_NT1.sum(1)
            vectors: np.ndarray = self._torch.nn.functional.normalize(means_ND, dim=-1).cpu().numpy()
            return vectors


class DenseRetriever(Retriever):
    """The passages whose embeddings are nearest to that of the query."""

    def __init__(self, corpus: Corpus, encoder: Encoder, index: Path, name: str) -> None:
        """``index``: a FAISS file with one vector per passage, in the corpus's order; it is memory-mapped."""
        faiss = _faiss()
        self._corpus = corpus
        self._encoder = encoder
        self._name = name
        try:
            self._index: Any = faiss.read_index(str(index), faiss.IO_FLAG_MMAP)
        except RuntimeError as error:
            raise ConfigError(f"dense_index={index}: is no FAISS index: {error}") from None
        if self._index.ntotal != len(corpus):
            raise ConfigError(
                f"dense_index={index}: holds {self._index.ntotal} vectors, the corpus {corpus.path} has {len(corpus)} "
                "passages"
            )
        width = encoder.encode(["query: "], _MAX_QUERY_TOKENS).shape[1]
        if self._index.d != width:
            raise ConfigError(
                f"dense_index={index}: its vectors have {self._index.d} features, those of encoder {name!r} {width}"
            )

    @classmethod
    def open(cls, corpus: Corpus, cache: Path, *, encoder: str, index: Path | None) -> DenseRetriever:
        """With the index given, or one that is made in ``cache`` where there is none for this corpus and encoder."""
        _faiss()
        loaded = Encoder(encoder)
        if index is None:
            folder = made_once(
                cache / f"dense-{_identity(encoder)}-{corpus.digest}",
                lambda folder: _build_index(corpus, loaded, folder),
            )
            index = folder / _INDEX_FILE
        return cls(corpus, loaded, index, encoder)

    def search(self, query: str, top_k: int) -> list[Passage]:
        text = " ".join(query.split()[:MAX_QUERY_WORDS])
        if not text:
            return []
        vector = self._encoder.encode([f"query: {text}"], _MAX_QUERY_TOKENS)
        _, numbers = self._index.search(vector, min(top_k, len(self._corpus)))
        return [self._corpus[int(number)] for number in numbers[0] if number >= 0]

    def describe(self) -> str:
        return f"{self._name} over {len(self._corpus):,} passages of {self._corpus.path}"


def _identity(encoder: str) -> str:
    """Names an encoder; one in a folder by its files too, so that other weights get another index."""
    files = sorted(path for path in Path(encoder).glob("*") if path.is_file()) if Path(encoder).is_dir() else []
    seen = [encoder, *(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files)]
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()[:12]


def _build_index(corpus: Corpus, encoder: Encoder, folder: Path) -> None:
    faiss, index = _faiss(), None
    for batch in _batches(corpus.passages("embedding", show=True)):
        vectors = encoder.encode([f"passage: {passage.contents}" for passage in batch], _MAX_PASSAGE_TOKENS)
        index = faiss.IndexFlatIP(vectors.shape[1]) if index is None else index
        index.add(vectors)
    faiss.write_index(index, str(folder / _INDEX_FILE))


def _batches(passages: Iterable[Passage]) -> Iterable[list[Passage]]:
    iterator = iter(passages)
    while batch := list(itertools.islice(iterator, _BATCH)):
        yield batch


def _faiss() -> Any:
    try:
        import faiss
    except ImportError:
        raise ConfigError(_MISSING.format("faiss")) from None
    return faiss
