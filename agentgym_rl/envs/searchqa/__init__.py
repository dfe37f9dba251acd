"""SearchQA: questions that are answered by searching. See `environment` for the rules and README.md for the data."""

from __future__ import annotations

import functools
import math
import threading
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from agentgym_rl.envs.registry import EnvSpec
from agentgym_rl.envs.searchqa.client import SearchQAClient
from agentgym_rl.envs.searchqa.corpus import Corpus
from agentgym_rl.envs.searchqa.environment import SearchQA
from agentgym_rl.envs.searchqa.factbook import NUM_QUESTIONS, made_factbook, open_factbook
from agentgym_rl.envs.searchqa.files import cache_folder
from agentgym_rl.envs.searchqa.questions import Question, Questions, load_questions
from agentgym_rl.envs.searchqa.retrievers import BM25Retriever, RemoteRetriever, Retriever
from agentgym_rl.envs.wire import DIALECT_B
from agentgym_rl.errors import ConfigError


class RetrieverKind(StrEnum):
    """How passages are found."""

    BM25 = "bm25"
    """An index of words, in this process."""
    DENSE = "dense"
    """Embeddings of an encoder, in this process."""
    REMOTE = "remote"
    """A server that speaks Search-R1's ``POST /retrieve``."""


@dataclass(frozen=True)
class SearchQASettings:
    """What may be chosen when it is served."""

    questions: Path | None = field(
        default=None, metadata={"help": "file or folder of questions; without it, those on the World Factbook"}
    )
    corpus: Path | None = field(
        default=None, metadata={"help": "JSONL or parquet file of passages; without it, the World Factbook"}
    )
    retriever: RetrieverKind = field(
        default=RetrieverKind.BM25, metadata={"help": "how passages are found; bm25 unless given"}
    )
    top_k: int = field(default=3, metadata={"help": "passages that a search shows"})
    max_answers: int | None = field(
        default=None, metadata={"help": "answers of an episode; without it, any number. Train with 1"}
    )
    retriever_url: str = field(default="", metadata={"help": "address of the remote retriever"})
    retriever_timeout: float = field(default=30.0, metadata={"help": "seconds that it may take for an answer"})
    encoder: str = field(
        default="intfloat/e5-base-v2", metadata={"help": "name or folder of the dense retriever's encoder"}
    )
    dense_index: Path | None = field(
        default=None, metadata={"help": "FAISS file of the corpus's embeddings; without it, one is made"}
    )
    cache: Path | None = field(
        default=None, metadata={"help": "folder for what is made from corpora; without it, the user's cache"}
    )

    def __post_init__(self) -> None:
        for name in ("top_k", "max_answers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: must be at least 1")
        if not 0 < self.retriever_timeout < math.inf:
            raise ConfigError(f"retriever_timeout={self.retriever_timeout:g}: must be above 0")
        remote = self.retriever == RetrieverKind.REMOTE
        if remote != bool(self.retriever_url):
            raise ConfigError(
                f"retriever={self.retriever}, retriever_url={self.retriever_url!r}: an address goes with "
                "retriever=remote, and it with an address"
            )
        if self.questions is not None and self.corpus is None and not remote:
            raise ConfigError(f"questions={self.questions}: name their corpus too, or retriever=remote")
        if self.corpus is not None and (self.questions is None or remote):
            other = "retriever=remote searches its own" if remote else "name the questions on it too"
            raise ConfigError(f"corpus={self.corpus}: {other}")
        if self.dense_index is not None and (self.retriever != RetrieverKind.DENSE or self.corpus is None):
            raise ConfigError(f"dense_index={self.dense_index}: goes with retriever=dense and its corpus")


_load_questions = functools.lru_cache(maxsize=4)(load_questions)
_opening = threading.Lock()


def open_questions(settings: SearchQASettings) -> Questions:
    """The questions under these settings; made at the first time where they are the World Factbook's."""
    return _load_questions(settings.questions or open_factbook(cache_folder(settings.cache)).questions)


def made_question(item: int) -> Question | None:
    """The built-in question of an item, for the viewer; None unless the questions were made on this machine before."""
    factbook = made_factbook(cache_folder(None))
    questions = None if factbook is None else _load_questions(factbook.questions)
    return questions[item] if questions is not None and item in questions else None


@functools.lru_cache(maxsize=4)
def _retriever(settings: SearchQASettings) -> Retriever:
    if settings.retriever == RetrieverKind.REMOTE:
        return RemoteRetriever(settings.retriever_url, timeout_s=settings.retriever_timeout)
    cache = cache_folder(settings.cache)
    corpus = Corpus.open(settings.corpus or open_factbook(cache).passages, cache)
    if settings.retriever == RetrieverKind.DENSE:
        from agentgym_rl.envs.searchqa.dense import DenseRetriever

        return DenseRetriever.open(corpus, cache, encoder=settings.encoder, index=settings.dense_index)
    return BM25Retriever.open(corpus, cache)


def open_retriever(settings: SearchQASettings) -> Retriever:
    """What searches under these settings, one per process; its index is built where there is none."""
    with _opening:
        return _retriever(settings)


def make_environment(settings: SearchQASettings) -> SearchQA:
    """A session's environment."""
    return SearchQA(
        open_questions(settings),
        open_retriever(settings),
        top_k=settings.top_k,
        max_answers=settings.max_answers,
    )


def _data_version(settings: SearchQASettings) -> str:
    """Opens everything, so that what is missing is said, and an index built, before a session waits for it."""
    questions = open_questions(settings)
    return f"{len(questions)} questions of {questions.source}, {open_retriever(settings).describe()}"


def configured(settings: SearchQASettings) -> EnvSpec:
    """The environment under these settings; reads the questions where a file of them is named."""
    questions = None if settings.questions is None else _load_questions(settings.questions)
    return EnvSpec(
        name="searchqa",
        title="SearchQA",
        environment=functools.partial(make_environment, settings),
        client=SearchQAClient,
        num_items=NUM_QUESTIONS if questions is None else questions.num_items,
        default_port=36004,
        data_version=functools.partial(_data_version, settings),
        wire=replace(
            DIALECT_B,
            index_field="id",
            create_index_field="id",
            # A session without a named item begins item 0, which a part of the original data may lack.
            starts_on_create=questions is None or 0 in questions,
            created=lambda handle, start: handle,
            stepped=lambda step: {
                "observation": step.observation,
                "reward": step.reward,
                "done": step.done,
                "info": step.info,
            },
        ),
        settings=settings,
        configure=configured,
        expert=lambda environment: environment.solution(),
        panel="agentgym_rl.envs.searchqa.panel:panel",
    )


SPEC = configured(SearchQASettings())
