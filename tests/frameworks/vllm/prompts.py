"""The prompts of all tests of this folder, and the number of tokens that follow each."""

from __future__ import annotations

PROMPTS = ([5, 9, 3], list(range(20, 32)))
NUM_TOKENS = 12
