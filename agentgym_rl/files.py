"""Files that a reader finds whole or as they were, even after a crash."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def write_whole(path: Path, text: str) -> None:
    """Write a small file in the way of `whole_file`."""
    with whole_file(path) as file:
        file.write(text.encode())


@contextmanager
def whole_file(path: Path, *, outlives_power_cut: bool = True) -> Iterator[BinaryIO]:
    """A file to write that takes the name ``path``, and the place of what had it, when the block ends.

    It is written beside ``path``, and removed when the block raises: on a full disk others need the room.
    ``outlives_power_cut``: wait until it is on the disk first; a rename alone may reach the disk before its content.
    """
    aside = path.with_name(path.name + ".unfinished")
    try:
        with aside.open("wb") as file:
            yield file
            if outlives_power_cut:
                file.flush()
                os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
