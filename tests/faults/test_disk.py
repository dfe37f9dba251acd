"""The fault run's disks: full when they are to be, with room again afterwards, and what was written is kept."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

EXPERIMENTS = Path(__file__).parents[2] / "scripts" / "experiments"

WRITER = """
import sys
for line in sys.stdin:
    try:
        with open(line.strip(), "wb") as file:
            file.write(bytes(10**6))
        print(0, flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""


@pytest.fixture
def disk_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    from fault_run import disk

    return disk


@pytest.fixture
def writer() -> Iterator[subprocess.Popen[str]]:
    """Another process, which writes a megabyte to each path that it is told and answers with the error's number."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def written(writer: subprocess.Popen[str], path: Path) -> int:
    assert writer.stdin is not None and writer.stdout is not None
    print(path, file=writer.stdin, flush=True)
    return int(writer.stdout.readline())


def assert_fills_and_frees(disk: Any, writer: subprocess.Popen[str], error: int) -> None:
    assert written(writer, disk.folder / "before") == 0
    disk.fill([writer.pid], room_bytes=1000)
    assert written(writer, disk.folder / "while full") == error
    disk.free([writer.pid])
    assert written(writer, disk.folder / "after") == 0
    disk.close()
    assert (disk.folder / "before").stat().st_size == (disk.folder / "after").stat().st_size == 10**6


def test_a_limit_on_the_size_of_files_fills_a_plain_folder(disk_module: Any, writer: Any, tmp_path: Path) -> None:
    assert_fills_and_frees(disk_module.LimitedFiles(tmp_path / "disk"), writer, errno.EFBIG)


def test_a_file_system_of_its_own_is_full_for_everyone(disk_module: Any, writer: Any, tmp_path: Path) -> None:
    disk = disk_module.make_disk(tmp_path / "disk")
    if not isinstance(disk, disk_module.MemoryDisk):
        pytest.skip("only root may mount")
    assert_fills_and_frees(disk, writer, errno.ENOSPC)
    assert not os.path.ismount(disk.folder)
