"""The ``vllm`` engine: vLLM's AsyncLLM, whose model runs in a process of its own on the worker's device.

With tensor parallelism it runs on the devices of several workers, in a process for each; one worker owns them all.

AsyncLLM belongs to one event loop. A thread of the engine runs that loop for as long as the engine lives; callers come
from any loop or thread and only wait for it. One request is one turn: token ids go in, token ids and log-probs come
out, and no text is made. Earlier turns and shared prompts are found again by vLLM's prefix cache.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import psutil
import torch
import vllm
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from agentgym_rl.errors import ConfigError, EngineError
from agentgym_rl.types import FinishReason, Generation, SamplingParams
from verl.config import ModelConfig, RolloutConfig
from verl.workers.rollout.engine import (
    Engine,
    EngineUsage,
    ExpectedWeights,
    TimedWeights,
    UsageMeter,
    WeightUpdateTimes,
    check_request,
)
from verl.workers.rollout.engine_group import EngineGroup
from verl.workers.rollout.vllm_executor import OwnedExecutor, OwnedGroupExecutor
from verl.workers.rollout.vllm_weights import CUDA_IPC, SHARED_MEMORY, send_by_cuda_ipc, send_by_shared_memory

_Result = TypeVar("_Result")

# How often a call to the engine's process looks whether that process still lives: vLLM itself would wait for ever.
_LIVENESS_INTERVAL_S = 0.5
# The engine ends in seconds; after this long it is killed.
_SHUTDOWN_LIMIT_S = 20.0
_CPU_BLOCK_TOKENS = 128
# 107 characters, less a UUID and the folder's own name.
_LONGEST_PARENT = 40


@dataclass(frozen=True)
class VLLMPlace:
    """Where an engine runs, and beside how many others."""

    device: torch.device
    dtype: torch.dtype
    num_threads: int
    num_engines: int
    """Engines of the run that may share this machine's memory (CPU only)."""
    group: EngineGroup = field(default_factory=EngineGroup)
    """The ranks on whose devices the engine runs; this one leads them."""


