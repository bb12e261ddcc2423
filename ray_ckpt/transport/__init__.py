"""Bulk bytes between nodes: Arrow Flight over TLS, with a token of the run on every call."""
