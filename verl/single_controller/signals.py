"""SIGTERM: a run that is asked to end saves first. Ray, which installs answers of its own, does not change that."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from agentgym_rl.errors import AgentGymError


class Terminated(AgentGymError):
    """The run ended because SIGTERM asked for it, with everything saved that there was to save."""


class StopRequest:
    """Whether this process has been asked to end."""

    def __init__(self) -> None:
        self.is_made = False


@contextmanager
def stop_on_sigterm(on_request: Callable[[], object], *, saying: str) -> Iterator[StopRequest]:
    """Within, the first SIGTERM is noted, calls ``on_request`` and prints ``saying``; a second one is handled as on
    entering.

    An exception from a signal's handler may strike between any two steps, such as the start of a session's thread and
    the note that it exists; a request is heeded where nothing is half done.

    Only the main thread receives signals; in another one nothing is changed.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = signal.getsignal(signal.SIGTERM)

    def note(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, previous)
        request.is_made = True
        on_request()
        # Where the signal struck in the middle of another print, Python refuses this one.
        with contextlib.suppress(RuntimeError):
            print(f"SIGTERM: {saying}; a second SIGTERM ends the run at once", flush=True)

    signal.signal(signal.SIGTERM, note)
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, previous)


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
