"""Ray shells around the machines: they carry effects out and bring events in, and decide nothing."""
