"""A strict store in a process of its own, and its admin interface from outside."""

from __future__ import annotations

import http.client
import json
import selectors
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlsplit

from tests.servers.strict_store.faults import Fault
from tests.servers.strict_store.records import Conditions

START_S = 30.0  # until the process listens: a second, when the machine has nothing else to do
_ADMIN_S = 30.0  # until the admin interface answers


class StrictStore:
    """A running store. `process` starts one; `StrictStore(endpoint)` speaks with one that runs elsewhere.

    The admin interface works whatever faults are set. OSError: the store is gone. ValueError: it has refused.
    """

    def __init__(self, endpoint: str, *, process: subprocess.Popen[str] | None = None) -> None:
        self.endpoint = endpoint
        self._process = process

    @classmethod
    @contextmanager
    def process(
        cls,
        *,
        buckets: tuple[str, ...] = (),
        port: int = 0,
        directory: Path | None = None,
        conditions: Conditions = "enforced",
        min_part_bytes: int | None = None,
    ) -> Iterator[Self]:
        """Start a store with the usual keys and token, until the end of the `with` or of this process."""
        command = [sys.executable, "-m", "tests.servers.strict_store", "--port", str(port), "--until-eof"]
        command += ["--conditions", conditions]
        command += [f"--bucket={bucket}" for bucket in buckets]
        command += ["--directory", str(directory)] if directory else []
        command += ["--min-part-bytes", str(min_part_bytes)] if min_part_bytes is not None else []
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                with selectors.DefaultSelector() as selector:  # unlike select(), takes any descriptor
                    selector.register(process.stdout, selectors.EVENT_READ)
                    is_ready = bool(selector.select(START_S))
                line = process.stdout.readline() if is_ready else "nothing"
                if not line.startswith("listening on "):
                    raise OSError(f"the strict store did not start: {line!r}")
                yield cls(line.removeprefix("listening on ").strip(), process=process)
            finally:
                process.kill()

    def kill(self) -> None:
        """SIGKILL, and wait for it."""
        assert self._process is not None, "this store is not ours to end"
        self._process.kill()
        self._process.wait()

    def add_fault(self, fault: Fault) -> int:
        """Add a fault, and return the number by which it is removed."""
        return int(self._send("POST", "faults", fault.to_json())["number"])

    def remove_fault(self, number: int) -> None:
        self._send("DELETE", f"faults?number={number}")

    def clear_faults(self) -> None:
        self._send("DELETE", "faults")

    def faults_fired(self) -> dict[int, int]:
        """Return how often each fault has happened, by its number."""
        return {int(number): count for number, count in self._send("GET", "faults").items()}

    def stats(self) -> dict[str, Any]:
        """bytes_in, bytes_out, in_flight, most_in_flight; requests by operation and status, 0: dropped.

        A request is counted before its answer leaves; it is in flight until all of the answer has left.
        """
        stats = self._send("GET", "stats")
        for name, counts in stats["requests"].items():
            stats["requests"][name] = {int(status): count for status, count in counts.items()}
        return stats

    def make_bucket(self, name: str) -> None:
        self._send("POST", "buckets", {"name": name})

    def objects(self, bucket: str) -> list[dict[str, Any]]:
        """key, size, etag, generation, modified_s, headers of each, by key."""
        return list(self._send("GET", f"objects?bucket={quote(bucket)}")["objects"])

    def keys(self, bucket: str) -> list[str]:
        return [str(stored["key"]) for stored in self.objects(bucket)]

    def uploads(self, bucket: str) -> list[dict[str, Any]]:
        """Unfinished ones: key, upload_id, initiated_s, parts (their number)."""
        return list(self._send("GET", f"uploads?bucket={quote(bucket)}")["uploads"])

    def set_clock_offset(self, offset_s: float) -> None:
        """Set the store's clock to this machine's time plus `offset_s` from now on."""
        self._send("POST", "clock", {"offset_s": offset_s})

    def _send(self, method: str, what: str, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
        connection = http.client.HTTPConnection(urlsplit(self.endpoint).netloc, timeout=_ADMIN_S)
        try:
            connection.request(
                method, f"/__strict__/{what}", json.dumps(values) if values is not None else None
            )
            response = connection.getresponse()
            answer: dict[str, Any] = json.loads(response.read())
        finally:
            connection.close()
        if response.status != 200:
            raise ValueError(f"{method} {what}: {answer['error']}")
        return answer
