"""gcsfs reads this when it is imported; otherwise it requests a bucket's kind over gRPC, for a minute."""

import os

os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
