"""Kinds of root digests: over fragments, and over files as in earlier builds (in `make test-slow`)."""

from __future__ import annotations

import pytest

ROOTS = (pytest.param("files", marks=pytest.mark.slow), "fragments")
