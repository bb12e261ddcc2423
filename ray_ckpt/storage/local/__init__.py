"""Disks and memory of one machine."""
