"""Sizes and tiers as people read them, in logs, on pages and in tables."""

from __future__ import annotations

from collections.abc import Mapping

TIER_TEXT: Mapping[str, str] = {
    "memory": "memory",
    "local": "this node's disk",
    "peer": "other nodes",
    "remote": "the storage path",
}


def size_text(size_bytes: float) -> str:
    """`1.5 GB`, in powers of 1000."""
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= one:
            return f"{size_bytes / one:.1f} {unit}"
    return f"{size_bytes:.0f} B"


def tier_text(tier: str) -> str:
    """A tier in words; one that a newer version has written, by its name."""
    return TIER_TEXT.get(tier, tier)


def tiers_text(read_bytes: Mapping[str, float]) -> str:
    """`4.0 GB from memory, 1.2 GB from other nodes`; `nothing` if nothing was read."""
    parts = (
        f"{size_text(nbytes)} from {tier_text(tier)}" for tier, nbytes in sorted(read_bytes.items()) if nbytes
    )
    return ", ".join(parts) or "nothing"
