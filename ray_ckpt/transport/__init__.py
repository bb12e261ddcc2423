"""Bulk bytes between nodes: Arrow Flight, with a token on every call."""
