"""The rate at which background work may read and copy: a token bucket; callers pass the time."""

from __future__ import annotations

LEAST_BYTES_PER_S = 10 << 20  # slower work counts as stuck, as a slower peer does
SLACK_S = 600.0  # time of such work beyond that of its bytes: busy disks and peers


def longest_s(nbytes: float, limit_bytes_per_s: float | None = None, *, slack_s: float = SLACK_S) -> float:
    """Return the time after which a read or a copy of `nbytes` at the rate of a limit counts as failed."""
    return slack_s + nbytes / min(LEAST_BYTES_PER_S, limit_bytes_per_s or LEAST_BYTES_PER_S)


class Budget:
    """A budget of `bytes_per_s` on average and `burst_bytes` at once; a rate of 0 allows nothing.

    An item larger than the burst is allowed when the bucket is full. The item leaves a debt, and the next
    items wait until the debt is paid.
    """

    def __init__(self, bytes_per_s: float, burst_bytes: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.burst_bytes = burst_bytes
        self._left_bytes = burst_bytes  # a negative value is a debt
        self._at_s: float | None = None

    def set_rate(self, bytes_per_s: float, burst_s: float) -> None:
        """Set the rate, and set the burst to the bytes of `burst_s` seconds; a debt stays."""
        if bytes_per_s != self.bytes_per_s:
            self._left_bytes = min(self._left_bytes, 0.0) + bytes_per_s * burst_s
            self.bytes_per_s = bytes_per_s
        self.burst_bytes = bytes_per_s * burst_s

    def take(self, nbytes: float, now_s: float) -> bool:
        """Return True and subtract `nbytes` if the budget allows them at `now_s` (monotonic seconds)."""
        if self.bytes_per_s <= 0:
            return False
        elapsed_s = 0.0 if self._at_s is None else max(now_s - self._at_s, 0.0)
        self._at_s = now_s
        self._left_bytes = min(self._left_bytes + elapsed_s * self.bytes_per_s, self.burst_bytes)
        if self._left_bytes < min(nbytes, self.burst_bytes):
            return False
        self._left_bytes -= nbytes
        return True

    def give_back(self, nbytes: float) -> None:
        """Put back bytes that were taken and not used."""
        self._left_bytes = min(self._left_bytes + nbytes, self.burst_bytes)
