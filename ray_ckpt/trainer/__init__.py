"""The rank's side: a Checkpointer, its saves and its restores."""
