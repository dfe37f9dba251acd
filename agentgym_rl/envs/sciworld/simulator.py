"""The simulator's Java processes: how they start, are shared and end.

A process holds several worlds. One call at a time enters it, since they share state: a counter of things and a
generator of random numbers. Each call sets both to what its own world has, and tells what it would tell alone.

A process ends with the Python process that started it, however that ends: Java reads a pipe that then breaks.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentgym_rl.envs.sciworld.items import ItemTable, indexed_tasks, package_folder
from agentgym_rl.errors import ConfigError, EnvError

_BASE_HEAP_MB, _WORLD_HEAP_MB = 96, 32
"""One world plays as fast with 128 MB as with Java's default, under which the heap grows to a gigabyte."""
_GOLD_HEAP_MB = 1024
"""The search for some gold sequences takes more than 128 MB."""
_JAVA_OPTIONS = (
    "-XX:+UseSerialGC",
    "-XX:+ExitOnOutOfMemoryError",
    # The simulator lists things in the order of their identity hashes, which are random. Equal ones make it the order
    # in which things were made: the same index and actions then show the same text, in every process.
    "-XX:+UnlockExperimentalVMOptions",
    "-XX:hashCode=2",
    "-XX:+IgnoreUnrecognizedVMOptions",
)
_NO_SIMPLIFICATIONS = ""
_VERSION_TIMEOUT_S = 60.0
_ENDING_S = 2.0
"""Seconds that a process which broke its connection gets to be seen as ended."""
_INSTALL = (
    "install one: `apt-get install default-jre-headless` as root (Debian, Ubuntu), `brew install openjdk` (macOS), "
    "`conda install openjdk`; or set JAVA_HOME"
)


class SimulatorError(EnvError):
    """The simulator failed in a call, or its process has ended."""


# ---------------------------------------------------------------------------------------------------------------- Java


@functools.cache
def java_command() -> str:
    """The Java program that runs the simulator: that of ``JAVA_HOME``, else the one on the path.

    Raises `ConfigError` that says how to install one.
    """
    home = os.environ.get("JAVA_HOME")
    command = shutil.which(str(Path(home, "bin", "java")) if home else "java")
    if command is None:
        missing = f"JAVA_HOME={home} has no bin/java" if home else "there is no `java` on the PATH"
        raise ConfigError(f"SciWorld needs Java 8 or later, and {missing}; {_INSTALL}")
    _check_version(command)
    return command


