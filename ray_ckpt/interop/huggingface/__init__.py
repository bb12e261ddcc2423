"""Transformers: its Trainer, and model directories of the Hub."""
