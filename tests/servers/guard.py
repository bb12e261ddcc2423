"""Runs a command until it ends or standard input does: so a server never outlives the tests, killed or not.

python guard.py COMMAND ARGUMENT...
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading


def main() -> None:
    with subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL) as server:
        threading.Thread(target=_end_when_left, args=(server,), daemon=True).start()
        status = server.wait()
    os._exit(status & 0xFF)  # the thread may be reading still


def _end_when_left(server: subprocess.Popen[bytes]) -> None:
    sys.stdin.buffer.read()
    server.kill()


if __name__ == "__main__":
    main()
