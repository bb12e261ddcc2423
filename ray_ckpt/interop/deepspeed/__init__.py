"""DeepSpeed: engines with ZeRO 1, 2 and 3, captured and restored as global tensors."""
