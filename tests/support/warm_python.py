"""A Python that has imported torch and the trainer already, for tests that run many of its programs.

`warm_python` makes a folder with the commands ``python`` and ``agentgym-rl``, to stand first in PATH. A program of
``verl.agent_trainer``, ``python -m verl.agent_trainer.main_ppo ...``, then runs as ever - in a process, folder and
environment of its own, with its own arguments, files and exit status - but its process is a fork of one that has done
the imports, which take several times as long as a small run. Everything else is started as usual.
"""

from __future__ import annotations

import array
import json
import os
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

_WARM = "verl.agent_trainer."
_IMPORTED_BEFORE = ("verl.trainer.ppo", "verl.workers.hybrid", "transformers.models.qwen2.modeling_qwen2")
_START_S = 280.0
_CLIENT = """#!{python} -S
import array, json, os, socket, sys
arguments = sys.argv[1:]
if arguments[:1] != ["-m"] or not arguments[1].startswith({warm!r}):
    os.execv({python!r}, [{python!r}, *arguments])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    fds = array.array("i", [0, 1, 2])
    order = json.dumps({{"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}}).encode()
    server.sendmsg([len(order).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
    server.sendall(order)
    sys.exit(int(server.recv(8) or b"1"))
"""


@contextmanager
def warm_python(folder: Path) -> Iterator[Path]:
    """The folder of the commands; the process behind them ends with the block. ``folder`` must have a short path."""
    address, commands = folder / "warm", folder / "bin"
    commands.mkdir()
    _write(commands / "python", _CLIENT.format(python=sys.executable, warm=_WARM, address=str(address)))
    process = subprocess.Popen([sys.executable, "-P", __file__, str(address)], stdin=subprocess.PIPE)
    try:
        end = time.monotonic() + _START_S
        while not address.exists():
            assert process.poll() is None and time.monotonic() < end, "the process that imports ahead did not start"
            time.sleep(0.05)
        yield commands
    finally:
        process.kill()
        process.communicate()


def _write(path: Path, program: str) -> None:
    path.write_text(program, encoding="utf-8")
    path.chmod(0o755)


# ------------------------------------------------------------------------------------------------- the process behind


def _serve(address: str) -> NoReturn:
    for module in _IMPORTED_BEFORE:
        __import__(module)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.part")
    listener.listen()
    os.rename(f"{address}.part", address)
    while True:
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _answer(client)
        client.close()
        while _has_ended_child():
            pass


def _has_ended_child() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _answer(client: socket.socket) -> NoReturn:
    """Run the program that the client names in a child, and tell its status."""
    fds = array.array("i")
    head, ancillary, _, _ = client.recvmsg(4, socket.CMSG_LEN(3 * fds.itemsize))
    for _level, _type, data in ancillary:
        fds.frombytes(data)
    text = b""
    while len(text) < int.from_bytes(head, "big"):
        text += client.recv(65536)
    pid = os.fork()
    if pid == 0:
        client.close()
        _run(json.loads(text), list(fds))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    client.sendall(str(status if status >= 0 else 128 - status).encode())
    os._exit(0)


def _run(order: dict[str, Any], fds: list[int]) -> NoReturn:
    for target, source in enumerate(fds):
        os.dup2(source, target)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    module = order["arguments"][1]
    sys.argv[1:] = order["arguments"][2:]
    sys.path.insert(0, order["folder"])
    status = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    _serve(sys.argv[1])
