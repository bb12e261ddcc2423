"""Notices that this machine or process is about to end."""
