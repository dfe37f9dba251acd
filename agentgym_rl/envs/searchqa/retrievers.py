"""Finding the passages that speak of a query: the embedded BM25 index, or a remote server.

(The third way, embeddings, is in `dense`, which alone needs torch.)
"""

from __future__ import annotations

import re
import unicodedata
from abc import ABC, abstractmethod
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import requests

from agentgym_rl.envs.searchqa.corpus import Corpus, Passage, read_passage
from agentgym_rl.envs.searchqa.files import made_once
from agentgym_rl.errors import ConfigError, EnvProtocolError, EnvServerError, EnvTimeout, EnvUnreachable

MAX_QUERY_WORDS = 256
"""Words of a query that are looked at: a model may write pages."""
_SHOWN = 200


class Retriever(ABC):
    """Used from several threads at once."""

    @abstractmethod
    def search(self, query: str, top_k: int) -> list[Passage]:
        """The ``top_k`` best passages, best first; fewer, or none, where fewer fit. Raises `EnvError` when it fails."""

    @abstractmethod
    def describe(self) -> str:
        """What is searched, and how."""


# ---------------------------------------------------------------------------------------------------------------- BM25

_INDEX_FORM = 1
"""Changes with the words that an index is made of, and with what weighs them."""
# Anserini's choice for passages, which are of similar length: a short one is not much better for being short.
_K1, _B = 0.9, 0.4
_WORD = re.compile(r"\w+")
# Lucene's English list, and the words that ask.
_SKIPPED = frozenset(
    _WORD.findall(
        "a an and are as at be but by for if in into is it no not of on or such that the their then there these they "
        "this to was will with what which who whom whose when where why how does did do has have had were",
    )
)


def words(text: str) -> list[str]:
    """The words of a text as the index has them: without case, accents and words that say nothing."""
    if not text.isascii():
        text = "".join(char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char))
    return [word for word in _WORD.findall(text.casefold()) if word not in _SKIPPED]


class BM25Retriever(Retriever):
    """An index in a folder, memory-mapped, so that the processes of a server share it."""

    def __init__(self, corpus: Corpus, folder: Path) -> None:
        self._corpus = corpus
        self._index = _bm25s().BM25.load(folder, mmap=True, show_progress=False)

    @classmethod
    def open(cls, corpus: Corpus, cache: Path) -> BM25Retriever:
        """The index of a corpus, built in ``cache`` where there is none for its content."""
        folder = made_once(cache / f"bm25-{_INDEX_FORM}-{corpus.digest}", lambda folder: _build_index(corpus, folder))
        return cls(corpus, folder)

    def search(self, query: str, top_k: int) -> list[Passage]:
        known = [word for word in words(query)[:MAX_QUERY_WORDS] if word in self._index.vocab_dict]
        if not known:
            return []
        scores = self._index.get_scores(known)
        return [self._corpus[int(number)] for number in best(scores, top_k) if scores[number] > 0]

    def describe(self) -> str:
        return f"BM25 over {len(self._corpus):,} passages of {self._corpus.path}"


def best(scores: np.ndarray, top_k: int) -> np.ndarray:
    """Numbers of the ``top_k`` highest of ``scores [N]``, highest first; of equal ones the first."""
    top_k = min(top_k, len(scores))
    least = np.partition(scores, len(scores) - top_k)[len(scores) - top_k]
    candidates = np.flatnonzero(scores >= least)
    return candidates[np.argsort(-scores[candidates], kind="stable")][:top_k]


def _build_index(corpus: Corpus, folder: Path) -> None:
    vocabulary: dict[str, int] = {}
    documents = []
    for passage in corpus.passages("splitting into words"):
        numbers = (vocabulary.setdefault(word, len(vocabulary)) for word in words(passage.contents))
        documents.append(array("i", numbers))
    if not vocabulary:
        raise ConfigError(f"corpus {corpus.path}: holds no words")
    index = _bm25s().BM25(k1=_K1, b=_B)
    index.index((documents, vocabulary), show_progress=len(documents) >= 200_000)
    index.save(folder, show_progress=False)


def _bm25s() -> Any:
    try:
        import bm25s
    except ImportError:
        raise ConfigError("BM25 needs bm25s: run pip install 'agentgym-rl[envs]'") from None
    return bm25s


# -------------------------------------------------------------------------------------------------------------- remote


class RemoteRetriever(Retriever):
    """A server that speaks Search-R1's ``POST /retrieve``."""

    def __init__(self, url: str, *, timeout_s: float, retries: int = 2) -> None:
        """``url`` with or without ``/retrieve``; ``retries``: further tries after a connection that broke or a 5xx,
        for a search changes nothing and may run twice."""
        self._url = url.rstrip("/").removesuffix("/retrieve") + "/retrieve"
        self._timeout_s = timeout_s
        self._retries = retries

    def search(self, query: str, top_k: int) -> list[Passage]:
        wanted = {"queries": [" ".join(query.split()[:MAX_QUERY_WORDS])], "topk": top_k, "return_scores": True}
        for left in range(self._retries, -1, -1):
            try:
                return self._read(self._post(wanted))
            except (EnvUnreachable, EnvServerError):
                if not left:
                    raise
        raise AssertionError("the last try returns or raises")

    def describe(self) -> str:
        return f"the retriever at {self._url}"

    def _post(self, wanted: dict[str, Any]) -> Any:
        what = f"retriever {self._url}"
        try:
            response = requests.post(self._url, json=wanted, timeout=(5.0, self._timeout_s))
        except requests.ReadTimeout as error:
            raise EnvTimeout(f"{what}: no answer within {self._timeout_s:g} s") from error
        except requests.RequestException as error:
            raise EnvUnreachable(f"{what}: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            kind = EnvServerError if response.status_code >= 500 else EnvProtocolError
            raise kind(f"{what}: HTTP {response.status_code}: {response.text[:_SHOWN]}")
        try:
            return response.json()
        except ValueError:
            raise EnvProtocolError(f"{what}: the answer is not JSON: {response.text[:_SHOWN]}") from None

    def _read(self, content: Any) -> list[Passage]:
        """Entries are ``{"document": ..., "score": ...}``, or bare documents of servers that give no scores."""
        result = content.get("result") if isinstance(content, dict) else None
        if not isinstance(result, list) or len(result) != 1 or not isinstance(result[0], list):
            raise EnvProtocolError(f"retriever {self._url}: expected one list of results, got {str(content)[:_SHOWN]}")
        documents = [entry.get("document", entry) if isinstance(entry, dict) else entry for entry in result[0]]
        try:
            return [read_passage(document, f"retriever {self._url}") for document in documents]
        except ConfigError as error:
            raise EnvProtocolError(str(error)) from None
