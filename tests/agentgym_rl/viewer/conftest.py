"""One browser for all tests of the viewer's pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser
from support.chromium import headless_chromium


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with headless_chromium() as running:
        yield running
