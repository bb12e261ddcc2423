"""Hosts of the run machines: waiting callers, timers and effects, without Ray, threads or a clock."""
