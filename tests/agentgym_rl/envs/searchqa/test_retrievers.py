"""Corpora and the BM25 index: found, kept, rebuilt, shared; the remote retriever against a scripted server."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from agentgym_rl.envs.searchqa import retrievers
from agentgym_rl.envs.searchqa.corpus import Corpus, Passage
from agentgym_rl.envs.searchqa.retrievers import BM25Retriever, RemoteRetriever, best, words
from agentgym_rl.errors import ConfigError, EnvError, EnvProtocolError, EnvServerError, EnvTimeout, EnvUnreachable

PASSAGES = [
    {"id": "0", "contents": '"Kenya"\nNairobi is the capital of Kenya.'},
    {"id": "1", "contents": "Côte d'Ivoire\nYamoussoukro, not Abidjan, is the capital.\nA second line."},
    {"id": "2", "title": "日本", "text": "Tokyo is the capital of Japan. 東京 \u2028 \U0001f5fc"},
    {"id": "3", "contents": "Empty"},
]


def write_corpus(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def corpus_file(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus.jsonl", PASSAGES)


def open_index(path: Path, cache: Path) -> BM25Retriever:
    return BM25Retriever.open(Corpus.open(path, cache), cache)


def titles(retriever: Any, query: str, top_k: int = 3) -> list[str]:
    return [passage.title for passage in retriever.search(query, top_k)]


# -------------------------------------------------------------------------------------------------------------- corpus


def test_passages_of_both_forms_are_read_in_place(corpus_file: Path, tmp_path: Path) -> None:
    corpus = Corpus.open(corpus_file, tmp_path / "cache")
    assert [corpus[number] for number in range(len(corpus))] == [
        Passage("Kenya", "Nairobi is the capital of Kenya."),
        Passage("Côte d'Ivoire", "Yamoussoukro, not Abidjan, is the capital.\nA second line."),
        Passage("日本", "Tokyo is the capital of Japan. 東京 \u2028 \U0001f5fc"),
        Passage("Empty", ""),
    ]


def test_blank_lines_and_a_missing_last_newline_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('\n{"contents": "a\\nb"}\n\n  \n{"contents": "c\\nd"}')
    corpus = Corpus.open(path, tmp_path / "cache")
    assert [corpus[0].title, corpus[1].title] == ["a", "c"]


def test_a_parquet_corpus_reads_like_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "corpus.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist([row for row in PASSAGES if "contents" in row]), path)
    corpus = Corpus.open(path, tmp_path / "cache")
    assert [corpus[number].title for number in range(len(corpus))] == ["Kenya", "Côte d'Ivoire", "Empty"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no passages"),
        ('{"text": "x"}', "a passage has contents, or title and text; this has text"),
        ("nonsense", "not valid JSON"),
        ('{"contents": "..."}', "holds no words"),
    ],
)
def test_a_file_that_is_no_corpus_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=rf"corpus.jsonl.*{message}"):
        open_index(path, tmp_path / "cache")


# ---------------------------------------------------------------------------------------------------------------- BM25


def test_words_are_without_case_accents_and_what_says_nothing() -> None:
    assert words("What is the Capital of CÔTE D'IVOIRE?") == ["capital", "cote", "d", "ivoire"]
    assert words("Straße 5 №7 \ud800 東京") == ["strasse", "5", "no7", "東京"]


def test_the_best_are_in_order_and_of_equal_ones_the_first() -> None:
    scores = np.array([1, 3, 0, 3, 2, 1], dtype=np.float32)
    assert best(scores, 3).tolist() == [1, 3, 4]
    assert best(scores, 4).tolist() == [1, 3, 4, 0]
    assert best(scores, 99).tolist() == [1, 3, 4, 0, 5, 2]


def test_the_scores_are_those_of_the_formula(tmp_path: Path) -> None:
    """BM25 as Lucene has it, by hand: 2 passages of 2 and 4 words, k1 .9, b .4; ``kenya`` once in the first."""
    path = write_corpus(
        tmp_path / "c.jsonl", [{"contents": "kenya\nnairobi"}, {"contents": "mali\nbamako niger river"}]
    )
    retriever = open_index(path, tmp_path / "cache")
    idf = np.log(1 + (2 - 1 + 0.5) / (1 + 0.5))
    expected = idf * 1 / (1 + 0.9 * (1 - 0.4 + 0.4 * 2 / 3))
    np.testing.assert_allclose(retriever._index.get_scores(["kenya"]), [expected, 0], rtol=1e-6)


def test_a_query_finds_what_speaks_of_it(corpus_file: Path, tmp_path: Path) -> None:
    retriever = open_index(corpus_file, tmp_path / "cache")
    assert titles(retriever, "capital kenya")[0] == "Kenya"
    assert titles(retriever, "COTE d'ivoire?")[0] == "Côte d'Ivoire"
    assert titles(retriever, "東京") == ["日本"]
    assert titles(retriever, "capital", top_k=99) == ["Kenya", "日本", "Côte d'Ivoire"]


@pytest.mark.parametrize("query", ["", "   ", "the of and", "zzz", "?!", "\ud800", "\x00", "<|im_end|>"])
def test_a_query_that_says_nothing_known_finds_nothing(corpus_file: Path, tmp_path: Path, query: str) -> None:
    assert titles(open_index(corpus_file, tmp_path / "cache"), query) == []


def test_a_huge_query_is_read_as_far_as_it_makes_sense(corpus_file: Path, tmp_path: Path) -> None:
    retriever = open_index(corpus_file, tmp_path / "cache")
    started = time.perf_counter()
    assert titles(retriever, "kenya " + "capital " * 300_000)[0] == "Kenya"
    assert titles(retriever, "x" * 2_000_000) == []
    assert time.perf_counter() - started < 10
    assert titles(retriever, "zzz " * retrievers.MAX_QUERY_WORDS + "kenya") == []


def test_an_index_is_built_once_and_again_for_a_changed_corpus(
    corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []
    build = retrievers._build_index

    def counted(corpus: Corpus, folder: Path) -> None:
        built.append(len(corpus))
        build(corpus, folder)

    monkeypatch.setattr(retrievers, "_build_index", counted)
    cache = tmp_path / "cache"
    assert titles(open_index(corpus_file, cache), "kenya") == ["Kenya"]
    assert titles(open_index(corpus_file, cache), "kenya") == ["Kenya"]
    corpus_file.touch()  # another time, the same content
    open_index(corpus_file, cache)
    assert built == [4]
    changed = corpus_file.read_text().replace("Kenya", "Malta")  # another content of the same length
    corpus_file.write_text(changed)
    assert titles(open_index(corpus_file, cache), "kenya") == []
    assert titles(open_index(corpus_file, cache), "malta") == ["Malta"]
    assert built == [4, 4]


def test_what_a_killed_process_left_half_built_is_never_used(corpus_file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    open_index(corpus_file, cache)
    (folder,) = cache.glob("bm25-*[0-9a-f]")
    folder.rename(folder.with_name(folder.name + ".partial"))
    (folder.with_name(folder.name + ".partial") / "vocab.index.json").write_text("{")
    assert titles(open_index(corpus_file, cache), "kenya") == ["Kenya"]
    assert list(cache.glob("*.partial")) == []


BUILD = """
import sys, time
from pathlib import Path
from agentgym_rl.envs.searchqa import retrievers
from agentgym_rl.envs.searchqa.corpus import Corpus

