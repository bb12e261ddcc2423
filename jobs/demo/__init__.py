"""Demonstrations on a local Ray cluster: `python -m jobs.demo` and `python -m jobs.demo.s3`."""
