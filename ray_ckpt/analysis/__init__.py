"""Analyses of a run: its time by its log, differences between checkpoints, the report."""
