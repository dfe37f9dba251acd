"""The documentation as a site: whole, without a warning, and with nothing that a browser fetches from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.documents import ROOT, pages


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    # With --quiet, --strict would not hear of warnings.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr
    return folder


def test_the_site_is_built_without_a_warning(site: Path) -> None:
    assert (site / "index.html").is_file() and (site / "search" / "search_index.json").is_file()
    assert not (ROOT / "site").exists()


def html_pages(site: Path) -> list[Path]:
    return sorted(path for path in site.rglob("*.html") if path.name != "404.html")


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Attribute and address of all that a page loads or leads to."""
    yield from re.findall(r'(src|href)="([^"]*)"', page.read_text(encoding="utf-8"))


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in html_pages(site):
        text = page.read_text(encoding="utf-8")
        loaded = [address for kind, address in links(page) if kind == "src"]
        loaded += re.findall(r'<link [^>]*href="([^"]*)"', text)
        assert [address for address in loaded if urlsplit(address).netloc] == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", sheet.read_text(encoding="utf-8")), sheet


def test_every_link_within_the_site_leads_to_a_file(site: Path) -> None:
    for page in html_pages(site):
        for _, address in links(page):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc or not parts.path:
                continue
            assert os.path.exists(os.path.normpath(page.parent / parts.path)), (page, address)


def test_every_page_of_the_project_is_in_the_site(site: Path) -> None:
    texts = "\n".join(path.read_text(encoding="utf-8") for path in html_pages(site) if "source" not in path.parts)
    for page in pages():
        title = page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        if page != ROOT / "README.md":
            assert f">{title}<a" in texts, page


def test_links_of_pages_lead_somewhere_in_the_repository_too() -> None:
    for page in pages():
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for address in re.findall(r"\]\(([^)\s]+)\)", text):
            parts = urlsplit(address)
            if not parts.scheme and parts.path:
                assert (page.parent / parts.path).exists(), (page, address)


def test_sources_that_pages_name_are_pages_of_the_site(site: Path) -> None:
    shown = (site / "source" / "verl" / "trainer" / "core_algos" / "advantages.py.html").read_text(encoding="utf-8")
    assert "reinforce_plus_plus_baseline" in shown
    search = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    assert '"location": "source/' not in search and '"location": "concepts/tokens.html' in search
