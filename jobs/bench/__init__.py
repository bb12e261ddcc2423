"""Speed and size in numbers, each beside its limit. Run it with `python -m jobs.bench`."""
