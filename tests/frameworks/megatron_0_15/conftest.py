"""The fixtures of tests/frameworks/megatron."""

from __future__ import annotations

from tests.frameworks.megatron.conftest import cluster, folders, pair, single, storage

__all__ = ["cluster", "folders", "pair", "single", "storage"]
