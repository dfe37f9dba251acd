"""RayWorkerGroup: one Ray actor per device, on this machine or on a running cluster."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed import TCPStore

from agentgym_rl.errors import ConfigError
from agentgym_rl.threads import thread_environment
from verl.config import RayInitConfig
from verl.single_controller import ending, watchdog
from verl.single_controller.base import (
    ClusterError,
    Interrupted,
    Report,
    WorkerContext,
    WorkerError,
    WorkerGroup,
    WorkerSpec,
)
from verl.single_controller.signals import sigterm_handler_kept

_PASSED_ON = (
    *("AGENTGYM_*", "CUDA_*", "GLOO_*", "HF_*", "NCCL_*", "TORCH_*", "VLLM_*"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
)
# Ray decides which devices an actor sees.
_NEVER_PASSED_ON = ("CUDA_VISIBLE_DEVICES",)

# Only trajectories and batches of token ids travel between processes: megabytes, never weights.
_OBJECT_STORE_BYTES = 256 * 2**20
# Resources that are there are given within a second; a run that has just ended may take a few to give its own back.
_PLACEMENT_TIMEOUT_S = 15.0
_CONNECT_TIMEOUT_S = 5.0
# How long workers may take to close their sessions, which hold up to 10 s for a server that answers slowly.
_WIND_UP_LIMIT_S = 12.0
_PROGRESS_INTERVAL_S = 0.3
_PROGRESS_KEY = "progress"
_INTERRUPT_KEY = "interrupt"
# How long a wait for workers goes on before a look at whether Ray itself lives.
_CHECK_INTERVAL_S = 1.0
_START_HEAD = "scripts/ray_cluster.sh head"
# Without them no call comes back: Ray waits for a minute or for ever.
_VITAL_PROCESSES = ("gcs_server", "raylet")
# A healthy Ray takes one or two; one of which parts have died may never answer.
_TEARDOWN_LIMIT_S = 10.0


class RayWorkerGroup(WorkerGroup):
    """Starts Ray when nobody has, and then also ends it."""

    def __init__(
        self, spec: WorkerSpec, *, nnodes: int = 1, workers_per_node: int = 1, ray_init: RayInitConfig | None = None
    ) -> None:
        """Start the workers. Raises `WorkerError`, the first failure, or `ConfigError` for too small a cluster."""
        self.world_size = nnodes * workers_per_node
        self._actors: list[Any] = []
        self._placement: PlacementGroup | None = None
        self._interruptible_calls: list[Any] = []
        options = ray_init or RayInitConfig()
        self._session = _RaySession.open(options, num_cpus=options.num_cpus or workers_per_node)
        try:
            self._store = _open_store()
            self._placement = _reserve(nnodes, workers_per_node, gpu=spec.device == "cuda")
            environment = _worker_environment(spec.num_threads, options.env_vars)
            self._actors = [
                _start_actor(self._placement, rank // workers_per_node, spec, environment)
                for rank in range(self.world_size)
            ]
            self._start_workers(spec)
        except BaseException:
            self.shutdown()
            raise

    def _start_workers(self, spec: WorkerSpec) -> None:
        address = (self._store.host, self._store.port)
        starts = [actor.start.remote(spec, rank, self.world_size, address) for rank, actor in enumerate(self._actors)]
        self._wait(starts)

    def call_each(
        self,
        method: str,
        args: Sequence[tuple[Any, ...]],
        *,
        on_progress: Report | None = None,
        interruptible: bool = False,
    ) -> list[Any]:
        if len(args) != self.world_size:
            raise ValueError(f"{len(args)} sets of arguments for {self.world_size} workers")
        self._session.check()
        reported = self._progress() if on_progress else 0  # before any worker can add to it
        calls = [actor.call.remote(method, each) for actor, each in zip(self._actors, args, strict=True)]
        self._interruptible_calls = calls if interruptible else []
        results = self._wait(calls, on_progress, reported)
        self._interruptible_calls = []
        return results

    def _wait(self, calls: list[Any], on_progress: Report | None = None, reported: int = 0) -> list[Any]:
        """Results by rank; the first call that fails ends the wait, since its peers may be waiting for it for ever.

        Raises `ClusterError` within seconds after Ray's own processes have died.
        ``on_progress`` hears what the workers add to the ``reported`` units of earlier calls.
        """
        pending, results = list(calls), {}
        interval_s = _PROGRESS_INTERVAL_S if on_progress else _CHECK_INTERVAL_S
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=interval_s)
            if not done:
                self._session.check()
            for call in done:
                rank = calls.index(call)
                results[rank] = self._result(call, rank)
            if on_progress and (count := self._progress()) > reported:
                on_progress(count - reported)
                reported = count
        return [results[rank] for rank in range(len(calls))]

    def _result(self, call: Any, rank: int) -> Any:
        try:
            return ray.get(call)
        except RayTaskError as error:
            if isinstance(error.cause, Interrupted):
                raise error.cause from None
            raise WorkerError(rank, self.world_size, error.cause, str(error)) from None
        except RayError as error:
            self._session.check()  # Workers die with their raylet, which is then the news.
            if isinstance(error, (ActorDiedError, ActorUnavailableError)):
                raise WorkerError(rank, self.world_size, None, str(error)) from None
            raise

    def _progress(self) -> int:
        return self._store.add(_PROGRESS_KEY, 0)

    def interrupt(self) -> None:
        self._store.set(_INTERRUPT_KEY, "")

    def shutdown(self) -> None:
        try:
            self._wind_up()
        finally:
            actors, self._actors = self._actors, []
            placement, self._placement = self._placement, None
            self._session.close(functools.partial(_release, actors, placement))

    def _wind_up(self) -> None:
        """Let a call that can be given up come to its end, so that what outlives the workers is put away."""
        calls, self._interruptible_calls = self._interruptible_calls, []
        end = time.monotonic() + _WIND_UP_LIMIT_S
        if calls:
            self.interrupt()
        with contextlib.suppress(RayError, ClusterError):
            while calls and time.monotonic() < end:
                self._session.check()
                _, calls = ray.wait(calls, num_returns=len(calls), timeout=_PROGRESS_INTERVAL_S)


def _release(actors: list[Any], placement: PlacementGroup | None) -> None:
    """Give back what a group holds of a cluster that lives on."""
    for actor in actors:
        ray.kill(actor)
    if placement is not None:
        remove_placement_group(placement)


class _RaySession:
    """Ray as this process uses it: one that it found running, one that it joined, or its own, which ends with it."""

    def __init__(self, *, connected_here: bool, watch: watchdog.DeathWatch | None = None) -> None:
        """``watch`` is there for a Ray of this process's own."""
        self._connected_here = connected_here
        self._watch = watch
        self._vital: dict[str, watchdog.Process] = {}
        self._open = True

    @classmethod
    def open(cls, options: RayInitConfig, *, num_cpus: int) -> _RaySession:
        if ray.is_initialized():
            return cls(connected_here=False)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray starts workers at niceness 15, where anything else on the machine starves them; they are the work here.
        os.environ.setdefault("RAY_worker_niceness", "0")
        address = options.address or os.environ.get("RAY_ADDRESS", "")
        watch = watchdog.DeathWatch() if not address and watchdog.is_supported() else None
        session = cls(connected_here=True, watch=watch)
        try:
            with sigterm_handler_kept():
                if address:
                    _join(address)
                else:
                    session._start(num_cpus)
        except BaseException:
            session.close()
            raise
        # For exits that pass the group by. Hooks run last in, first out: these before Ray's own, which may block.
        atexit.register(ending.leave_if_stuck, 1)
        atexit.register(session.close)
        return session

    def _start(self, num_cpus: int) -> None:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=True,
            logging_level=logging.ERROR,
        )
        if watchdog.is_supported():
            self._vital = watchdog.children_named(_VITAL_PROCESSES)

    def check(self) -> None:
        """Raise `ClusterError` if a process has died without which this process's own Ray cannot answer."""
        for name, process in self._vital.items():
            if not watchdog.is_alive(process):
                raise ClusterError(
                    f"Ray's {name} (process {process.pid}) has died, which ends the run: it was killed, perhaps for "
                    "want of memory; its log is in Ray's folder for this session, by default under /tmp/ray"
                )

    def close(self, release: Callable[[], object] | None = None) -> None:
        """``release`` what others could use, and end what was started here; in limited time, since Ray may be dead."""
        if not self._open:
            return
        self._open = False
        try:
            ending.run_bounded(functools.partial(self._leave, release), limit_s=_TEARDOWN_LIMIT_S)
        finally:
            if self._watch is not None:
                self._watch.close()

    def _leave(self, release: Callable[[], object] | None) -> None:
        # Whatever Ray does not manage any more, the watch ends, or the cluster when this process is gone.
        with contextlib.suppress(RayError):
            if release is not None and self._watch is None:
                release()
        if self._connected_here:
            ray.shutdown()


