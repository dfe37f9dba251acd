"""Work that never ends neither holds up its caller nor the end of the process, whose status stays right."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from verl.single_controller.ending import leave_if_stuck, run_bounded

STUCK = """
import atexit, sys, threading
from verl.single_controller.ending import leave_if_stuck, run_bounded
for_ever = threading.Event()
atexit.register(for_ever.wait)
run_bounded(for_ever.wait, limit_s=0.01)
print("said before the end")
leave_if_stuck(7)
"""


def test_work_is_done_within_its_limit() -> None:
    done: list[str] = []
    run_bounded(lambda: done.append("closed"), limit_s=60)
    assert done == ["closed"]


def test_work_that_came_to_its_end_late_changes_nothing() -> None:
    go_on, ended = threading.Event(), threading.Event()
    threads = set(threading.enumerate())
    run_bounded(lambda: go_on.wait() and ended.set(), limit_s=0.01)
    [thread] = set(threading.enumerate()) - threads
    go_on.set()
    thread.join(60)
    assert ended.is_set()
    leave_if_stuck(7)


@pytest.mark.parametrize("status", [0, 143])
def test_a_process_with_stuck_work_ends_with_its_status_and_its_output(status: int) -> None:
    program = STUCK.replace("7", str(status))
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (status, "said before the end\n")