def _check_version(command: str) -> None:
    """Raise `ConfigError` when the program does not run, or is older than Java 8."""
    try:
        # macOS has a `java` that does nothing but ask for an installation.
        told = subprocess.run(
            [command, "-version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"SciWorld needs Java 8 or later, and {command} does not run: {error}; {_INSTALL}") from error
    found = re.search(r'version "(?:1\.)?(\d+)', told.stderr + told.stdout)
    if found is not None and int(found[1]) < 8:
        raise ConfigError(f"SciWorld needs Java 8 or later, and {command} is Java {found[1]}; {_INSTALL}")


def _launch(heap_mb: int) -> tuple[int, str, subprocess.Popen[bytes]]:
    """Port, token and process of a fresh gateway to Java; raises `SimulatorError` with what Java said."""
    from py4j.java_gateway import launch_gateway

    folder = package_folder()
    with tempfile.TemporaryFile() as said:
        try:
            port, token, process = launch_gateway(
                classpath=str(folder / "scienceworld.jar"),
                java_path=java_command(),
                javaopts=[f"-Xmx{heap_mb}m", *_JAVA_OPTIONS],
                die_on_exit=True,
                enable_auth=True,
                redirect_stderr=said,
                cwd=folder,
                return_proc=True,
            )
        except (OSError, ValueError) as error:  # a line that is no port
            said.seek(0)
            problem = said.read(2000).decode(errors="replace").strip()
            raise SimulatorError(f"the simulator's Java process did not start: {problem or error}") from error
    return port, token, process


# ----------------------------------------------------------------------------------------------------------- processes


class Simulator:
    """One Java process and the worlds in it."""

    def __init__(self, *, heap_mb: int, worlds_ahead: int) -> None:
        """Start it with ``worlds_ahead`` worlds ready. Raises `ConfigError` without Java, else `SimulatorError`."""
        from py4j.java_gateway import GatewayParameters, JavaGateway

        # It writes tracebacks about a process that has ended; our exception says so.
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
        self._lock = threading.Lock()
        # The token keeps other users of this machine from running code in the process.
        port, token, self.process = _launch(heap_mb)
        self._gateway = JavaGateway(
            gateway_parameters=GatewayParameters(port=port, auth_token=token, auto_field=True),
            java_process=self.process,
        )
        self.worlds_in_use = 0
        self._idle: list[World] = []
        self._entered: World | None = None
        """The world whose count of things the simulator has now."""
        try:
            self._counter = self.run("finding its counter", lambda java: _singleton(java.util, "UniqueIdentifier"))
            self._dice = self.run("finding its dice", lambda java: _singleton(java.scala.util, "Random"))
            self._idle += [self._new_world() for _ in range(worlds_ahead)]
        except SimulatorError:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def take(self) -> World:
        """A world, in which anything may be loaded."""
        world = self._idle.pop() if self._idle else self._new_world()
        self.worlds_in_use += 1
        return world

    def give_back(self, world: World) -> None:
        self.worlds_in_use -= 1
        self._idle.append(world)

    def close(self) -> None:
        """End the process; its worlds are of no use afterwards."""
        self._gateway.shutdown()
        self.process.kill()  # it has nothing to save
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def run(self, what: str, work: Callable[[Any], Any]) -> Any:
        """What ``work`` returns, which is given Java's classes, alone in the process; raises `SimulatorError`."""
        from py4j.protocol import Py4JError, Py4JJavaError

        with self._lock:
            try:
                return work(self._gateway.jvm)
            except Py4JJavaError as error:
                problem = str(error.java_exception).splitlines()[0]
                raise SimulatorError(f"the simulator failed in {what}: {problem}") from None
            except (Py4JError, OSError) as error:
                raise SimulatorError(self._why_no_answer(what, error)) from None

    def enter(self, world: World, seed: int) -> None:
        """Let ``world`` go on with its own count of things and dice of that seed; called within `run`."""
        self._dice.setSeed(seed)
        if self._entered is not world:
            if self._entered is not None:
                self._entered.things = self._counter.count()
            getattr(self._counter, "count_$eq")(world.things)
            self._entered = world

    def _why_no_answer(self, what: str, error: Exception) -> str:
        try:
            self.process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self.process.kill()  # nobody knows in what state it is
            return f"no answer of the simulator to {what}: {error}"
        return f"the simulator's process ended with status {self.process.returncode} in {what}"

    def _new_world(self) -> World:
        made = self.run("making a world", lambda java: java.scienceworld.runtime.pythonapi.PythonInterface())
        return World(self, made)


class World:
    """One simulated world."""

    def __init__(self, simulator: Simulator, java_object: Any) -> None:
        self.simulator = simulator
        self._java = java_object
        self._variation = self._steps = 0
        self.things = 0
        """The simulator's count of things when it last was in another world."""

    def call(self, method: str, *arguments: Any) -> Any:
        """What the simulator's ``method`` returns; raises `SimulatorError`."""
        return self._run(method, lambda java: getattr(self._java, method)(*arguments))

    def load(self, task_name: str, variation: int, *, gold: bool = False) -> None:
        """Make the world of a task anew; ``gold`` also searches the actions that complete it."""
        self._variation, self._steps = variation, 0
        self.call("load", task_name, variation, _NO_SIMPLIFICATIONS, gold)

    def step(self, action: str) -> tuple[str, float, bool, int]:
        """Execute an action: what is seen, the score so far (-1..1), whether the task has ended, and the moves made."""
        world = self._java
        outcome: tuple[str, float, bool, int] = self._run(
            "step", lambda java: (world.step(action), world.getScore(), world.getCompleted(), world.getNumMoves())
        )
        self._steps += 1
        return outcome

    def texts(self, method: str) -> list[str]:
        """The texts that ``method`` lists, fetched at once instead of one by one."""
        joined = self._run(method, lambda java: java.java.lang.String.join("\n", getattr(self._java, method)()))
        return joined.split("\n") if joined else []

    def _run(self, what: str, work: Callable[[Any], Any]) -> Any:
        """Run ``work`` with this world's count of things, and with dice that only its variation and steps decide."""
        seed = _seed(self._variation, self._steps)

        def in_this_world(java: Any) -> Any:
            self.simulator.enter(self, seed)
            return work(java)

        return self.simulator.run(what, in_this_world)

    def object_tree(self) -> Any:
        """All things in the world and what they hold, nested; the simulator hands it over in a file."""
        with tempfile.TemporaryDirectory() as folder:
            if problem := self.call("getObjectTree", folder):
                raise SimulatorError(f"the simulator has no object tree: {problem}")
            return json.loads(Path(folder, "objectTree.json").read_text(encoding="utf-8"))


def _singleton(package: Any, name: str) -> Any:
    """The one instance of a Scala object."""
    return getattr(getattr(package, f"{name}$"), "MODULE$")


def _seed(variation: int, steps: int) -> int:
    """Seeds whose first random numbers have nothing in common, as those of neighbouring seeds have in Java."""
    digest = hashlib.blake2b(f"{variation} {steps}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)


class SharedSimulator:
    """A Java process that begins with its first world and ends with its last; one that died is replaced."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._simulator: Simulator | None = None

    def take(self, *, heap_mb: int, worlds_ahead: int) -> World:
        """A world; ``heap_mb`` and ``worlds_ahead`` are for the process, if it is started now."""
        with self._lock:
            if self._simulator is not None and not self._simulator.alive:
                self._simulator.close()
                self._simulator = None
            if self._simulator is None:
                self._simulator = Simulator(heap_mb=heap_mb, worlds_ahead=worlds_ahead)
            return self._simulator.take()

    def give_back(self, world: World) -> None:
        """End the use of a world."""
        with self._lock:
            simulator = world.simulator
            simulator.give_back(world)
            if simulator is self._simulator and simulator.worlds_in_use == 0:
                simulator.close()
                self._simulator = None


_playing = SharedSimulator()
_gold = SharedSimulator()


def take_world(worlds_ahead: int) -> World:
    """A world to play in, from the process that all of this Python process share.

    When that process is started now, it gets room for ``worlds_ahead`` worlds and makes so many. Raises `ConfigError`
    without Java, else `SimulatorError`.
    """
    heap_mb = _BASE_HEAP_MB + _WORLD_HEAP_MB * worlds_ahead
    return _playing.take(heap_mb=heap_mb, worlds_ahead=worlds_ahead)


def give_back_world(world: World) -> None:
    """End the use of a world of `take_world`; the process ends with the last."""
    _playing.give_back(world)


def take_gold_world() -> World:
    """A world to search gold sequences in, from a process with more memory."""
    return _gold.take(heap_mb=_GOLD_HEAP_MB, worlds_ahead=1)


def give_back_gold_world(world: World) -> None:
    _gold.give_back(world)


# --------------------------------------------------------------------------------------------------------------- items

_table_lock = threading.Lock()
_table: list[ItemTable] = []


def item_table(world: World) -> ItemTable:
    """What the indices mean, by the numbers of variations that the simulator tells; asked once per process."""
    with _table_lock:
        if not _table:
            tasks = indexed_tasks()
            _table.append(
                ItemTable(tasks, {task.name: world.call("getTaskMaxVariations", task.name) for task in tasks})
            )
        return _table[0]
