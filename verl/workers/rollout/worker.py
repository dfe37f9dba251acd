"""RolloutWorker: a process with an engine and a collector, which turns requests into trajectories."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.client.base import EnvClient
from agentgym_rl.envs.registry import get_spec
from agentgym_rl.rollout.collector import RolloutRequest, RolloutSettings, collect
from agentgym_rl.rollout.log import TrajectoryLog
from agentgym_rl.types import Trajectory
from verl.models.loading import compute_dtype, load_policy
from verl.single_controller.base import WorkerContext
from verl.utils.distributed import destroy_process_group
from verl.utils.seeding import derive_seed
from verl.workers.peers import join_peers
from verl.workers.rollout.engine import Engine
from verl.workers.rollout.hf_engine import HFEngine
from verl.workers.setup import RolloutOrder, RolloutSetup


class RolloutWorker:
    """One of several equal workers; each makes its share of a call's trajectories."""

    def __init__(self, context: WorkerContext, setup: RolloutSetup) -> None:
        """Join the peers and load the engine's copy of the model."""
        self._context = context
        self._setup = setup
        self._device = join_peers(context)
        self._engine, self._chat = self._make_engine()

    def _make_engine(self) -> tuple[Engine, ChatTemplate]:
        setup = self._setup
        model, tokenizer = load_policy(setup.model, self._device)
        model.to(dtype=compute_dtype(setup.model, self._device))  # type: ignore[call-arg]
        seed = derive_seed("engine", setup.seed, self._context.rank)
        engine = HFEngine(model, max_num_seqs=setup.rollout.max_num_seqs, seed=seed)
        return engine, ChatTemplate(tokenizer)

    def generate(self, requests: Sequence[RolloutRequest], order: RolloutOrder) -> list[Trajectory]:
        """One trajectory per request, in their order; also written to this rank's file of ``order.log_name``."""
        self._engine.wake()
        try:
            return asyncio.run(self._collect(requests, order))
        finally:
            self._engine.sleep()

    async def _collect(self, requests: Sequence[RolloutRequest], order: RolloutOrder) -> list[Trajectory]:
        path = Path(self._setup.log_dir) / order.log_name / f"{self._context.rank}.jsonl"
        with TrajectoryLog(path, append=order.append) as log:

            def finished(trajectory: Trajectory) -> None:
                log.write(trajectory)
                self._context.report(1)

            return await collect(
                requests,
                self._engine,
                make_client=self._make_client,
                chat=self._chat,
                settings=self._settings(order),
                on_finished=finished,
            )

    def _make_client(self) -> EnvClient:
        agentgym = self._setup.agentgym
        client_class = get_spec(agentgym.task_name).client
        return client_class(agentgym.env_addr, timeout=agentgym.request_timeout, max_retries=agentgym.max_retries)

    def _settings(self, order: RolloutOrder) -> RolloutSettings:
        agentgym = self._setup.agentgym
        return RolloutSettings(
            max_rounds=order.max_rounds,
            limits=self._setup.limits,
            sampling=order.sampling,
            timeout_s=agentgym.timeout,
            max_concurrency=agentgym.max_concurrency,
            strategy=agentgym.strategy,
            training_step=order.step,
        )

    def close(self) -> None:
        """End the engine and leave the process group."""
        self._engine.close()
        destroy_process_group()
