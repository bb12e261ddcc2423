"""Bytes to values and back: shards, manifests, trees, records, digests and names. No IO; see FORMAT.md."""
