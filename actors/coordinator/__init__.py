"""The coordinator's actor: one for each service, any number of runs."""
