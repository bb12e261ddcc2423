"""A strict store: python -m tests.servers.strict_store --port 0 --bucket test"""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path

from tests.servers.strict_store.objects import MIN_PART_BYTES
from tests.servers.strict_store.server import Server, Settings


def _settings(arguments: argparse.Namespace) -> Settings:
    return Settings(
        port=arguments.port,
        directory=arguments.directory,
        access_key=arguments.access_key,
        secret_key=arguments.secret_key,
        token=arguments.token,
        conditions=arguments.conditions,
        min_part_bytes=arguments.min_part_bytes,
        buckets=tuple(arguments.bucket),
    )


def main() -> None:
    usual = Settings()
    parser = argparse.ArgumentParser(prog="python -m tests.servers.strict_store", description=__doc__)
    parser.add_argument("--port", type=int, default=usual.port, help="0: any free one")
    parser.add_argument("--directory", type=Path, help="keep objects here instead of in memory")
    parser.add_argument("--bucket", action="append", default=[], help="make this bucket; may be repeated")
    parser.add_argument("--access-key", default=usual.access_key)
    parser.add_argument("--secret-key", default=usual.secret_key)
    parser.add_argument("--token", default=usual.token, help="the bearer token of the GCS APIs")
    parser.add_argument("--conditions", choices=("enforced", "ignored", "501"), default=usual.conditions)
    parser.add_argument("--min-part-bytes", type=int, default=MIN_PART_BYTES)
    parser.add_argument("--until-eof", action="store_true", help="end when standard input ends")
    arguments = parser.parse_args()
    with Server(_settings(arguments)) as server:
        print(f"listening on {server.endpoint}", flush=True)
        if arguments.until_eof:
            sys.stdin.read()
        else:
            threading.Event().wait()


if __name__ == "__main__":
    main()
