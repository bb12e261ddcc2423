"""Other checkpoint libraries on the same state, each in a process of its own."""