def _join(address: str) -> None:
    """Connect to a running cluster; raises `ConfigError` when there is none at ``address``."""
    where = f"ray_init.address={address} (or RAY_ADDRESS)"
    host, _, port = address.rpartition(":")
    if port.isdigit():
        # Ray itself tries for a minute and then ends the process.
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
        except OSError as error:
            raise ConfigError(f"{where}: no Ray there ({error}); start one with: {_START_HEAD}") from None
    try:
        ray.init(address=address, logging_level=logging.WARNING)
    except (ConnectionError, ValueError) as error:
        if "InvalidAuthToken" in str(error.__cause__):
            raise ConfigError(
                f"{where}: that Ray asks for its token; export RAY_AUTH_MODE=token, and see that ~/.ray/auth_token "
                "here is the one of its head"
            ) from None
        raise ConfigError(f"{where}: {error}; start a cluster with: {_START_HEAD}") from None


def _reserve(nnodes: int, workers_per_node: int, *, gpu: bool) -> PlacementGroup:
    """One bundle per node, with all of the node's devices; raises `ConfigError` where the cluster lacks them.

    A node's workers stand in one bundle, so that they are on one machine for certain, and bundles on different ones.
    """
    bundle = {"CPU": float(workers_per_node)} | ({"GPU": float(workers_per_node)} if gpu else {})
    wanted = f"trainer.nnodes={nnodes} trainer.n_gpus_per_node={workers_per_node}"
    nodes = [node for node in ray.nodes() if node["Alive"]]
    fitting = [node for node in nodes if all(node["Resources"].get(kind, 0) >= n for kind, n in bundle.items())]
    if len(fitting) < nnodes:
        raise ConfigError(
            f"{wanted}: {len(fitting)} of the Ray cluster's {len(nodes)} nodes have {_shown(bundle)} "
            f"({_shown_nodes(nodes, bundle)}); for several nodes run scripts/ray_cluster.sh on each, "
            "and name the cluster by ray_init.address or RAY_ADDRESS"
        )
    group = placement_group([bundle] * nnodes, strategy="STRICT_SPREAD" if nnodes > 1 else "STRICT_PACK")
    if not group.wait(_PLACEMENT_TIMEOUT_S):
        remove_placement_group(group)
        free = {kind: ray.available_resources().get(kind, 0.0) for kind in bundle}
        raise ConfigError(
            f"{wanted}: other programs hold what {_shown(bundle)} on each node would take; free on the whole Ray "
            f"cluster, after {_PLACEMENT_TIMEOUT_S:.0f} s of waiting: {_shown(free)}"
        )
    return group


