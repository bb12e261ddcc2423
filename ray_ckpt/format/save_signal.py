"""The save signal: 8 bytes of shared memory that a node's agent writes and its ranks read at each step.

    bits 0 to 47    the step after which all ranks save; all 64 bits 0: no signal
    bits 48 to 62   number of the signal; a step that is announced again has another number
    bit 63          urgent: the node of a rank is about to be lost

The signal is written and read as a whole, since it is aligned and the interpreter copies eight bytes at once.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

PAGE_BYTES = 4096  # the smallest mapping
MAX_STEP = (1 << 48) - 1  # the signal has 48 bits for the step
NUMBERS = 1 << 15  # numbers before they start again at 0; consecutive signals always differ
_WORD = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSignal:
    """Signal to save after `step`; `number` distinguishes it from earlier ones."""

    step: int
    number: int
    urgent: bool = False

    @property
    def word(self) -> int:
        return self.urgent << 63 | self.number % NUMBERS << 48 | min(self.step, MAX_STEP)


def write_flag(memory: memoryview, word: int) -> None:
    _WORD.pack_into(memory, 0, word)


def read_flag(memory: memoryview) -> int:
    word: int = _WORD.unpack_from(memory, 0)[0]
    return word


def step_of(word: int) -> int:
    """Return the step in a signal, 0 if there is none."""
    return word & MAX_STEP


def is_urgent(word: int) -> bool:
    return bool(word >> 63)
