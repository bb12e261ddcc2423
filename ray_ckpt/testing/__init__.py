"""Simulator: the real machines of a run in one process, with faulty nodes, disks, store, network and time.

`simulator` is the world with its events, and `oracle` checks every step against the promises. `schedules` and
`silences` choose events by chance from a seed; `exhaustive` plays them in every order. There is no Ray, no
clock and no thread.
"""
