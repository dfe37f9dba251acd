"""The learner: tokens, gradients, devices. The agent's world is the package `agentgym_rl`, below it."""

from agentgym_rl.install import check_verl

__distribution__ = "agentgym-rl"

check_verl()
