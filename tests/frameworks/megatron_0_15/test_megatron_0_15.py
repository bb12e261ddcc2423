"""The tests of tests/frameworks/megatron with the line before."""

from __future__ import annotations

from importlib.metadata import version

from tests.frameworks.megatron.test_forms import *  # noqa: F403
from tests.frameworks.megatron.test_megatron import *  # noqa: F403


def test_the_line_is_another_one() -> None:
    assert version("megatron-core").startswith("0.15.")
