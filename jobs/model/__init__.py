"""A small GPT over bytes and its text, which the training jobs use."""
