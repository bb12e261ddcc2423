"""Other trainers that save through ray_ckpt, and their formats."""
