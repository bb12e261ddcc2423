"""The node agent: one actor for each node of a service."""
