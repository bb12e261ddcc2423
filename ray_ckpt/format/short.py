"""Values as short text for messages.

Python refuses to write an int of more than 4,300 digits in decimal. A state may have such ints, which are
therefore written in hex, in time proportional to the number of digits.
"""

from __future__ import annotations

from reprlib import Repr

MAX_DECIMAL_BITS = 14_000  # size of an int to write in decimal: 4,215 digits, below Python's limit


def key_text(key: object) -> str:
    """Return a dict's key as text, also for large ints."""
    return hex(key) if _is_long(key) and isinstance(key, int) else str(key)


class ShortRepr(Repr):
    """A `reprlib.Repr` for ints of any size."""

    def repr_int(self, x: int, level: int) -> str:
        if not _is_long(x):
            return super().repr_int(x, level)
        text, kept = hex(x), max(0, self.maxlong - 3)
        return f"{text[: kept // 2]}...{text[len(text) - (kept - kept // 2) :]}"


def _is_long(value: object) -> bool:
    return isinstance(value, int) and value.bit_length() > MAX_DECIMAL_BITS
