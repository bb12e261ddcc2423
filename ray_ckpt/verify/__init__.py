"""Checks of stored checkpoints: content, plan, copies, drills."""
