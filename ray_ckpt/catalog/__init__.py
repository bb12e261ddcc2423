"""Access to a run's checkpoints without a service: list, load, export."""
