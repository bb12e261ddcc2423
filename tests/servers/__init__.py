"""Object stores for the tests: real servers on loopback, each a process of its own.

`programs` finds and starts the ones that are installed beside us (`make .venv-servers/.ready`); `stores`
reaches each store as a user does, and as a stranger does; `fixtures` gives them to tests.
"""

import os

os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # otherwise gcsfs uses gRPC
