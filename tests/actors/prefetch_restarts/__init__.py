"""Restarts of groups on nodes of this process, driven by seeds: real agents, files and memory, without Ray.

`nodes` has the machines and their agents, `ranks` the ranks of a group, `coordinator` the decisions about
commits and sessions, `moments` the places at which a prefetch is held up, `memory` the search for memory that
is left, and `schedule` the random events.
"""
