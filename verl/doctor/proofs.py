"""What training relies on, tried out with the user's own model, chat template and environment server.

1. **template**: ids put together turn by turn equal those of the whole conversation rendered at once.
2. **masks**: of real episodes, exactly what the engine sampled is marked, with its log-probs, and rewards stand on it.
3. **log-probs**: the trainer gives the sampled tokens the log-probs that the engine drew them with.
4. **packing**: so does the model as transformers runs it, on padded rows.
5. **resume**: a step after a checkpoint equals the step of a run that never stopped.

Each is a `Finding`; one that fails says where. Whatever goes wrong within a proof is its result, not the doctor's end.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from agentgym_rl.agent.chat import ChatTemplate
from agentgym_rl.agent.formats import TaskView
from agentgym_rl.agent.strategies import Agent
from agentgym_rl.client.servers import client_factory
from agentgym_rl.doctor.findings import Finding, failed, not_applicable, passed
from agentgym_rl.envs.registry import get_spec
from agentgym_rl.errors import AgentGymError
from agentgym_rl.rollout.collector import check_failures
from agentgym_rl.rollout.requests import make_requests
from agentgym_rl.types import Generation, Item, Message, Role, SamplingParams, Trajectory
from verl.agent_trainer.checks import check_model_path
from verl.agent_trainer.loading import load_config, parse_command_line
from verl.config import ModelConfig, PPOConfig
from verl.doctor.differences import first_id_difference, first_value_difference
from verl.models.loading import compute_dtype, load_tokenizer, read_model
from verl.protocol import DataProto
from verl.single_controller.base import WorkerSpec
from verl.single_controller.start import start_workers
from verl.trainer.plan import resolve_threads
from verl.trainer.ppo import run_ppo
from verl.trainer.rollouts import generate
from verl.utils.devices import resolve_device
from verl.utils.model_folder import find_model, model_version
from verl.utils.tracking import read_metrics
from verl.workers.setup import ActorSetup, RolloutOrder, RolloutSetup

TEMPLATE, MASKS, LOG_PROBS, PACKING, RESUME = (
    "incremental ids equal the full render",
    "masks cover sampled tokens only",
    "engine and trainer log-probs agree",
    "packed equals padded",
    "a resumed step equals an uninterrupted one",
)
_ITEMS = (0, 1)
_TURNS = 3
# Float32 sums in another order; bfloat16 keeps 8 bits, so that a log-prob of -10 moves by some hundredths.
_TOLERANCES = {torch.float32: (1e-3, 1e-4), torch.bfloat16: (1.0, 0.05)}
"""Largest and mean difference of log-probs, in nats."""
_RELATIVE_ON_CUDA = 1e-3
_OTHER_EACH_TIME = ("timing_s/", "perf/", "checkpoint/", "training/rollout_probs_diff", "rollout/engine_")
"""Metrics that measure time or memory, or depend on who happened to be decoded together."""
_CHECKPOINT_BYTES_PER_PARAMETER = 20
"""Float32 weights, two moments, and the exported model, twice over."""


def prove(model: str, task: str, env_addr: str, *, overrides: Sequence[str] = (), quick: bool = False) -> list[Finding]:
    """All proofs, in order; ``overrides`` are keys of `PPOConfig`, and ``quick`` leaves the resumed step out.

    Raises `ConfigError` for a model that is not there or a key that does not exist.
    """
    with tempfile.TemporaryDirectory(prefix="agentgym-doctor-") as folder:
        config = _config(find_model(model), task, env_addr, Path(folder), overrides)
        check_model_path(config.actor_rollout_ref.model)
        findings = [_guarded(TEMPLATE, lambda: prove_template(config))]
        findings += _proofs_of_play(config)
        if quick:
            return [*findings, not_applicable(RESUME, "left out by --quick")]
        return [*findings, _guarded(RESUME, lambda: prove_resume(config, Path(folder)))]


def _config(model: str, task: str, env_addr: str, folder: Path, overrides: Sequence[str]) -> PPOConfig:
    """A small training run on two items."""
    items = folder / "items.json"
    items.write_text(json.dumps([f"{task}_{index}" for index in _ITEMS]))
    branch = "actor_rollout_ref"
    argv = [
        *(f"data.train_file={items}", "data.train_batch_size=2", f"{branch}.model.path={json.dumps(model)}"),
        *(f"{branch}.agentgym.task_name={task}", f"{branch}.agentgym.env_addr={env_addr}"),
        *(f"{branch}.rollout.n=2", f"{branch}.rollout.max_tokens=64", f"{branch}.actor.ppo_mini_batch_size=2"),
        # So that a step changes something even when all episodes score the same.
        *(f"{branch}.actor.entropy_coeff=0.001", f"algorithm.rounds_ctrl.rounds={_TURNS}"),
        *("trainer.worker_group=local", "trainer.logger=[jsonl]", *overrides),
    ]
    return load_config(PPOConfig, parse_command_line(argv, program="verl.doctor", config_name="ppo_trainer"))


def _guarded(name: str, proof: Callable[[], Finding]) -> Finding:
    """A proof's finding; an error of it is one that failed."""
    try:
        return proof()
    except (AgentGymError, OSError, RuntimeError, ValueError) as error:
        return failed(name, f"{type(error).__name__}: {' '.join(str(error).split())}", "see the error")


