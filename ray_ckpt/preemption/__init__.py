"""Notices that a machine is about to go."""
