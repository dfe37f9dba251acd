"""Who may ask the viewer, and what its answers forbid the browser."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from support.viewer import make_trajectory, write_rows

from agentgym_rl.viewer.app import build_app
from agentgym_rl.viewer.library import Library
from agentgym_rl.viewer.security import Access

ORIGIN = "http://127.0.0.1:9"


def client(folder: Path, access: Access | None = None) -> TestClient:
    return TestClient(build_app(Library(folder), access=access), base_url=ORIGIN, follow_redirects=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_rows(tmp_path / "runs/0.jsonl", [make_trajectory(1)])
    (tmp_path / "secret.txt").write_text("secret")
    return tmp_path / "runs"


@pytest.mark.parametrize("path", ["/", "/static/js/main.js", "/api/runs", "/api/trajectories/none", "/nowhere"])
def test_every_answer_forbids_what_untrusted_text_could_do(folder: Path, path: str) -> None:
    headers = client(folder).get(path).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'" and policy["style-src"] == "'self'"
    assert policy["connect-src"] == "'self'" and policy["frame-ancestors"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1:8000", True),
        ("localhost:8000", True),
        ("[::1]:80", True),
        ("192.168.7.9", True),
        (socket.gethostname(), True),
        ("chosen.example:1", True),
        ("rebound.example", False),
        ("localhost.rebound.example", False),
        ("127.0.0.1.rebound.example", False),
        ("[::1", False),
        ("", False),
    ],
)
def test_only_names_of_this_machine_may_stand_in_the_host_header(folder: Path, host: str, allowed: bool) -> None:
    access = Access(host_names=frozenset({"chosen.example"}))
    status = client(folder, access).get("/api/runs", headers={"host": host}).status_code
    assert status == (200 if allowed else 421)


def test_with_a_token_nothing_is_answered_without_it(folder: Path) -> None:
    guarded = client(folder, Access(token="täglich 1"))
    for path in ("/", "/api/runs", "/static/app.css", "/?token=wrong", "/api/runs?token=t%C3%A4glich%201"):
        assert guarded.get(path).status_code == 401
    assert guarded.get("/api/runs", headers={"cookie": "agentgym_viewer_9=wrong; ="}).status_code == 401
    entry = guarded.get("/?token=t%C3%A4glich%201")
    assert (entry.status_code, entry.headers["location"]) == (303, "/")
    assert "HttpOnly" in entry.headers["set-cookie"] and "samesite=strict" in entry.headers["set-cookie"].lower()
    assert guarded.get("/api/runs").status_code == 200  # by the cookie


def test_a_program_sends_the_token_in_a_header(folder: Path) -> None:
    guarded = client(folder, Access(token="abc"))
    assert guarded.get("/api/runs", headers={"authorization": "Bearer abc"}).status_code == 200
    assert guarded.get("/api/runs", headers={"authorization": "Bearer abcd"}).status_code == 401


def test_pages_of_other_sites_cannot_ask_for_anything_to_be_done(folder: Path) -> None:
    opened = client(folder)
    for origin in ("http://evil.example", "null", "http://127.0.0.1:8", "http://["):
        assert opened.post("/api/runs", headers={"origin": origin}).status_code == 403
    assert opened.post("/api/runs", headers={"origin": ORIGIN}).status_code == 405
    assert opened.post("/api/runs").status_code == 405


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2fapp.py",
        "/static//etc/passwd",
        "/api/trajectories/..%2f..%2fsecret.txt/raw",
        "/api/trajectories/..%2fsecret.txt-0/raw",
        "/api/trajectories/-0/raw",
        "/api/trajectories/%00-0/raw",
        "/api/metrics?run=../",
        "/api/metrics?run=/etc",
    ],
)
def test_no_path_leads_out(folder: Path, path: str) -> None:
    answer = client(folder).get(path)
    assert answer.status_code == 404
    assert "secret" not in answer.text.replace("secret.txt", "") and "root:" not in answer.text


def test_files_are_only_read(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    opened = client(folder)
    [row] = opened.get("/api/trajectories").json()["rows"]
    for path in ("/api/runs", "/api/metrics?run=.", "/api/facets", f"/api/trajectories/{row['id']}"):
        assert opened.get(path).status_code == 200
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
