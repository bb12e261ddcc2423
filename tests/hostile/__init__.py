"""Damage to every file of a run, by seed: `python -m tests.hostile --seeds 0:2000`."""
