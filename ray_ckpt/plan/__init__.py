"""Geometry of slices: regions of cut tensors, and the reads that fill live slices from saved ones."""
