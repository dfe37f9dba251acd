from __future__ import annotations

import os
import shutil

import pytest

from agentgym_rl.errors import ConfigError
from verl.utils import checkpoint


def save(root, step, **options):
    folder = checkpoint.begin(root, step)
    checkpoint.save_trainer_state(folder, {"step": step})
    return checkpoint.commit(root, step, **options)


def test_a_committed_checkpoint_is_the_latest_and_named_in_the_file(tmp_path):
    save(tmp_path, 5)
    final = save(tmp_path, 10)
    assert final == tmp_path / "global_step_10" == checkpoint.latest(tmp_path)
    assert (tmp_path / checkpoint.LATEST_FILE).read_text() == "10"
    assert checkpoint.load_trainer_state(final) == {"step": 10} and checkpoint.step_of(final) == 10


def test_killed_while_writing_the_last_complete_one_is_used(tmp_path):
    save(tmp_path, 5)
    half = checkpoint.begin(tmp_path, 6)
    checkpoint.save_trainer_state(half, {"step": 6})
    assert checkpoint.latest(tmp_path) == tmp_path / "global_step_5"
    checkpoint.begin(tmp_path, 7)
    assert not half.exists()


def test_killed_between_rename_and_the_latest_file_the_new_one_is_used(tmp_path):
    save(tmp_path, 5)
    checkpoint.begin(tmp_path, 6).rename(tmp_path / "global_step_6")
    assert checkpoint.latest(tmp_path) == tmp_path / "global_step_6"


def test_old_ones_go_only_after_the_new_one_is_complete(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, keep=2)
    checkpoint.begin(tmp_path, 4)
    assert checkpoint.complete_steps(tmp_path) == [2, 3]
    checkpoint.commit(tmp_path, 4, keep=2)
    assert checkpoint.complete_steps(tmp_path) == [3, 4]


def test_a_run_begun_anew_in_the_folder_of_a_longer_one_goes_on_from_its_own(tmp_path):
    save(tmp_path, 10)
    os.utime(tmp_path / "global_step_10", (1, 1))
    for step in (1, 2, 3):
        save(tmp_path, step, keep=2)
    assert checkpoint.complete_steps(tmp_path) == [2, 3, 10]
    assert checkpoint.latest(tmp_path) == tmp_path / "global_step_3"


def test_killed_while_replacing_a_step_one_of_the_two_is_complete(tmp_path, monkeypatch):
    save(tmp_path, 3)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 3)
    monkeypatch.undo()
    assert checkpoint.latest(tmp_path) == tmp_path / "global_step_3"
    checkpoint.begin(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.glob("*.unfinished")) == ["global_step_4.unfinished"]


def test_saving_a_step_again_replaces_it(tmp_path):
    (save(tmp_path, 3) / "stale").touch()
    assert not (save(tmp_path, 3) / "stale").exists()


def test_resume_modes(tmp_path, monkeypatch):
    assert checkpoint.find_resume_folder(tmp_path / "none", mode="auto") is None
    folder = save(tmp_path, 3)
    assert checkpoint.find_resume_folder(tmp_path, mode="auto") == folder
    assert checkpoint.find_resume_folder(tmp_path, mode="disable") is None
    assert checkpoint.find_resume_folder(tmp_path / "other", mode="resume_path", path=str(folder)) == folder
    monkeypatch.chdir(tmp_path)
    assert checkpoint.find_resume_folder(tmp_path, mode="resume_path", path="global_step_3/") == folder


@pytest.mark.parametrize("path", ["global_step_9", "", None, "global_step_4.unfinished", "global_step_5"])
def test_resuming_from_what_is_no_checkpoint_is_an_error(tmp_path, path):
    checkpoint.begin(tmp_path, 4)
    (tmp_path / "global_step_5").mkdir()
    with pytest.raises(ConfigError, match=r"trainer\.resume_from_path="):
        checkpoint.find_resume_folder(tmp_path, mode="resume_path", path=path and str(tmp_path / path))


def test_a_folder_without_driver_state_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"has no trainer\.json"):
        checkpoint.load_trainer_state(tmp_path)


def test_keys_that_changed_since_a_checkpoint_are_found():
    saved = {"data": {"seed": 0, "shuffle": True, "train_file": "a"}, "seed": 1}
    now = {"data": {"seed": 3, "shuffle": True, "train_file": "a", "new": 4}, "seed": 2}
    keys = ["data.seed", "data.shuffle", "data.new", "data.seed.deeper", "absent.key"]
    assert checkpoint.changed_keys(saved, now, keys) == {"data.seed": (0, 3), "data.new": (None, 4)}
