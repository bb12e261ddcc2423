"""Import torchtitan with the CPU as its device, and its models, whose packages use what torch deprecates.

`program` comes first: torchtitan's modules keep the device that they find when they are imported.
"""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import tests.frameworks.torchtitan.program  # noqa: F401  # isort: skip
    import torchtitan.models.llama3.config_registry  # noqa: F401
