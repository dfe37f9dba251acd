"""``python -m verl.agent_trainer.main_ppo``: train an agent by multi-turn RL."""

from __future__ import annotations

import sys

from verl.agent_trainer.checks import check_ppo_inputs
from verl.agent_trainer.dry_run import describe_ppo
from verl.agent_trainer.entry import run
from verl.config import PPOConfig


def train(config: PPOConfig) -> None:
    """Check everything that a look can check, then train; or only say what would be done."""
    if config.trainer.dry_run:
        print(describe_ppo(config), flush=True)
        return
    items = check_ppo_inputs(config)
    # Only now: importing torch and Ray takes longer than finding a misspelled key.
    from verl.trainer.ppo import run_ppo

    run_ppo(config, train_items=items.train, val_items=items.val)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], train, PPOConfig, program="verl.agent_trainer.main_ppo", config_name="ppo_trainer"))
