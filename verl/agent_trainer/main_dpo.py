"""``python -m verl.agent_trainer.main_dpo``: train a model on pairs of better and worse trajectories."""

from __future__ import annotations

import sys

from verl.agent_trainer.checks import check_dpo_inputs
from verl.agent_trainer.dry_run import describe_sft
from verl.agent_trainer.entry import run
from verl.config import DPOConfig


def train(config: DPOConfig) -> None:
    """Check everything that a look can check, then train; or only say what would be done."""
    if config.trainer.dry_run:
        print(describe_sft(config), flush=True)
        return
    val_items = check_dpo_inputs(config)
    # Only now: importing torch and Ray takes longer than finding a misspelled key.
    from verl.trainer.dpo import run_dpo

    run_dpo(config, val_items=val_items)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], train, DPOConfig, program="verl.agent_trainer.main_dpo", config_name="dpo_trainer"))
