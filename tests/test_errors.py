"""Every error has a text."""

from __future__ import annotations

import pytest

from ray_ckpt.actors.failures import reason
from ray_ckpt.errors import Unavailable, named_text, text_of


@pytest.mark.parametrize(
    ("error", "text", "named"),
    [
        (TimeoutError(), "no answer in time", "TimeoutError"),
        (TimeoutError(), "no answer in time", "TimeoutError"),
        (MemoryError(), "MemoryError", "MemoryError"),
        (OSError(" "), "OSError", "OSError"),
        (ValueError("odd"), "odd", "ValueError: odd"),
        (Unavailable("gone", hint="Wait."), "gone Wait.", "Unavailable: gone Wait."),
    ],
)
def test_an_error_without_a_text_is_named(error: Exception, text: str, named: str) -> None:
    assert text_of(error) == reason(error) == text
    assert named_text(error) == named
