"""Keeps this process's own answer to SIGTERM: Ray replaces it when it is imported and again when it starts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sigterm_handler_kept() -> Iterator[None]:
    """On leaving, SIGTERM is handled as it was on entering; nothing is changed outside the main thread."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # None: it was not set from Python, which cannot set it again then.
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
