"""Where in an environment's own code a fault arose, and which faults have the same cause."""

from __future__ import annotations

import traceback
from pathlib import Path

_HERE = Path(__file__).parent
"""The modules that run environments; the environments of this project have folders of their own."""


def place_of(error: BaseException) -> str:
    """``file.py, line 13, in step``: the innermost line of the environment's own files; empty where none ran.

    What an environment calls of other packages does not count, and neither do the server and the checks around it.
    """
    frames = traceback.extract_tb(error.__traceback__)
    around = [number for number, frame in enumerate(frames) if Path(frame.filename).parent == _HERE]
    inside = frames[around[-1] + 1 if around else 0 :]
    if not inside:
        return ""
    folder = Path(inside[0].filename).parent
    frame = [frame for frame in inside if Path(frame.filename).is_relative_to(folder)][-1]
    return f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"


def cause_of(error: BaseException) -> str:
    """Equal for faults that one mistake brings about: the same line, or the same promise broken by other values."""
    text, _, _ = str(error).partition(", not ")
    return f"{type(error).__name__} {place_of(error) or text}"


def told(error: BaseException) -> str:
    """The fault in a line: kind, message and place."""
    place = place_of(error)
    return f"{type(error).__name__}: {error}" + (f" ({place})" if place else "")
