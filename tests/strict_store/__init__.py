"""gcsfs reads this when it is imported: it would ask over gRPC, for a minute, what kind a bucket is."""

import os

os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
