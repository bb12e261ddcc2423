"""Live training state to slices and back: the only room that imports torch."""