# --------------------------------------------------------------------------------------------------------- the template


def prove_template(config: PPOConfig) -> Finding:
    """Compare a conversation with the environment, encoded turn by turn, with its render as a whole."""
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    chat = ChatTemplate(tokenizer, warns=False)
    messages = _play_by_script(config)
    return compare_with_full_render(tokenizer, chat, messages)


def compare_with_full_render(tokenizer: Any, chat: ChatTemplate, messages: Sequence[Message]) -> Finding:
    """The template's row, from a conversation that ends with an assistant's message."""
    if chat.rewrites_history:
        seen = "this template rewrites earlier messages, such as their thoughts; what was sampled is kept as it was"
        return not_applicable(TEMPLATE, seen)
    incremental = chat.encode_conversation(messages).ids
    conversation = [{"role": str(message.role), "content": message.content} for message in messages]
    rendered = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=False)
    whole = tokenizer.encode(rendered, add_special_tokens=False)
    # After the last end-of-turn a render may go on with what would separate the next message.
    difference = first_id_difference(
        incremental, whole[: len(incremental)], tokenizer.decode, names=("turn by turn", "the whole render")
    )
    if difference is None:
        return passed(TEMPLATE, f"{len(incremental)} tokens of {len(messages)} messages")
    remedy = "a template that depends on a message's number or neighbours cannot be grown turn by turn: change it"
    return failed(TEMPLATE, difference, remedy)


def _play_by_script(config: PPOConfig) -> list[Message]:
    """A conversation with the environment in which the agent does what is always allowed; it ends with the agent."""
    agentgym, [task] = config.actor_rollout_ref.agentgym, config.actor_rollout_ref.agentgym.tasks
    make_client = client_factory(get_spec(task).client, agentgym.servers[task], timeout_s=agentgym.request_timeout)
    with make_client() as client:
        client.reset(_ITEMS[0])
        agent: Agent = agentgym.agent_choice.make(TaskView.of(client))
        messages = [Message(role, text.content) for role, text in agent.opening(client.observe())]
        for turn in range(_TURNS):
            text = agent.write(client.example_action, f"Step {turn + 1}.")
            messages.append(Message(Role.ASSISTANT, text))
            output = client.step(agent.read(text).for_environment or text)
            if output.done or turn == _TURNS - 1:
                break
            messages.append(Message(Role.USER, agent.observe(output.state).content))
    return messages


# ------------------------------------------------------------------------------------------------------- real episodes


@dataclass(frozen=True)
class Played:
    """Episodes of the model, what its engine gave, and what the trainer says of them."""

    trajectories: tuple[Trajectory, ...]
    generations: dict[str, list[Generation]]
    batch: DataProto
    trainer_log_probs_S: torch.Tensor
    """Of the sampled tokens, in order."""


def _proofs_of_play(config: PPOConfig) -> Iterator[Finding]:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            played = _play(config)
    except (AgentGymError, OSError, RuntimeError, ValueError) as error:
        yield failed(MASKS, f"no episodes: {type(error).__name__}: {' '.join(str(error).split())}", "see the error")
        for name in (LOG_PROBS, PACKING):
            yield not_applicable(name, "there are no episodes")
        return
    model, device = config.actor_rollout_ref.model, torch.device(resolve_device(config.trainer.device))
    dtype = compute_dtype(model, device)
    yield _guarded(MASKS, lambda: compare_masks(played.trajectories, played.generations))
    yield _guarded(LOG_PROBS, lambda: _compare_engine(played, dtype))
    temperature = config.actor_rollout_ref.rollout.temperature
    yield _guarded(PACKING, lambda: _compare_padded(played, model, device, dtype, temperature))


