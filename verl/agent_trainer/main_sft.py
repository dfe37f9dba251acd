"""``python -m verl.agent_trainer.main_sft``: train a model on conversations."""

from __future__ import annotations

import sys

from verl.agent_trainer.checks import check_sft_inputs
from verl.agent_trainer.dry_run import describe_sft
from verl.agent_trainer.entry import run
from verl.config import SFTConfig


def train(config: SFTConfig) -> None:
    """Check everything that a look can check, then train; or only say what would be done."""
    if config.trainer.dry_run:
        print(describe_sft(config), flush=True)
        return
    val_items = check_sft_inputs(config)
    # Only now: importing torch and Ray takes longer than finding a misspelled key.
    from verl.trainer.sft import run_sft

    run_sft(config, val_items=val_items)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], train, SFTConfig, program="verl.agent_trainer.main_sft", config_name="sft_trainer"))
