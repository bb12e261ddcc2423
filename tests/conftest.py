"""What holds for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.servers.fixtures"]

# Machines are slow and shared: no test may fail because an example took long.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