def _play(config: PPOConfig) -> Played:
    """Two samples of each item by the engine, and the trainer's log-probs of them."""
    branch, data = config.actor_rollout_ref, config.data
    with tempfile.TemporaryDirectory(prefix="agentgym-doctor-") as folder:
        rollout = RolloutSetup(
            model=branch.model.absolute(),
            agentgym=branch.agentgym,
            rollout=branch.rollout,
            limits=branch.rollout.limits(data),
            log_dir=folder,
            seed=config.trainer.seed,
        )
        training = ActorSetup(
            branch.actor, ref=None, critic=None, total_updates=1, loss_norm_constant=float(data.max_response_length)
        )
        spec = WorkerSpec(
            "verl.doctor.recorder:RecordingWorker",
            (rollout, training),
            num_threads=resolve_threads(config.trainer),
            device=resolve_device(config.trainer.device),
        )
        items = [Item(task, index) for task in branch.agentgym.tasks for index in _ITEMS]
        requests = make_requests(items, n=2, purpose="doctor", seed=config.trainer.seed)
        sampling = SamplingParams(max_tokens=branch.rollout.max_tokens, temperature=branch.rollout.temperature)
        order = RolloutOrder(step=0, max_rounds=_TURNS, sampling=sampling, log_name="doctor")
        with start_workers(spec, config.trainer, config.ray_init) as workers:
            trajectories = generate(workers, requests, order).trajectories
            check_failures(trajectories, 0.0)
            batch = DataProto.from_trajectories(trajectories)
            [log_probs_T] = workers.call_all("log_probs", batch.for_model())
            [generations] = workers.call_all("generations")
    return Played(tuple(trajectories), generations, batch, log_probs_T[batch.loss_mask_T].cpu())


def compare_masks(trajectories: Sequence[Trajectory], generations: dict[str, list[Generation]]) -> Finding:
    """Hold each record against what the engine gave for it, by trajectory id."""
    remedy = "the record of a trajectory is wrong: training on it would teach what nobody sampled; please report it"
    sampled = 0
    for trajectory in trajectories:
        difference = _mask_difference(trajectory, _given(trajectory, generations))
        if difference is not None:
            return failed(MASKS, f"{trajectory.item.item_id} sample {trajectory.sample_index}: {difference}", remedy)
        sampled += trajectory.num_sampled_tokens
    return passed(MASKS, f"{sampled} sampled tokens in {len(trajectories)} episodes")


def _given(trajectory: Trajectory, generations: dict[str, list[Generation]]) -> list[Generation]:
    """What the engine gave for a trajectory, turn by turn."""
    t = trajectory
    ending = f"{t.uid}/{t.item.item_id}/{t.sample_index}/{t.trial}/{t.attempt}"
    return next((given for id, given in generations.items() if id.endswith(ending)), [])


def _mask_difference(trajectory: Trajectory, given: Sequence[Generation]) -> str | None:
    """The first token that is marked and was not sampled here, or was and is not."""
    marked = [int(position) for position in trajectory.loss_mask.nonzero()[0]]
    tokens = [(id, log_prob) for turn in given for id, log_prob in zip(turn.token_ids, turn.log_probs, strict=True)]
    for position, (id, log_prob) in zip(marked, tokens, strict=False):
        seen = int(trajectory.input_ids[position])
        if seen != id:
            return f"token {position} is marked and is {seen}, where the engine gave {id}"
        if abs(float(trajectory.rollout_log_probs[position]) - log_prob) > 1e-6 * max(1.0, abs(log_prob)):
            return f"token {position} has log-prob {trajectory.rollout_log_probs[position]}, the engine gave {log_prob}"
    if len(marked) != len(tokens):
        return f"{len(marked)} tokens are marked, and the engine sampled {len(tokens)}"
    unmarked = trajectory.loss_mask == 0
    if (trajectory.rollout_log_probs[unmarked] != 0).any():
        return "a token that was not sampled has a log-prob"
    rewarded = set(map(int, trajectory.token_rewards.nonzero()[0]))
    if not rewarded <= set(marked):
        return f"token {min(rewarded - set(marked))} has a reward and was not sampled"
    return None


def _compare_engine(played: Played, dtype: torch.dtype) -> Finding:
    engine_S = played.batch.rollout_log_probs_T[played.batch.loss_mask_T]
    return compare_log_probs(
        LOG_PROBS,
        engine_S,
        played.trainer_log_probs_S,
        dtype,
        names=("engine", "trainer"),
        remedy="engine and trainer compute different models: try rollout.name=hf or model.dtype=float32, and compare",
    )


def _compare_padded(
    played: Played, model: ModelConfig, device: torch.device, dtype: torch.dtype, temperature: float
) -> Finding:
    return compare_log_probs(
        PACKING,
        played.trainer_log_probs_S,
        padded_log_probs(played.batch, model, device, dtype, temperature),
        dtype,
        names=("packed", "padded"),
        remedy="this architecture does not take packed rows: it cannot be trained here",
    )


def compare_log_probs(
    name: str, ours_S: torch.Tensor, theirs_S: torch.Tensor, dtype: torch.dtype, *, names: tuple[str, str], remedy: str
) -> Finding:
    """The row of two computations of the same log-probs, to the precision of ``dtype``."""
    largest, mean = _TOLERANCES[dtype]
    difference = first_value_difference(ours_S, theirs_S, names=names, tolerance=largest, mean_tolerance=mean)
    if difference is not None:
        return failed(name, difference, remedy)
    gap = float((ours_S - theirs_S).abs().max()) if len(ours_S) else 0.0
    return passed(name, f"{len(ours_S)} tokens, largest difference {gap:.1e} nats ({dtype})")


