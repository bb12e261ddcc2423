"""A small GPT over bytes and its text: what the training jobs train."""
