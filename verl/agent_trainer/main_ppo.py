"""``python -m verl.agent_trainer.main_ppo``: train an agent by multi-turn RL."""

from __future__ import annotations

import sys

from verl.agent_trainer.entry import run
from verl.config import PPOConfig


def train(config: PPOConfig) -> None:
    """Check everything that a look can check, then train."""
    from verl.agent_trainer.checks import check_ppo_inputs

    items = check_ppo_inputs(config)
    # Only now: importing torch and Ray takes longer than finding a misspelled key.
    from verl.trainer.ppo import PPOTrainer

    PPOTrainer(config, items).run()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], train, PPOConfig, program="verl.agent_trainer.main_ppo", config_name="ppo_trainer"))
