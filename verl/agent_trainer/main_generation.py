"""``python -m verl.agent_trainer.main_generation``: evaluate a model on items of an environment."""

from __future__ import annotations

import sys

from verl.agent_trainer.checks import check_generation_inputs
from verl.agent_trainer.dry_run import describe_evaluation
from verl.agent_trainer.entry import run
from verl.config import GenerationConfig


def evaluate(config: GenerationConfig) -> None:
    """Check everything that a look can check, then evaluate; or only say what would be done."""
    if config.trainer.dry_run:
        print(describe_evaluation(config), flush=True)
        return
    items = check_generation_inputs(config)
    # Only now: importing torch and Ray takes longer than finding a misspelled key.
    from verl.trainer.generation import run_generation

    run_generation(config, items)


if __name__ == "__main__":
    sys.exit(
        run(
            sys.argv[1:],
            evaluate,
            GenerationConfig,
            program="verl.agent_trainer.main_generation",
            config_name="generation",
        )
    )
