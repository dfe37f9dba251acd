"""A checkpoint is written while something else goes on, and what came of it is told once asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from verl.utils import checkpoint
from verl.utils.checkpoint import BackgroundWriter, CheckpointError, SaveOrder


@pytest.fixture
def writer() -> Iterator[BackgroundWriter]:
    writer = BackgroundWriter(commits=True)
    yield writer
    writer.close()


def begin(root: Path, step: int) -> SaveOrder:
    return checkpoint.begin_save(root, step, {"step": step})


def writing(order: SaveOrder, text: str = "weights") -> Callable[[], object]:
    return lambda: (order.folder / "model").write_text(text)


def filling_the_disk() -> None:
    with open("/dev/full", "w") as disk:
        disk.write("weights")


def test_saving_returns_before_the_checkpoint_is_written(writer: BackgroundWriter, tmp_path: Path) -> None:
    order, may_write = begin(tmp_path, 1), threading.Event()
    writer.start(order, [may_write.wait, writing(order)])
    assert writer.finish(wait=False) is None and checkpoint.latest(tmp_path) is None
    may_write.set()
    seconds = writer.finish()
    assert seconds is not None and seconds > 0
    assert writer.finish(wait=False) == seconds, "asking again is harmless: other workers may still be writing"
    final = checkpoint.latest(tmp_path)
    assert final == tmp_path / "global_step_1" and (final / "model").read_text() == "weights"


def test_the_next_save_waits_for_the_one_before(writer: BackgroundWriter, tmp_path: Path) -> None:
    first, may_write, turns = begin(tmp_path, 1), threading.Event(), []
    writer.start(first, [may_write.wait, lambda: turns.append(1)])
    waiting = threading.Thread(target=lambda: writer.start(SaveOrder(tmp_path, 2), [lambda: turns.append(2)]))
    waiting.start()
    assert turns == []
    may_write.set()
    waiting.join()
    assert checkpoint.complete_steps(tmp_path) == [1], "the second begins only when the first is complete"
    with pytest.raises(CheckpointError, match="step 2"):  # nobody has begun its folder
        writer.finish()
    assert turns == [1, 2]


def test_only_the_worker_that_commits_makes_it_complete(tmp_path: Path) -> None:
    writer, order = BackgroundWriter(commits=False), begin(tmp_path, 1)
    writer.start(order, [writing(order)])
    writer.finish()
    writer.close()
    assert checkpoint.latest(tmp_path) is None and order.folder.exists()


def test_a_full_disk_leaves_the_last_complete_checkpoint_and_says_so(writer: BackgroundWriter, tmp_path: Path) -> None:
    for step in (1, 2):
        order = begin(tmp_path, step)
        writer.start(order, [writing(order)])
        writer.finish()
    order = checkpoint.begin_save(tmp_path, 3, {"step": 3}, keep=1)
    writer.start(order, [writing(order), filling_the_disk])
    with pytest.raises(CheckpointError) as raised:
        writer.finish()
    assert str(raised.value) == (
        "the checkpoint of step 3 could not be written: OSError: [Errno 28] No space left on device; "
        f"the last complete one is {tmp_path / 'global_step_2'}"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "global_step_1",
        "global_step_2",
        "latest_checkpointed_iteration.txt",
    ], "half a checkpoint gives its room back, and nothing older goes for it"


def test_a_failure_is_told_before_the_next_checkpoint_is_begun(writer: BackgroundWriter, tmp_path: Path) -> None:
    writer.start(begin(tmp_path, 1), [filling_the_disk])
    with pytest.raises(CheckpointError, match=r"step 1 could not be written.*there is no complete one"):
        writer.start(SaveOrder(tmp_path, 2), [])


def test_a_folder_that_cannot_be_made_is_the_same_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"step 4 could not be written: \w+Error: .*file"):
        begin(tmp_path / "file", 4)
