"""Headless Chromium for tests of pages: one browser, and pages that tell of everything that went wrong in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

from agentgym_rl.envs.webarena.browser import find_chromium

_FLAGS = ["--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking"]
_WAIT_MS = 20_000


@contextmanager
def headless_chromium() -> Iterator[Browser]:
    """A browser; starting it takes a second, so share it."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(find_chromium(None)), args=_FLAGS, chromium_sandbox=False
        )
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page of its own context, and what happened in it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.troubles: list[str] = []
        """Errors of scripts, refusals of the Content-Security-Policy, dialogs."""
        self.hosts: set[str] = set()
        """Whom the page asked."""
        page.on("pageerror", lambda error: self.troubles.append(f"error: {error}"))
        page.on("console", self._note)
        page.on("dialog", self._refuse)
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))

    def _note(self, message: Any) -> None:
        # What a call answered is the test's matter: pages tell of it, and Chromium logs it besides.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.troubles.append(f"console: {message.text}")

    def _refuse(self, dialog: Any) -> None:
        self.troubles.append(f"dialog: {dialog.message}")
        dialog.dismiss()


@contextmanager
def watched_page(browser: Browser, **options: Any) -> Iterator[Watched]:
    """A page; its end raises AssertionError where scripts failed, were refused or opened a dialog.

    ``options``: of Playwright's ``new_context``.
    """
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    try:
        page = context.new_page()
        page.set_default_timeout(_WAIT_MS)
        watched = Watched(page)
        yield watched
        assert not watched.troubles, f"the page: {watched.troubles}"
    finally:
        context.close()


def serious_findings(page: Page) -> list[str]:
    """What axe finds serious or critical for readers who cannot see, hear or point."""
    return [
        f"{each['id']}: {node['html'][:200]}"
        for each in Axe().run(page).response["violations"]
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]
