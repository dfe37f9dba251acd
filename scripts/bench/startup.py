"""How long programs take to answer: their help, and the refusal of a wrong input.

Each is a process of its own, from its start to its end. A refusal must also have exit status 2 and be one line.

``python scripts/bench/startup.py [--repeats 3]``
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import bench
import letters
from bench import PROJECT, Result

HELP = {
    "agentgym_help": ("agentgym-rl --help", ["agentgym_rl.cli", "--help"], 0.5),
    "main_ppo_help": ("main_ppo --help", ["verl.agent_trainer.main_ppo", "--help"], 3.0),
}
MOST_REFUSAL_S = 5.0
NO_SERVER = "actor_rollout_ref.agentgym.env_addr=http://127.0.0.1:9"
WRONG = {
    "server": NO_SERVER,
    "model": "actor_rollout_ref.model.path=/absent/model",
    "data file": "data.train_file=absent.json",
    "key": "actor_rollout_ref.actor.optim.rl=1e-6",
}
"""What is wrong, and the override that makes it so."""


def seconds_of(arguments: Sequence[str], *, status: int, lines: int | None = None) -> float:
    """Of a program that ends with ``status`` and, where given, so many lines of errors."""
    began = time.perf_counter()
    run = subprocess.run([sys.executable, "-m", *arguments], cwd=PROJECT, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    said = run.stderr.splitlines()
    assert run.returncode == status, f"{' '.join(arguments)}: exit status {run.returncode}: {run.stderr}"
    assert lines is None or len(said) == lines, f"{' '.join(arguments)}: {len(said)} lines of errors: {run.stderr}"
    return seconds


def sound_overrides(folder: Path) -> Mapping[str, str]:
    """Overrides by key with which only the server is missing."""
    (folder / "items.json").write_text(json.dumps([{"item_id": f"textcraft_{index}"} for index in range(8)]))
    pairs = (
        f"data.train_file={folder / 'items.json'}",
        "data.train_batch_size=4",
        "data.max_response_length=400",
        f"actor_rollout_ref.model.path={letters.save_model(folder / 'model')}",
        "actor_rollout_ref.agentgym.task_name=textcraft",
        NO_SERVER,
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.device=cpu",
        f"trainer.default_local_dir={folder / 'out'}",
    )
    return {pair.partition("=")[0]: pair for pair in pairs}


def measure(options: argparse.Namespace) -> Iterator[Result]:
    for name, (what, arguments, most_s) in HELP.items():
        best = min(seconds_of(arguments, status=0) for _ in range(options.repeats))
        yield Result(name, f"`{what}`", best, "s", most_s)
    with tempfile.TemporaryDirectory() as made:
        sound = sound_overrides(Path(made))
        for name, wrong in WRONG.items():
            overrides = sound | {wrong.partition("=")[0]: wrong}
            command = ["verl.agent_trainer.main_ppo", *overrides.values()]
            best = min(seconds_of(command, status=2, lines=1) for _ in range(options.repeats))
            yield Result(
                f"wrong_{name.replace(' ', '_')}", f"`main_ppo` refuses a wrong {name}", best, "s", MOST_REFUSAL_S
            )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3, help="of which the fastest counts")
    return bench.run("startup", measure, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
