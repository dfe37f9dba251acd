"""Files that a reader finds whole or as they were."""

from __future__ import annotations

import errno

import pytest

from agentgym_rl.files import whole_file, write_whole


@pytest.mark.parametrize("before", [None, "the old text"])
def test_a_file_that_could_not_be_written_is_as_it_was_and_leaves_nothing_beside_it(tmp_path, before):
    path = tmp_path / "notes.txt"
    if before is not None:
        write_whole(path, before)

    def write_half() -> None:
        with whole_file(path) as file:
            file.write(b"half of the new")
            assert (path.read_text() if path.exists() else None) == before
            raise OSError(errno.ENOSPC, "no space left")

    with pytest.raises(OSError, match="no space"):
        write_half()
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == ([("notes.txt", before)] if before else [])


@pytest.mark.parametrize("outlives_power_cut", [True, False])
def test_what_is_written_takes_the_place_of_what_was_there(tmp_path, outlives_power_cut):
    path = tmp_path / "notes.txt"
    write_whole(path, "a long text of before")
    with whole_file(path, outlives_power_cut=outlives_power_cut) as file:
        file.write("né".encode())
    assert [(each.name, each.read_text(encoding="utf-8")) for each in tmp_path.iterdir()] == [("notes.txt", "né")]