class VLLMEngine(Engine):
    """Continuous batching, prefix caching and CUDA graphs by vLLM."""

    def __init__(
        self, model: ModelConfig, rollout: RolloutConfig, place: VLLMPlace, *, max_model_len: int, seed: int = 0
    ) -> None:
        """Start an engine with the weights in ``model.path``; takes from 10 seconds to minutes.

        ``max_model_len``: tokens of the longest sequence that is asked for. ``seed`` is for requests that bring none.
        Raises `ConfigError` for what vLLM cannot run.
        """
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        self._place, self._frees_memory = place, place.device.type == "cuda" and rollout.free_cache_engine
        self._expected = _expected_weights(config, model)
        self._meter, self._request_numbers = UsageMeter(), itertools.count()
        self._abort_reason = ""
        self._down_reason: str | None = None
        self._paused = False
        self._sleeping_parts: set[str] = set()
        self._gate = threading.Lock()  # held while a turn is handed to the loop, so that none comes after its end
        args = _engine_args(model, rollout, place, config, max_model_len, seed)
        self._loop = _LoopThread("vllm-engine")
        try:
            self._start(args)
        except BaseException:
            self._loop.close()
            raise

    def _start(self, args: AsyncEngineArgs) -> None:
        # Names of sockets and of a rendezvous file, which nobody needs once all are connected.
        folder = _short_folder()
        try:
            with _environment(_process_environment(self._place, folder)):
                self._llm = self._loop.call(_start_llm(args))
            # The engine tells that it is ready by one socket and answers by another, which may connect later: on a busy
            # machine it found its name gone, and no answer ever came. One answer shows that it is connected.
            self._control(self._llm.get_supported_tasks())
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if self._place.device.type == "cuda":
            self._control(self._llm.init_weight_transfer_engine(WeightTransferInitRequest({"packed": True})))

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, trajectory_id: str) -> Generation:
        check_request(prompt_ids, sampling, trajectory_id)
        with self._gate:
            self.raise_if_down()
            turn = self._loop.submit(self._turn(list(prompt_ids), sampling))
        self._meter.begin_turn()
        num_tokens = 0
        try:
            generation = await asyncio.wrap_future(turn)
            num_tokens = len(generation.token_ids)
        finally:
            self._meter.end_turn(num_tokens)
        return generation

    def release(self, trajectory_id: str) -> None:
        """Nothing to do: the prefix cache drops what was unused for longest."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdateTimes:
        """See `Engine.load_weights`. Raises `EngineError` when names or shapes are not the model's.

        An error on the way leaves the engine with neither the old nor the new weights: it refuses further turns.
        """
        self.raise_if_down()
        was_paused = self._paused
        self._pause(f"aborted: weights of version {version} arrived")
        start, timed, client = time.perf_counter(), TimedWeights(weights), _WeightClient(self)
        try:
            self._wake_part("weights")
            self._send(self._expected.check(timed), client)
            self.policy_version = version
        finally:
            if not was_paused and self._down_reason is None:
                self._resume()
        transfer_s = time.perf_counter() - start - timed.seconds - client.seconds
        return WeightUpdateTimes(timed.seconds, transfer_s, client.seconds)

    def sleep(self) -> None:
        if self._down_reason is not None or self._llm.errored or self._sleeping_parts:
            return  # An engine that is gone holds nothing.
        self._pause("aborted: the engine was put to sleep")
        if self._frees_memory:
            # Level 1 keeps the weights in main memory: a rollout may follow without an update between.
            self._control(self._llm.sleep(level=1))
            self._sleeping_parts = {"weights", "kv_cache"}

    def wake(self) -> None:
        self.raise_if_down()
        for part in ("weights", "kv_cache"):
            self._wake_part(part)
        self._resume()

    def raise_if_down(self) -> None:
        if self._down_reason is not None:
            raise EngineError(self._down_reason)
        if self._llm.errored:
            raise EngineError(_DIED)

    def usage(self) -> EngineUsage:
        return self._meter.read()

    def close(self) -> None:
        with self._gate:
            if self._down_reason == _CLOSED:
                return
            self._down_reason = _CLOSED
        # Turns in flight get vLLM's word that the engine is gone, and so `EngineError`.
        self._llm.shutdown(timeout=_SHUTDOWN_LIMIT_S)
        self._loop.close()
        del self._llm  # It shuts down once more when it is collected, which must not be at the interpreter's end.

    # --------------------------------------------------------------------------------------------- in the loop's thread

    async def _turn(self, prompt_ids: list[int], sampling: SamplingParams) -> Generation:
        request_id = str(next(self._request_numbers))
        prompt = vllm.TokensPrompt(prompt_token_ids=prompt_ids)
        try:
            # The last output, and the only one, is the finished turn.
            outputs = [output async for output in self._llm.generate(prompt, _vllm_sampling(sampling), request_id)]
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineError(self._down_reason or _DIED) from error
        except (VLLMClientError, ValueError) as error:
            raise EngineError(f"vLLM refuses the turn: {error}") from error
        return self._generation(outputs[-1].outputs[0])

    def _generation(self, completion: CompletionOutput) -> Generation:
        if completion.finish_reason not in tuple(FinishReason):
            raise EngineError(self._abort_reason or f"vLLM ended the turn: {completion.finish_reason}")
        token_ids, entries = tuple(completion.token_ids), cast(list[dict[int, Logprob]], completion.logprobs)
        log_probs = tuple(entry[token_id].logprob for entry, token_id in zip(entries, token_ids, strict=True))
        # A version is set while nothing runs, so a turn never spans two.
        return Generation(token_ids, log_probs, FinishReason(completion.finish_reason), self.policy_version)

    async def _unless_dead(self, call: Coroutine[Any, Any, _Result]) -> _Result:
        task = asyncio.ensure_future(call)
        while not (await asyncio.wait([task], timeout=_LIVENESS_INTERVAL_S))[0]:
            if self._llm.errored:
                task.cancel()
                raise EngineError(_DIED)
        try:
            return task.result()
        except EngineDeadError as error:
            raise EngineError(_DIED) from error

    # -------------------------------------------------------------------------------------------------- in any thread

    def _control(self, call: Coroutine[Any, Any, _Result]) -> _Result:
        return self._loop.call(self._unless_dead(call))

    def _pause(self, reason: str) -> None:
        """End what is in flight, start nothing new, and forget every cached prefix."""
        self._abort_reason, self._paused = reason, True
        self._control(self._llm.pause_generation(mode="abort", clear_cache=True))

    def _resume(self) -> None:
        if self._paused:
            self._control(self._llm.resume_generation())
        self._paused = False

    def _wake_part(self, part: str) -> None:
        if part in self._sleeping_parts:
            self._control(self._llm.wake_up([part]))
            self._sleeping_parts.remove(part)

    def _send(self, weights: Iterator[tuple[str, torch.Tensor]], client: _WeightClient) -> None:
        if self._place.device.type != "cuda":
            send_by_shared_memory(weights, client)
            return
        largest = max(shape.numel() for shape in self._expected.shapes.values())
        device, dtype = self._place.device, self._place.dtype
        send_by_cuda_ipc(
            weights,
            client,
            device=device,
            dtype=dtype,
            largest_bytes=largest * dtype.itemsize,
            group=self._place.group,
        )


_CLOSED = "the engine is closed"
_DIED = "vLLM's engine process has died; what it said stands above, if it had time to"


class _WeightClient:
    """vLLM's `VLLMWeightSyncClient` for an engine of this process; counts the seconds that the engine takes."""

    def __init__(self, engine: VLLMEngine) -> None:
        self._engine = engine
        self.seconds = 0.0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call(self._engine._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info)))

    def start_weight_update(self) -> None:
        self._engine._down_reason = "an update of the engine's weights was not completed"
        self._call(self._engine._llm.start_weight_update())

    def update_weights(self, update_info: Any) -> None:
        self._call(self._engine._llm.update_weights(WeightTransferUpdateRequest(update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call(self._engine._llm.finish_weight_update(weight_version))
        self._engine._down_reason = None

    def _call(self, call: Coroutine[Any, Any, None]) -> None:
        start = time.perf_counter()
        self._engine._control(call)
        self.seconds += time.perf_counter() - start


class _LoopThread:
    """A thread that runs an event loop until it is closed."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, _Result]) -> Any:
        """A `concurrent.futures.Future` of the coroutine's result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return self.submit(work).result()

    def close(self) -> None:
        """Let what still runs come to its end, and stop."""
        self.call(_finish_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _finish_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    _, stuck = await asyncio.wait(others, timeout=1.0) if others else (set(), set())
    for task in stuck:
        task.cancel()
    await asyncio.gather(*stuck, return_exceptions=True)


async def _start_llm(args: AsyncEngineArgs) -> AsyncLLM:
    try:
        config = args.create_engine_config()
    except ValueError as error:
        raise ConfigError(f"rollout.name=vllm: vLLM cannot run model.path={args.model!r}: {error}") from error
    return AsyncLLM.from_vllm_config(config, disable_log_stats=True)


def _engine_args(
    model: ModelConfig,
    rollout: RolloutConfig,
    place: VLLMPlace,
    config: PretrainedConfig,
    max_model_len: int,
    seed: int,
) -> AsyncEngineArgs:
    on_cpu = place.device.type == "cpu"
    if on_cpu:
        _check_head_size(config)
    _check_number_of_heads(config, place.group.size)
    return AsyncEngineArgs(
        model=model.path,
        trust_remote_code=model.trust_remote_code,
        dtype=str(place.dtype).removeprefix("torch."),  # type: ignore[arg-type]
        seed=seed % 2**31,
        max_model_len=max_model_len,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=max(rollout.max_num_batched_tokens, rollout.max_num_seqs),
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        kv_cache_memory_bytes=_cpu_cache_bytes(config, rollout, place, max_model_len) if on_cpu else None,
        enable_prefix_caching=rollout.enable_prefix_caching,
        enforce_eager=rollout.enforce_eager or on_cpu,
        enable_sleep_mode=not on_cpu and rollout.free_cache_engine,
        # Ids in, ids out: neither a tokenizer nor the model's own sampling defaults have a say.
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        generation_config="vllm",
        # Of the distribution that is sampled from, so at the sampling temperature.
        logprobs_mode="processed_logprobs",
        tensor_parallel_size=place.group.size,
        distributed_executor_backend=OwnedExecutor if place.group.size == 1 else OwnedGroupExecutor,
        weight_transfer_config=WeightTransferConfig(backend=SHARED_MEMORY if on_cpu else CUDA_IPC),
        disable_log_stats=True,
        enable_log_requests=False,
    )


def _check_head_size(config: PretrainedConfig) -> None:
    size, sizes = _head_size(config), CPUAttentionBackend.get_supported_head_sizes()
    if size not in sizes:
        raise ConfigError(
            f"rollout.name=vllm: on a CPU it takes attention heads of {', '.join(map(str, sizes))} numbers, and those "
            f"of {config.name_or_path!r} have {size}; take rollout.name=hf"
        )


def _check_number_of_heads(config: PretrainedConfig, size: int) -> None:
    """Each of ``size`` devices takes an equal share of the attention heads, with the KV heads that these read."""
    heads, kv_heads = config.num_attention_heads, _num_kv_heads(config)
    if heads % size or (kv_heads % size and size % kv_heads):
        raise ConfigError(
            f"rollout.tensor_model_parallel_size={size}: must divide the {heads} attention heads of "
            f"{config.name_or_path!r}, and divide its {kv_heads} KV heads or be a multiple of them"
        )


def _num_kv_heads(config: PretrainedConfig) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _head_size(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _cpu_cache_bytes(config: PretrainedConfig, rollout: RolloutConfig, place: VLLMPlace, max_model_len: int) -> int:
    """Bytes of KV cache in each of the engine's processes: enough for `max_num_seqs` sequences of full length, within
    this engine's share of memory."""
    num_kv_heads = max(1, _num_kv_heads(config) // place.group.size)
    per_token = 2 * config.num_hidden_layers * num_kv_heads * _head_size(config) * place.dtype.itemsize
    per_sequence = per_token * _CPU_BLOCK_TOKENS * (-(-max_model_len // _CPU_BLOCK_TOKENS) + 1)
    share = psutil.virtual_memory().available * rollout.gpu_memory_utilization / place.num_engines / place.group.size
    return min(per_sequence * rollout.max_num_seqs, int(share))


def _process_environment(place: VLLMPlace, folder: str) -> dict[str, str]:
    """What the engine's processes are started with."""
    variables = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # A fork of a process with threads may hang.
        "VLLM_RPC_BASE_PATH": folder,
    }
    if place.device.type == "cpu":
        variables |= {
            "TMPDIR": folder,
            # vLLM would pin every engine of this machine to the same cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(place.num_threads),
            # It compiles some helpers even in eager mode, which costs 15 s at the first token.
            "TORCHDYNAMO_DISABLE": "1",
        }
    if place.group.visible_devices:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(place.group.visible_devices)
    return variables


def _short_folder() -> str:
    """A new folder for the names of sockets, which the system cuts off at about a hundred characters."""
    parent = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="agentgym-vllm-", dir=parent if len(parent) <= _LONGEST_PARENT else "/tmp")


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for processes that are started meanwhile; take back also what vLLM itself sets for them."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def _expected_weights(config: PretrainedConfig, model: ModelConfig) -> ExpectedWeights:
    with torch.device("meta"):
        return ExpectedWeights(AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code))


def _vllm_sampling(sampling: SamplingParams) -> vllm.SamplingParams:
    return vllm.SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        logprobs=0,  # of the sampled token alone
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
