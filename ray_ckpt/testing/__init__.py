"""The real machines of a run in one process: nodes, disks, a log store, a network and time, all of them faulty.

`simulator` is the world and what can happen in it, `oracle` judges every step against the promises,
`schedules` lets things happen by chance from a seed, `exhaustive` in every order. No Ray, no clock, no thread.
"""
