"""Shares the tests out among the processes of pytest-xdist, and gives all of them the same signals."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

# How long an example takes is a matter of what else the machine does.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


def pytest_configure() -> None:
    """A job that a script starts in the background ignores Ctrl-C, and so would all that the tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep each file's tests in one process, for their shared fixtures, and all of Ray's in one."""
    ray_files = {item.path for item in items if item.get_closest_marker("ray")}
    for item in items:
        item.add_marker(pytest.mark.xdist_group("ray" if item.path in ray_files else str(item.path)))
