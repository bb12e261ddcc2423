"""Measurements of speed and size, each compared with a limit. Run them with `python -m jobs.bench`."""
