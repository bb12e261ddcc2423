"""Tests with the packages of one framework, each in an environment of its own: `make test-frameworks`."""
