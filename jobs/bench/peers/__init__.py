"""Other checkpoint libraries on the same state, each in a separate process."""
