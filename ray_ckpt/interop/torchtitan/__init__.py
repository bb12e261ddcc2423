"""torchtitan: a checkpoint manager, and the items of its Trainer."""