def _shown(resources: dict[str, float]) -> str:
    return " and ".join(f"{count:.0f} {kind}" for kind, count in resources.items())


def _shown_nodes(nodes: Sequence[Any], kinds: Iterable[str]) -> str:
    """Each node's own resources of these kinds."""
    return ", ".join(
        f"{node['NodeManagerAddress']}: {_shown({kind: node['Resources'].get(kind, 0.0) for kind in kinds})}"
        for node in nodes
    )


def _start_actor(placement: PlacementGroup, bundle: int, spec: WorkerSpec, environment: dict[str, str]) -> Any:
    actor_class = ray.remote(_WorkerHost).options(
        num_cpus=1,
        num_gpus=int(spec.device == "cuda"),
        scheduling_strategy=PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=bundle),
    )
    return actor_class.remote(environment, sys.path)


def _worker_environment(num_threads: int, more: Sequence[str]) -> dict[str, str]:
    """What a worker's process gets of this one's environment, ``more`` names or patterns too, and its thread counts."""
    allowed = (*_PASSED_ON, *more)
    passed_on = {
        name: value
        for name, value in os.environ.items()
        if any(fnmatchcase(name, pattern) for pattern in allowed) and name not in _NEVER_PASSED_ON
    }
    return passed_on | thread_environment(num_threads)


def _open_store() -> TCPStore:
    """Serve the group's rendezvous from this process, which outlives the workers; any free port."""
    return TCPStore(ray.util.get_node_ip_address(), 0, is_master=True, wait_for_workers=False)


class _WorkerHost:
    """The Ray actor: imports the worker's class after its environment is set, since libraries read it on import."""

    def __init__(self, environment: dict[str, str], import_path: list[str]) -> None:
        os.environ.update(environment)
        sys.path += [folder for folder in import_path if folder not in sys.path]
        self._worker: Any = None

    def start(self, spec: WorkerSpec, rank: int, world_size: int, address: tuple[str, int]) -> None:
        store = TCPStore(address[0], address[1], is_master=False)
        context = WorkerContext(
            rank=rank,
            world_size=world_size,
            num_threads=spec.num_threads,
            device=spec.device,
            store=store,
            report=functools.partial(store.add, _PROGRESS_KEY),
            is_interrupted=functools.partial(store.check, [_INTERRUPT_KEY]),
        )
        self._worker = spec.worker_class()(context, *spec.args)

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        return getattr(self._worker, method)(*args)
