"""Checkpoints as the directories of other trainers."""
