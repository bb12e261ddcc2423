"""What a run's log says of its time, and what differs between checkpoints."""
