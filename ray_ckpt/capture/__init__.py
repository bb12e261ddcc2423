"""Live training state to slices and back: with client.py, the only place that imports torch."""
