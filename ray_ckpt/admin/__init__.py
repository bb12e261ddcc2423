"""Changes to a run's log without a service."""
