"""A training run under random faults, and the proof of what came of it. See ``scripts/experiments/faults.py``."""
