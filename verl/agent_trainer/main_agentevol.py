"""``python -m verl.agent_trainer.main_agentevol``: explore, keep what succeeded, train on it, and again."""

from __future__ import annotations

import sys

from verl.agent_trainer.checks import check_agentevol_inputs
from verl.agent_trainer.dry_run import describe_agentevol
from verl.agent_trainer.entry import run
from verl.config import AgentEvolConfig


def train(config: AgentEvolConfig) -> None:
    """Check everything that a look can check, then train; or only say what would be done."""
    if config.trainer.dry_run:
        print(describe_agentevol(config), flush=True)
        return
    items = check_agentevol_inputs(config)
    # Only now: importing torch and Ray takes longer than finding a misspelled key.
    from verl.trainer.agentevol import run_agentevol

    run_agentevol(config, train_items=items.train, val_items=items.val)


if __name__ == "__main__":
    sys.exit(
        run(
            sys.argv[1:],
            train,
            AgentEvolConfig,
            program="verl.agent_trainer.main_agentevol",
            config_name="agentevol",
        )
    )
