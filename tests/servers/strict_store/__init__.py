"""An object store for tests and benchmarks, on loopback: as strict as S3 and GCS are, with faults by rule.

    with StrictStore.process(buckets=("test",)) as store:
        store.endpoint                                   # http://127.0.0.1:PORT, for S3 and GCS alike
        store.add_fault(Fault(match=Match(operation="PutObject"), action=DropAfter(), every=3))

S3: access key `strict`, secret `strict-secret`, path style. GCS: bearer token `strict-token`. Both are on
one port and see the same buckets. Other requests are refused. `server` is the same store in this process.
"""

from tests.servers.strict_store.faults import (
    Delay,
    Down,
    DropAfter,
    DropBefore,
    Fault,
    Flip,
    Hang,
    Match,
    Slow,
    Status,
    Truncate,
)
from tests.servers.strict_store.process import StrictStore

__all__ = [
    "Delay",
    "Down",
    "DropAfter",
    "DropBefore",
    "Fault",
    "Flip",
    "Hang",
    "Match",
    "Slow",
    "Status",
    "StrictStore",
    "Truncate",
]
