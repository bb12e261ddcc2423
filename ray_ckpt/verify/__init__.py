"""Checks of what is stored: content, plan, copies, drills."""
