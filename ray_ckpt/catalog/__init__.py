"""A run's checkpoints, read without a service: list, load, export."""
