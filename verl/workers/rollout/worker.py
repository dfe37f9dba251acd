"""RolloutWorker: a process with an engine and a collector, which turns requests into trajectories."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from agentgym_rl.agent.chat import ChatTemplate, Tokenizer
from agentgym_rl.client.base import EnvClient
from agentgym_rl.client.servers import client_factory
from agentgym_rl.envs.registry import get_spec
from agentgym_rl.rollout.collector import RolloutRequest, RolloutSettings, check_failures, collect
from agentgym_rl.rollout.log import TrajectoryLog
from agentgym_rl.rollout.sessions import SessionUsage
from agentgym_rl.types import StopReason, Trajectory
from verl.models.loading import compute_dtype, load_policy, load_tokenizer
from verl.single_controller.base import Interrupted, WorkerContext
from verl.utils.devices import release_cached
from verl.utils.distributed import destroy_process_group
from verl.utils.seeding import derive_seed
from verl.workers.peers import join_peers
from verl.workers.rollout.engine import Engine, EngineUsage, WeightUpdateTimes
from verl.workers.rollout.engine_group import EngineGroup, Follower
from verl.workers.rollout.hand_out import HandOut
from verl.workers.rollout.hf_engine import HFEngine
from verl.workers.rollout.selection import VLLM, engine_name, prepare_vllm
from verl.workers.setup import RolloutOrder, RolloutSetup, RolloutShare

ResultT = TypeVar("ResultT")

_INTERRUPT_INTERVAL_S = 0.5
# Of a worker that lends its device to another's engine.
_NO_SHARE = RolloutShare((), (), duration_s=0.0, engine=EngineUsage(), sessions=SessionUsage())


class RolloutWorker:
    """One of several workers; each makes its share of a call's trajectories.

    ``rollout.tensor_model_parallel_size`` workers have one engine between them: the first of them plays, the others
    lend it their devices and get no share.
    """

    def __init__(self, context: WorkerContext, setup: RolloutSetup) -> None:
        """Join the peers and load the engine's copy of the model."""
        self._context = context
        self._setup = setup
        self._device = join_peers(context)
        self._group = EngineGroup.join(setup.rollout.tensor_model_parallel_size, self._device)
        self._num_engines = context.world_size // self._group.size
        self._engine, self._chat = self._make_engine()
        self._engine.sleep()  # Its memory is free for what else the workers are made of.
        self._group.wait()
        self._make_clients = self._client_factories()
        self._num_rollouts = 0

    def _make_engine(self) -> tuple[Engine, ChatTemplate]:
        setup, device = self._setup, self._device
        seed = derive_seed("engine", setup.seed, self._context.rank)
        if engine_name(setup.rollout, self._context.device) == VLLM:
            engine = self._make_vllm_engine(seed) if self._group.leads else self._make_follower()
            return engine, self._make_chat(load_tokenizer(setup.model))
        model, tokenizer = load_policy(setup.model, device)
        model.to(dtype=compute_dtype(setup.model, device))  # type: ignore[call-arg]
        return HFEngine(model, max_num_seqs=setup.rollout.max_num_seqs, seed=seed), self._make_chat(tokenizer)

    def _make_chat(self, tokenizer: Tokenizer) -> ChatTemplate:
        return ChatTemplate(tokenizer, warns=self._context.rank == 0)

    def _make_vllm_engine(self, seed: int) -> Engine:
        prepare_vllm(self._context.device)
        from verl.workers.rollout.vllm_engine import VLLMEngine, VLLMPlace

        setup = self._setup
        place = VLLMPlace(
            self._device,
            compute_dtype(setup.model, self._device),
            num_threads=self._context.num_threads,
            num_engines=self._num_engines,
            group=self._group,
        )
        return VLLMEngine(setup.model, setup.rollout, place, max_model_len=setup.limits.longest, seed=seed)

    def _make_follower(self) -> Engine:
        if self._device.type != "cuda":
            # The leader's memory serves all processes of its engine; this rank only helps to gather.
            return Follower(deque[object](maxlen=0).extend)
        prepare_vllm(self._context.device)
        from verl.workers.rollout.vllm_weights import share_by_cuda_ipc

        dtype = compute_dtype(self._setup.model, self._device)
        return Follower(functools.partial(share_by_cuda_ipc, device=self._device, dtype=dtype, group=self._group))

    def _client_factories(self) -> dict[str, Callable[[], EnvClient]]:
        agentgym = self._setup.agentgym
        return {
            task: client_factory(
                get_spec(task).client,
                addresses,
                timeout_s=agentgym.request_timeout,
                connect_timeout_s=agentgym.connect_timeout,
                max_retries=agentgym.max_retries,
                first=self._context.rank // self._group.size,
            )
            for task, addresses in agentgym.servers.items()
        }

    def generate(self, requests: Sequence[RolloutRequest], order: RolloutOrder) -> RolloutShare:
        """This worker's share of the requests: all workers get all of them and take them one by one as they have room.

        A worker without an engine of its own makes none. Trajectories are also written to this rank's file of
        ``order.log_name``. Raises `Interrupted` when the driver asks for it, and `TooManyFailures` or `EngineError` as
        soon as nothing better is to be expected.
        """
        if not self._group.leads:
            return _NO_SHARE
        self._num_rollouts += 1
        self._engine.wake()
        try:
            return asyncio.run(self._interruptible(self._share(requests, order)))
        finally:
            self._engine.sleep()

    async def _interruptible(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """The result of ``work``, which the driver may have cancelled: it then ends in order, its sessions closed."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([task], timeout=_INTERRUPT_INTERVAL_S))[0]:
                if self._context.is_interrupted():
                    raise Interrupted("the rollout was given up")
            return task.result()
        finally:
            if not task.cancelling():  # A second time would break off the closing of sessions.
                task.cancel()
            await asyncio.wait([task])

    async def _share(self, requests: Sequence[RolloutRequest], order: RolloutOrder) -> RolloutShare:
        began, before = time.perf_counter(), self._engine.usage()
        hand_out = HandOut(requests, self._context.store, name=str(self._num_rollouts))
        trajectories, sessions = await self._collect(requests, hand_out, order)
        hand_out.forget(num_workers=self._num_engines)
        return RolloutShare(
            indices=tuple(sorted(hand_out.taken)),
            trajectories=tuple(trajectories),
            duration_s=time.perf_counter() - began,
            engine=self._engine.usage() - before,
            sessions=sessions,
        )

    async def _collect(
        self, requests: Sequence[RolloutRequest], hand_out: HandOut, order: RolloutOrder
    ) -> tuple[list[Trajectory], SessionUsage]:
        path = Path(self._setup.log_dir) / order.log_name / f"{self._context.rank}.jsonl"
        at_once = min(order.max_in_flight or len(requests), len(requests))
        latest: deque[Trajectory] = deque(maxlen=at_once)
        usages: list[SessionUsage] = []
        with TrajectoryLog(path, append=order.append) as log:

            def finished(trajectory: Trajectory) -> None:
                log.write(trajectory)
                self._context.report(int(trajectory.is_last_trial))
                if trajectory.stop_reason == StopReason.ENGINE_ERROR:
                    # With an engine that is gone this worker would be the quickest, and use up the others' requests.
                    self._engine.raise_if_down()
                latest.append(trajectory)
                if order.max_failed_fraction is not None and len(latest) == latest.maxlen:
                    check_failures(latest, order.max_failed_fraction)

            trajectories = await collect(
                requests,
                self._engine,
                make_client=self._make_clients,
                chat=self._chat,
                settings=self._settings(order, at_once),
                picks=hand_out,
                only_faults=order.only_faults,
                on_finished=finished,
                on_closed=usages.append,
            )
        return trajectories, usages[0]

    def _settings(self, order: RolloutOrder, at_once: int) -> RolloutSettings:
        agentgym = self._setup.agentgym
        # No worker begins with more than its fair share, or the first to ask would leave nothing to the others.
        fair_share = max(1, -(-at_once // self._num_engines))
        return RolloutSettings(
            max_rounds=order.max_rounds,
            limits=self._setup.limits,
            sampling=order.sampling,
            timeout_s=agentgym.timeout,
            max_concurrency=min(agentgym.max_concurrency, fair_share),
            agent=agentgym.agent_choice,
            training_step=order.step,
            runs_inline=frozenset(task for task in agentgym.tasks if get_spec(task).client.runs_inline),
        )

    @property
    def device(self) -> torch.device:
        """This worker's own."""
        return self._device

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdateTimes:
        """Give the engine other weights; see `Engine.load_weights`. Collective, as iterating ``weights`` is.

        An engine that sleeps takes memory for them on the devices of all its ranks. What gathering took is free then.
        """
        release_cached(self._device)
        self._group.wait()
        times = self._engine.load_weights(weights, version)
        release_cached(self._device)
        return times

    def close(self) -> None:
        """End the engine and leave the process group."""
        self._engine.close()
        destroy_process_group()