@torch.no_grad()
def padded_log_probs(
    batch: DataProto, config: ModelConfig, device: torch.device, dtype: torch.dtype, temperature: float
) -> torch.Tensor:
    """``S``: log-probs of the loss tokens by the model as transformers runs it, sequences padded to equal length."""
    model = read_model(config, attn_implementation="sdpa").to(device=device, dtype=dtype).eval()  # type: ignore[call-arg]
    lengths = batch.lengths_B.tolist()
    ids_BL = torch.nn.utils.rnn.pad_sequence(batch.input_ids_T.split(lengths), batch_first=True).to(device)
    there_BL = torch.arange(ids_BL.shape[1])[None] < batch.lengths_B[:, None]
    logits_BLV = model(input_ids=ids_BL, attention_mask=there_BL.long().to(device), use_cache=False).logits.float()
    log_probs_BL = (logits_BLV[:, :-1] / temperature).log_softmax(-1).gather(-1, ids_BL[:, 1:, None])[..., 0].cpu()
    # A token's own place; nothing precedes the first.
    log_probs_T = torch.nn.functional.pad(log_probs_BL, (1, 0))[there_BL]
    return log_probs_T[batch.loss_mask_T]


# ------------------------------------------------------------------------------------------------------------- resuming


def prove_resume(config: PPOConfig, folder: Path) -> Finding:
    """Two steps at once, and the second alone after the first one's checkpoint."""
    missing = _missing_space(config, folder)
    if missing:
        return not_applicable(RESUME, missing, "set TMPDIR to a larger disk")
    items = [Item(task, index) for task in config.actor_rollout_ref.agentgym.tasks for index in _ITEMS]
    whole, resumed = folder / "whole", folder / "resumed"
    trainer = replace(config.trainer, total_training_steps=2, save_freq=1, max_actor_ckpt_to_keep=None)
    with contextlib.redirect_stdout(io.StringIO()):
        run_ppo(
            replace(config, trainer=replace(trainer, default_local_dir=str(whole))), train_items=items, val_items=()
        )
        again = replace(
            trainer,
            default_local_dir=str(resumed),
            resume_mode="resume_path",
            resume_from_path=str(whole / "global_step_1"),
        )
        run_ppo(replace(config, trainer=again), train_items=items, val_items=())
    tolerance = _RELATIVE_ON_CUDA if resolve_device(config.trainer.device) == "cuda" else 0.0
    return compare_steps(whole, resumed, step=2, tolerance=tolerance)


def compare_steps(whole: Path, resumed: Path, *, step: int, tolerance: float) -> Finding:
    """The row of a step in two runs' folders: its metrics and, where ``tolerance`` is 0, the weights after it."""
    first, second = (_numbers_of(folder, step) for folder in (whole, resumed))
    for name in sorted(first.keys() | second.keys()):
        one, other = first.get(name), second.get(name)
        if one is None or other is None or abs(one - other) > tolerance * max(abs(one), abs(other)):
            remedy = "a resumed run would go on differently: is the environment deterministic?"
            return failed(RESUME, f"step {step}: {name} is {one} without a stop and {other} after one", remedy)
    hashes = [
        model_version(str(folder / f"global_step_{step}" / "actor" / "huggingface")) for folder in (whole, resumed)
    ]
    if tolerance == 0 and hashes[0] != hashes[1]:
        return failed(RESUME, f"all metrics of step {step} agree, and the weights do not", "please report it")
    exactly = "to the last digit, weights included" if tolerance == 0 else f"to {tolerance:g}"
    return passed(RESUME, f"{len(first)} metrics of step {step} agree {exactly}")


def _numbers_of(folder: Path, step: int) -> dict[str, float]:
    row = next(row for row in read_metrics(folder / "metrics.jsonl") if row["step"] == step)
    return {name: value for name, value in row.items() if not name.startswith(_OTHER_EACH_TIME) and "_s_" not in name}


def _missing_space(config: PPOConfig, folder: Path) -> str | None:
    """Why three checkpoints do not fit; None when they do."""
    path = Path(config.actor_rollout_ref.model.path)
    size = sum(file.stat().st_size for file in path.glob("*.safetensors")) if path.is_dir() else 0
    needed, free = 3 * _CHECKPOINT_BYTES_PER_PARAMETER * size // 2, shutil.disk_usage(folder).free
    if needed <= free:
        return None
    return f"its checkpoints may need {needed / 2**30:.0f} GiB, and {folder} has {free / 2**30:.0f} GiB free"
