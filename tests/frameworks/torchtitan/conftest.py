"""Import torchtitan with the CPU as its device, and its models, whose packages use what torch deprecates."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchtitan.models.llama3.config_registry  # noqa: F401