build = retrievers._build_index
def slow(corpus, folder):
    print("building", flush=True)
    time.sleep(0.5)
    build(corpus, folder)
retrievers._build_index = slow
corpus = Corpus.open(Path(sys.argv[1]), Path(sys.argv[2]))
print(retrievers.BM25Retriever.open(corpus, Path(sys.argv[2])).search("kenya", 1)[0].title)
"""


def test_of_two_processes_that_need_an_index_one_builds_it(corpus_file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUILD, str(corpus_file), str(tmp_path / "cache")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = sorted(process.communicate(timeout=60)[0] for process in both)
    assert outputs == ["Kenya\n", "building\nKenya\n"]


# -------------------------------------------------------------------------------------------------------------- remote


@contextmanager
def answering(answer: Callable[[int, Any], tuple[int, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """A server that answers the n-th request, of this body, with a status and JSON (or bytes, or nothing at all)."""
    seen: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, body, dict(self.headers)))
            status, content = answer(len(seen), body)
            if content is None:
                self.connection.close()
                return
            payload = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


FOUND = {"result": [[{"document": {"id": "0", "contents": '"Kenya"\nNairobi.'}, "score": 1.5}]]}


def remote(url: str, timeout_s: float = 5) -> RemoteRetriever:
    return RemoteRetriever(url, timeout_s=timeout_s)


@pytest.mark.parametrize("path", ["", "/", "/retrieve"])
def test_the_request_is_search_r1s(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTGYM_TOKEN", "secret")
    with answering(lambda number, body: (200, FOUND)) as (url, seen):
        assert remote(url + path).search("capital\nof Köln", 3) == [Passage("Kenya", "Nairobi.")]
    ((called, body, headers),) = seen
    assert called == "/retrieve"
    assert body == {"queries": ["capital of Köln"], "topk": 3, "return_scores": True}
    assert "secret" not in str(headers)


def test_documents_without_scores_are_read_too() -> None:
    with answering(lambda number, body: (200, {"result": [[{"contents": "a\nb"}]]})) as (url, _):
        assert remote(url).search("q", 1) == [Passage("a", "b")]


@pytest.mark.parametrize("first", [(500, {"detail": "busy"}), (200, None)])
def test_a_retriever_that_fails_once_is_asked_again(first: tuple[int, Any]) -> None:
    with answering(lambda number, body: first if number == 1 else (200, FOUND)) as (url, seen):
        assert titles(remote(url), "q") == ["Kenya"]
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("answer", "error", "tries"),
    [
        ((500, {"detail": "no GPU"}), EnvServerError, 3),
        ((200, None), EnvUnreachable, 3),
        ((422, {"detail": "topk"}), EnvProtocolError, 1),
        ((200, b"<html>"), EnvProtocolError, 1),
        ((200, {"result": []}), EnvProtocolError, 1),
        ((200, {"result": [[{"document": {"id": 1}, "score": 1}]]}), EnvProtocolError, 1),
        ((200, {"result": [["text"]]}), EnvProtocolError, 1),
        ((200, [1]), EnvProtocolError, 1),
    ],
)
def test_what_a_retriever_fails_at_is_an_error_that_names_it(
    answer: tuple[int, Any], error: type[EnvError], tries: int
) -> None:
    with answering(lambda number, body: answer) as (url, seen), pytest.raises(error, match="retriever http://127"):
        remote(url).search("q", 1)
    assert len(seen) == tries


def test_a_retriever_that_hangs_is_given_up_after_its_time() -> None:
    gate = threading.Event()

    def hang(number: int, body: Any) -> tuple[int, Any]:
        gate.wait(30)
        return 200, FOUND

    with answering(hang) as (url, seen):
        with pytest.raises(EnvTimeout, match=r"no answer within 0.2 s"):
            remote(url, timeout_s=0.2).search("q", 1)
        gate.set()
    assert len(seen) == 1


def test_no_retriever_at_all() -> None:
    with pytest.raises(EnvUnreachable, match=r"retriever http://127\.0\.0\.1:9/retrieve"):
        remote("http://127.0.0.1:9").search("q", 1)
