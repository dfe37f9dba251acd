"""What a fault run trains: items of two tasks, and a small model that was shown how they are done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from agentgym_rl.data.conversations import Conversation, write_conversations
from agentgym_rl.data.demonstrations import demonstrate
from agentgym_rl.envs.registry import get_spec
from agentgym_rl.types import Item
from fault_run.plan import RunPlan

ROOT = Path(__file__).resolve().parents[3]
TASKS = ("textcraft", "babyai")
_TEXTCRAFT_DEPTH = 1
_BABYAI_LEVELS = ("GoToRedBallGrey", "GoToRedBallNoDists")
"""Where a few actions are enough: the run is about faults, and needs rewards of every size."""


@dataclass(frozen=True)
class Inputs:
    """Files that the training command names."""

    item_files: dict[str, Path]
    """By task, in the order of `TASKS`."""
    model: Path


def prepare(folder: Path, plan: RunPlan) -> Inputs:
    """Write item lists, demonstrations and model into ``folder``, and warm the model up."""
    folder.mkdir(parents=True)
    items = {task: pick_items(task, plan.items_per_task) for task in TASKS}
    files = {task: folder / f"{task}.json" for task in TASKS}
    for task, file in files.items():
        file.write_text(json.dumps([item.item_id for item in items[task]]))
    shown = [row for task in TASKS for row in demonstrate(items[task], get_spec(task), "act")]
    write_conversations(folder / "demonstrations.jsonl", shown)
    _make_base(folder / "base", shown, seed=plan.seed)
    _warm_up(folder, plan)
    return Inputs(files, folder / "warm" / "huggingface")


def pick_items(task: str, number: int) -> list[Item]:
    """The first items of the project's own training list that are easy enough."""
    rows = json.loads((ROOT / "AgentItemId" / f"{task}_train.json").read_text())
    easy = [row for row in rows if row.get("depth") == _TEXTCRAFT_DEPTH or row.get("level") in _BABYAI_LEVELS]
    return [Item.parse(row["item_id"], task) for row in easy[:number]]


def child_environment() -> dict[str, str]:
    """Of all processes that a fault run starts: the code of this very checkout, and one thread."""
    code = os.pathsep.join([str(ROOT), str(ROOT / "scripts" / "experiments")])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": code, "HF_HUB_OFFLINE": "1"}


def _make_base(folder: Path, shown: list[Conversation], *, seed: int) -> None:
    sys.path.append(str(ROOT / "examples" / "quickstart"))
    import torch
    from make_model import make_model, make_tokenizer

    torch.manual_seed(seed)
    tokenizer = make_tokenizer((message.content for row in shown for message in row.messages), vocab_size=1000)
    model = make_model(len(tokenizer), hidden_size=96, num_layers=2, num_heads=6, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _warm_up(folder: Path, plan: RunPlan) -> None:
    arguments = [
        f"model.path={folder / 'base'}",
        f"data.train_file={folder / 'demonstrations.jsonl'}",
        "data.train_batch_size=8",
        "optim.lr=2e-3",
        "optim.lr_warmup_steps=5",
        f"trainer.total_training_steps={plan.warm_up_steps}",
        f"trainer.default_local_dir={folder / 'warm'}",
        "trainer.logger=[jsonl]",
        "trainer.device=cpu",
        "trainer.num_threads=1",
        "trainer.worker_group=local",
    ]
    command = [sys.executable, "-m", "verl.agent_trainer.main_sft", *arguments]
    with (folder / "warm_up.log").open("wb") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log, env=child_environment(), cwd=ROOT)
