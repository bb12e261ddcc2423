"""The real machines of a run in one process, with nodes, disks, a store, a network and time that all fail.

`simulator` is the world and what can happen in it, `oracle` judges every step against the promises,
`schedules` lets things happen by chance from a seed, `exhaustive` in every order. No Ray, clock or thread.
"""
