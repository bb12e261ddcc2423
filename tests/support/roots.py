"""What root digests cover: fragments today, files in runs of earlier builds (`make test-slow`)."""

from __future__ import annotations

import pytest

ROOTS = (pytest.param("files", marks=pytest.mark.slow), "fragments")
