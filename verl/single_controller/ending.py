"""Gives a library's clean-up a limited time, and ends the process for certain where that time was not enough."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

_abandoned: list[threading.Thread] = []


def run_bounded(work: Callable[[], object], *, limit_s: float) -> None:
    """Do ``work`` in a thread of its own; return when it is done or after ``limit_s`` seconds."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        thread.join(limit_s)
    finally:  # also when a signal's exception ends the wait
        if thread.is_alive():
            _abandoned.append(thread)


def leave_if_stuck(status: int) -> None:
    """End this process here and now with ``status`` if some bounded work is still going on; else do nothing.

    The interpreter's own end would call the library's exit hooks, which wait for the same thing for ever, and it
    aborts where a thread comes back from native code meanwhile.
    """
    if any(thread.is_alive() for thread in _abandoned):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
