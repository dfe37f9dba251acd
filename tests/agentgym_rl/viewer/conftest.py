"""One browser for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser
from support.chromium import headless_chromium


# Not for the session: while Playwright runs, its event loop is that of the thread, and `asyncio.run` fails there.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with headless_chromium() as running:
        yield running
