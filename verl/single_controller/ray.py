"""RayWorkerGroup: one Ray actor per device, on this machine or on a cluster that ``RAY_ADDRESS`` names."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agentgym_rl.errors import ConfigError
from agentgym_rl.threads import thread_environment
from verl.single_controller import ending, watchdog
from verl.single_controller.base import ClusterError, Report, WorkerContext, WorkerError, WorkerGroup, WorkerSpec
from verl.single_controller.signals import sigterm_handler_kept

_PASSED_ON_PREFIXES = ("AGENTGYM_", "CUDA_", "GLOO_", "HF_", "NCCL_", "TORCH_")
_PASSED_ON_NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
# Ray decides which devices an actor sees.
_NEVER_PASSED_ON = ("CUDA_VISIBLE_DEVICES",)

# Only trajectories and batches of token ids travel between processes: megabytes, never weights.
_OBJECT_STORE_BYTES = 256 * 2**20
_PLACEMENT_TIMEOUT_S = 120.0
_PROGRESS_INTERVAL_S = 0.3
_PROGRESS_KEY = "progress"
# How long a wait for workers goes on before a look at whether Ray itself lives.
_CHECK_INTERVAL_S = 1.0
# Without them no call comes back: Ray waits for a minute or for ever.
_VITAL_PROCESSES = ("gcs_server", "raylet")
# A healthy Ray takes one or two; one of which parts have died may never answer.
_TEARDOWN_LIMIT_S = 10.0


class RayWorkerGroup(WorkerGroup):
    """Starts Ray when nobody has, and then also ends it."""

    def __init__(self, spec: WorkerSpec, *, nnodes: int = 1, workers_per_node: int = 1) -> None:
        """Start the workers. Raises `WorkerError`, the first failure, or `ConfigError` for too small a cluster."""
        self.world_size = nnodes * workers_per_node
        self._actors: list[Any] = []
        self._placement: PlacementGroup | None = None
        self._session = _RaySession.open(workers_per_node)
        try:
            self._placement = _reserve(nnodes, workers_per_node, gpu=spec.device == "cuda")
            self._actors = [
                _start_actor(self._placement, rank // workers_per_node, spec) for rank in range(self.world_size)
            ]
            self._start_workers(spec)
        except BaseException:
            self.shutdown()
            raise

    def _start_workers(self, spec: WorkerSpec) -> None:
        [address] = self._wait([self._actors[0].open_store.remote()])
        self._store = _connect(address)
        starts = [actor.start.remote(spec, rank, self.world_size, address) for rank, actor in enumerate(self._actors)]
        self._wait(starts)

    def call_each(
        self, method: str, args: Sequence[tuple[Any, ...]], *, on_progress: Report | None = None
    ) -> list[Any]:
        if len(args) != self.world_size:
            raise ValueError(f"{len(args)} sets of arguments for {self.world_size} workers")
        self._session.check()
        reported = self._progress() if on_progress else 0  # before any worker can add to it
        calls = [actor.call.remote(method, each) for actor, each in zip(self._actors, args, strict=True)]
        return self._wait(calls, on_progress, reported)

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
            raise WorkerError(rank, self.world_size, error.cause, str(error)) from None
        except RayError as error:
            self._session.check()  # Workers die with their raylet, which is then the news.
            if isinstance(error, (ActorDiedError, ActorUnavailableError)):
                raise WorkerError(rank, self.world_size, None, str(error)) from None
            raise

    def _progress(self) -> int:
        from torch.distributed import DistError

        try:
            return self._store.add(_PROGRESS_KEY, 0)
        except DistError:
            return 0  # The worker that serves the store has died: its own call is about to say so.

    def shutdown(self) -> None:
        actors, self._actors = self._actors, []
        placement, self._placement = self._placement, None
        self._session.close(functools.partial(_release, actors, placement))


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
    def open(cls, num_cpus: int) -> _RaySession:
        if ray.is_initialized():
            return cls(connected_here=False)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray starts workers at niceness 15, where anything else on the machine starves them; they are the work here.
        os.environ.setdefault("RAY_worker_niceness", "0")
        owned = not os.environ.get("RAY_ADDRESS")
        watch = watchdog.DeathWatch() if owned and watchdog.is_supported() else None
        session = cls(connected_here=True, watch=watch)
        try:
            with sigterm_handler_kept():
                if owned:
                    session._start(num_cpus)
                else:
                    ray.init(logging_level=logging.WARNING)
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


def _reserve(nnodes: int, workers_per_node: int, *, gpu: bool) -> PlacementGroup:
    """A bundle of devices on each node; raises `ConfigError` where there are too few or others keep them."""
    bundle = {"CPU": float(workers_per_node)} | ({"GPU": float(workers_per_node)} if gpu else {})
    wanted = f"trainer.nnodes={nnodes} trainer.n_gpus_per_node={workers_per_node}"
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fitting = [node for node in nodes if all(node.get(kind, 0) >= count for kind, count in bundle.items())]
    if len(fitting) < nnodes:
        raise ConfigError(
            f"{wanted}: {len(fitting)} of the Ray cluster's {len(nodes)} nodes have {_shown(bundle)}; "
            "for several nodes start Ray on each and set RAY_ADDRESS"
        )
    group = placement_group([bundle] * nnodes, strategy="STRICT_SPREAD" if nnodes > 1 else "PACK")
    if not group.wait(_PLACEMENT_TIMEOUT_S):
        remove_placement_group(group)
        raise ConfigError(
            f"{wanted}: other programs on the Ray cluster did not free {_shown(bundle)} on each node "
            f"within {_PLACEMENT_TIMEOUT_S:.0f} s"
        )
    return group


def _shown(bundle: dict[str, float]) -> str:
    return " and ".join(f"{count:.0f} {kind}" for kind, count in bundle.items())


def _start_actor(placement: PlacementGroup, bundle: int, spec: WorkerSpec) -> Any:
    actor_class = ray.remote(_WorkerHost).options(
        num_cpus=1,
        num_gpus=int(spec.device == "cuda"),
        scheduling_strategy=PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=bundle),
    )
    return actor_class.remote(_worker_environment(spec.num_threads), sys.path)


def _worker_environment(num_threads: int) -> dict[str, str]:
    """What a worker's process gets of this one's environment, and its thread counts."""
    passed_on = {
        name: value
        for name, value in os.environ.items()
        if (name.startswith(_PASSED_ON_PREFIXES) or name in _PASSED_ON_NAMES) and name not in _NEVER_PASSED_ON
    }
    return passed_on | thread_environment(num_threads)


def _connect(address: tuple[str, int]) -> Any:
    from torch.distributed import TCPStore

    return TCPStore(address[0], address[1], is_master=False)


class _WorkerHost:
    """The Ray actor: imports the worker's class after its environment is set, since libraries read it on import."""

    def __init__(self, environment: dict[str, str], import_path: list[str]) -> None:
        os.environ.update(environment)
        sys.path += [folder for folder in import_path if folder not in sys.path]
        self._store: Any = None
        self._worker: Any = None

    def open_store(self) -> tuple[str, int]:
        """Serve the group's rendezvous from here; its host and port."""
        from torch.distributed import TCPStore

        host = ray.util.get_node_ip_address()
        # Port 0: the store itself picks a free one, so nobody can take it in between.
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def start(self, spec: WorkerSpec, rank: int, world_size: int, address: tuple[str, int]) -> None:
        store = self._store or _connect(address)
        context = WorkerContext(
            rank=rank,
            world_size=world_size,
            num_threads=spec.num_threads,
            device=spec.device,
            store=store,
            report=functools.partial(store.add, _PROGRESS_KEY),
        )
        self._worker = spec.worker_class()(context, *spec.args)

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        return getattr(self._worker, method)(*args)
