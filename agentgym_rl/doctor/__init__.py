"""``agentgym-rl doctor``: what of a machine is fit to train, and what to do about the rest."""
