"""SearchQA as served: its wire forms to the byte, its settings, its faults, its client."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from support.servers import serve, serve_process

from agentgym_rl.envs.registry import EnvSpec
from agentgym_rl.envs.searchqa import RetrieverKind, SearchQAClient, SearchQASettings, configured
from agentgym_rl.envs.server import build_app
from agentgym_rl.errors import ConfigError, EnvServerError

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    question = {"id": "0", "question": "Wo liegt Köln?", "golden_answers": ["am Rhein", "Deutschland"]}
    (folder / "questions.jsonl").write_text(json.dumps(question) + "\n")
    (folder / "corpus.jsonl").write_text(json.dumps({"id": "0", "contents": 'Köln\nKöln liegt "am Rhein".'}) + "\n")
    return folder


def of(files: Path, **settings: Any) -> EnvSpec:
    chosen = {"questions": files / "questions.jsonl", "corpus": files / "corpus.jsonl", "cache": files / "cache"}
    return configured(SearchQASettings(**(chosen | settings)))


@pytest.fixture(scope="module")
def url(files: Path) -> Iterator[str]:
    with serve(build_app(of(files))) as url:
        yield url


def post(url: str, path: str, **fields: Any) -> requests.Response:
    return requests.post(f"{url}/{path}", json=fields, timeout=30)


def test_every_answer_to_the_byte(url: str) -> None:
    created = post(url, "create", id=0)
    assert re.fullmatch(rb"\d+", created.content)
    handle = created.json()
    start = (
        '"Find out the answer to the question. Write <search>words</search> to look something up, and '
        '<answer>text</answer>, as short as can be, once you know it.\\n\\n Question: Wo liegt Köln?"'
    )
    assert post(url, "reset", env_idx=handle, id=0).content.decode() == start
    observed = requests.get(f"{url}/observation", params={"env_idx": handle}, timeout=30)
    assert observed.content.decode() == start
    assert post(url, "step", env_idx=handle, action="<search>koln</search>").content.decode() == (
        '{"observation":"<information>Doc 1(Title: Köln) Köln liegt \\"am Rhein\\".</information>",'
        '"reward":0,"done":false,"info":{}}'
    )
    assert post(url, "step", env_idx=handle, action="<answer>am Main</answer>").content == (
        b'{"observation":"That is not the answer.","reward":0,"done":false,"info":{"f1":0.5,"exact_match":0.0}}'
    )
    assert post(url, "step", env_idx=handle, action="<answer>Am Rhein!</answer>").content == (
        b'{"observation":"Right.","reward":1,"done":true,'
        b'"info":{"f1":1.0,"exact_match":1.0,"golden_answers":["am Rhein","Deutschland"]}}'
    )
    after = post(url, "step", env_idx=handle, action="<answer>Am Rhein!</answer>")
    assert (after.status_code, list(after.json())) == (400, ["detail"])
    assert post(url, "close", env_idx=handle).content == b"true"
    assert post(url, "close", env_idx=handle).content == b"false"


@pytest.mark.parametrize("body", [None, {}, {"id": None}])
def test_an_item_in_create_may_be_absent(url: str, body: Any) -> None:
    handle = requests.post(f"{url}/create", json=body, timeout=30).json()
    assert isinstance(handle, int)
    post(url, "close", env_idx=handle)


def test_a_part_of_the_original_data_without_item_0_can_be_played(files: Path, tmp_path: Path) -> None:
    (tmp_path / "bamboogle").mkdir()
    (tmp_path / "bamboogle" / "test.jsonl").write_text((files / "questions.jsonl").read_text())
    with serve(build_app(of(files, questions=tmp_path))) as url, SearchQAClient(url) as client:
        assert client.reset(51588).endswith("Wo liegt Köln?")
        with pytest.raises(EnvServerError, match=r"HTTP 400: .*item 51589: not among the questions"):
            client.reset(51589)


def test_the_client_plays_an_episode(url: str) -> None:
    with SearchQAClient(url) as client:
        assert client.reset(0) == client.observe()
        assert client.available_actions() == ["<search>Wo liegt Köln?</search>", "<answer>text</answer>"]
        found = client.step("Thought: I look.\nAction: <search>Köln</search>")
        assert "am Rhein" in found.state
        assert (found.reward, found.done, client.viewer_state) == (0.0, False, None)
        right = client.step("Action: <answer>Deutschland</answer>")
        assert (right.reward, right.done) == (1.0, True)
        assert client.viewer_state == {"golden_answers": ["am Rhein", "Deutschland"]}
        client.reset(0)
        assert client.viewer_state is None
        assert len(client.conversation_start) == 2


def test_a_retriever_that_fails_is_a_fault_and_never_a_reward(files: Path) -> None:
    dead = of(files, corpus=None, retriever=RetrieverKind.REMOTE, retriever_url="http://127.0.0.1:9")
    with serve(build_app(dead)) as url, SearchQAClient(url) as client:
        client.reset(0)
        with pytest.raises(EnvServerError, match=r"HTTP 500: .*EnvUnreachable: retriever http://127.0.0.1:9/retrieve"):
            client.step("<search>Köln</search>")
        assert client.step("<answer>Deutschland</answer>").reward == 1.0


def test_the_command_serves_with_two_processes_and_its_settings(files: Path) -> None:
    options = [f"--{name}={files / name}.jsonl" for name in ("questions", "corpus")]
    with serve_process("searchqa", *options, f"--cache={files / 'other'}", "--max-answers=1", "--workers=2") as server:
        for _ in range(4):
            with SearchQAClient(server.url) as client:
                client.reset(0)
                assert "am Rhein" in client.step("<search>Köln</search>").state
                assert client.step("<answer>am Main</answer>").done


def test_the_data_is_made_ahead_by_a_command(files: Path, tmp_path: Path) -> None:
    options = [f"--{name}={files / name}.jsonl" for name in ("questions", "corpus")]
    made = subprocess.run(
        [sys.executable, "-m", "agentgym_rl.envs.searchqa", *options],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert made.stdout.startswith(f"1 questions of {files / 'questions.jsonl'}, BM25 over 1 passages of ")
    assert list((tmp_path / "agentgym-rl" / "searchqa").glob("bm25-*"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": 0}, "top_k=0: must be at least 1"),
        ({"max_answers": 0}, "max_answers=0: must be at least 1"),
        ({"retriever_timeout": 0.0}, "retriever_timeout=0: must be above 0"),
        ({"retriever": RetrieverKind.REMOTE}, "an address goes with retriever=remote"),
        ({"retriever_url": "http://x"}, "an address goes with retriever=remote"),
        ({"questions": Path("q.jsonl")}, "questions=q.jsonl: name their corpus too"),
        ({"corpus": Path("c.jsonl")}, "corpus=c.jsonl: name the questions on it too"),
        ({"dense_index": Path("i")}, "dense_index=i: goes with retriever=dense"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SearchQASettings(**settings)
