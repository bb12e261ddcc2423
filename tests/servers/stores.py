"""The stores of the conformance suite: how a user reaches each, and how somebody else does."""

from __future__ import annotations

import contextlib
import json
import uuid
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

import botocore.session
import fsspec
import requests
from botocore.config import Config
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from ray_ckpt.location import Location
from ray_ckpt.storage.log_store import LogStore, ObjectLogStore, PosixLogStore, SmallObjects
from ray_ckpt.storage.remote.file_store import FileStore, PosixFiles
from ray_ckpt.storage.remote.tier import RemoteTier, open_objects
from tests.servers.programs import ACCESS_KEY, SECRET_KEY

BUCKET = "test"
SCHEMES = {"s3fs": "tests.servers.schemes.PlainS3", "gcsfs": "tests.servers.schemes.PlainGcs"}
QUICK = {"s3fs": "s3", "gcsfs": "gs"}
TOKEN = "strict-token"  # of the strict store's GCS side
PART_BYTES = 5 << 20  # the least that S3 takes for a part that is not the last


def environment(folder: Path, token_uri: str) -> dict[str, str]:
    """Credentials for all servers, as a node has them, and nothing of the machine's own."""
    account = folder / "account.json"
    write_service_account(account, token_uri)
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_CONFIG_FILE": str(folder / "aws-config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(folder / "aws-credentials"),
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_GCE_CHECK": "true",
        "GOOGLE_APPLICATION_CREDENTIALS": str(account),
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }


def write_service_account(path: Path, token_uri: str) -> None:
    """Write a key file of a Google service account, with a random key."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    account = {"type": "service_account", "project_id": "test", "private_key_id": "1", "client_id": "1"}
    account |= {"client_email": "test@test.iam", "private_key": pem.decode(), "token_uri": token_uri}
    path.write_text(json.dumps(account))


def bucket_url(scheme: str, endpoint: str, key: str, bucket: str = BUCKET) -> str:
    """Return a storage path on a server of ours, as a user writes it."""
    return f"{scheme}://{bucket}/{key}?endpoint_override={urlsplit(endpoint).netloc}&scheme=http"


class Stranger(Protocol):
    """Another client, which sees whole keys."""

    def objects(self, prefix: str) -> list[str]:
        """Return the keys of all objects that begin with `prefix`."""
        ...

    def begin(self, key: str) -> None:
        """Send a part of an upload and leave it there."""
        ...

    def unfinished(self, prefix: str) -> list[str]:
        """Return the keys of all uploads that have begun and not ended."""
        ...


class FolderStranger:
    """A stranger to a POSIX folder, where an upload is a temporary file beside its name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def objects(self, prefix: str) -> list[str]:
        return [name for name in self._files(prefix) if "/.tmp-" not in name]

    def begin(self, key: str) -> None:
        path = self._folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / f".tmp-{path.name}").write_bytes(b"half")

    def unfinished(self, prefix: str) -> list[str]:
        return [name for name in self._files(prefix) if "/.tmp-" in name]

    def _files(self, prefix: str) -> list[str]:
        found = (p.relative_to(self._folder).as_posix() for p in self._folder.rglob("*") if p.is_file())
        return [name for name in found if name.startswith(prefix)]


class S3Stranger:
    """botocore, on one bucket."""

    def __init__(self, endpoint: str, bucket: str = BUCKET) -> None:
        self.client: Any = s3_client(endpoint)
        self._bucket = bucket

    def objects(self, prefix: str) -> list[str]:
        return [found["Key"] for page in self._pages("list_objects_v2", prefix) for found in page["Contents"]]

    def begin(self, key: str) -> None:
        upload = self.client.create_multipart_upload(Bucket=self._bucket, Key=key)["UploadId"]
        self.client.upload_part(
            Bucket=self._bucket, Key=key, UploadId=upload, PartNumber=1, Body=bytes(PART_BYTES)
        )

    def unfinished(self, prefix: str) -> list[str]:
        pages = self._pages("list_multipart_uploads", prefix)
        return [found["Key"] for page in pages for found in page["Uploads"]]

    def _pages(self, operation: str, prefix: str) -> Iterator[defaultdict[str, Any]]:
        for page in self.client.get_paginator(operation).paginate(Bucket=self._bucket, Prefix=prefix):
            yield defaultdict(list, page)


class GcsStranger:
    """Plain HTTP of GCS's XML API, on one bucket. Sees a page of a listing only, which is 1,000."""

    def __init__(self, endpoint: str, bucket: str = BUCKET) -> None:
        self._url = f"{endpoint}/{bucket}"
        self._session = requests.Session()
        self._session.headers["Authorization"] = f"Bearer {TOKEN}"

    def objects(self, prefix: str) -> list[str]:
        return self._texts(self._send("GET", "", {"list-type": "2", "prefix": prefix}), "Key")

    def begin(self, key: str) -> None:
        [upload] = self._texts(self._send("POST", key, {"uploads": ""}), "UploadId")
        self._send("PUT", key, {"partNumber": "1", "uploadId": upload}, bytes(PART_BYTES))

    def unfinished(self, prefix: str) -> list[str]:
        return self._texts(self._send("GET", "", {"uploads": "", "prefix": prefix}), "Key")

    def _send(self, method: str, key: str, query: Mapping[str, str], data: bytes = b"") -> requests.Response:
        answer = self._session.request(
            method, f"{self._url}/{quote(key)}".rstrip("/"), params=query, data=data, timeout=30
        )
        answer.raise_for_status()
        return answer

    @staticmethod
    def _texts(answer: requests.Response, name: str) -> list[str]:
        found = ElementTree.fromstring(answer.content).iter()
        return [element.text or "" for element in found if element.tag.rpartition("}")[2] == name]


def s3_client(endpoint: str) -> Any:
    """botocore's, with the usual keys."""
    return botocore.session.Session().create_client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        config=Config(retries={"max_attempts": 1}, s3={"addressing_style": "path"}),
    )


@dataclass(kw_only=True)
class Store:
    """One store of the suite, opened below a root of its own as an agent opens it."""

    name: str
    location: Location
    options: Mapping[str, str] = field(default_factory=dict)
    stranger: Stranger
    files: FileStore = field(init=False)
    tier: RemoteTier = field(init=False)
    _small: SmallObjects | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.location.is_posix:
            (self.location.folder / "run" / "ray_ckpt").mkdir(parents=True, exist_ok=True)  # as a probe does
            self.files = PosixFiles(self.location.folder)
        else:
            self.files, self._small = open_objects(self.location, self.options)
        self.tier = RemoteTier(self.location / "run" / "ray_ckpt", self.options)
        assert (
            self.files.size("x") is None and self.tier.files.size("x") is None
        )  # both know who they are now

    def below(self, name: str) -> Store:
        """Return the same server, opened at one of our folders."""
        location = self.location / name
        stranger = FolderStranger(location.folder) if location.is_posix else self.stranger
        return replace(self, location=location, stranger=stranger)

    @property
    def key(self) -> str:
        """The key of the root: the prefix of our names in those of a stranger."""
        return "" if self.location.is_posix else f"{self.location.key}/"

    def new_log(self) -> LogStore:
        """Return an empty log below the root."""
        folder = f"log-{uuid.uuid4().hex}"
        if self._small is None:
            (self.location.folder / folder).mkdir()
            return PosixLogStore(self.location.folder / folder)
        return ObjectLogStore(self._small, folder)

    def names(self, folder: str) -> list[str]:
        """Return the objects that a stranger finds in one of our folders, by our names."""
        return self._ours(self.stranger.objects(f"{self.key}{folder}/"))

    def uploads(self, folder: str) -> list[str]:
        """Return the names of the unfinished uploads that a stranger sees in a folder of ours."""
        return self._ours(self.stranger.unfinished(f"{self.key}{folder}/"))

    def _ours(self, keys: Iterable[str]) -> list[str]:
        return sorted(key.removeprefix(self.key) for key in keys)

    def fill(self, names: Iterable[str]) -> None:
        """Put a byte under each name: where fsspec is slow at it, by a client of ours."""
        files = self.files
        if (scheme := QUICK.get(self.location.scheme)) is not None:
            url = bucket_url(scheme, self.options["endpoint_url"], self.location.key)
            files, _ = open_objects(Location.parse(url), {})
        elif "backend" in self.options:
            files, _ = open_objects(self.location, {})
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: files.put(name, [b"1"], max_bytes=1), names))


def s3_store(name: str, endpoint: str, options: Mapping[str, str] | None = None) -> Store:
    make_bucket(endpoint)
    location = Location.parse(bucket_url("s3", endpoint, f"runs/{name}"))
    return Store(name=name, location=location, options=options or {}, stranger=S3Stranger(endpoint))


def gcs_store(name: str, endpoint: str, options: Mapping[str, str] | None = None) -> Store:
    location = Location.parse(bucket_url("gs", endpoint, f"runs/{name}"))
    return Store(name=name, location=location, options=options or {}, stranger=GcsStranger(endpoint))


def fsspec_location(
    scheme: str, endpoint: str, key: str, bucket: str = BUCKET
) -> tuple[Location, dict[str, str]]:
    """Return a place that is opened through s3fs or gcsfs, and the options for it."""
    fsspec.register_implementation(scheme, SCHEMES[scheme], clobber=True)
    options = {"endpoint_url": endpoint}
    if scheme == "gcsfs":
        options["token"] = "env:GOOGLE_APPLICATION_CREDENTIALS"
    return Location.parse(f"{scheme}://{bucket}/{key}"), options


def fsspec_store(name: str, endpoint: str) -> Store:
    location, options = fsspec_location(name, endpoint, f"runs/{name}")
    stranger = S3Stranger(endpoint) if name == "s3fs" else GcsStranger(endpoint)
    return Store(name=name, location=location, options=options, stranger=stranger)


def folder_store(name: str, folder: Path) -> Store:
    folder.mkdir()
    return Store(name=name, location=Location.parse(folder), stranger=FolderStranger(folder))


def make_bucket(endpoint: str, bucket: str = BUCKET) -> None:
    client = s3_client(endpoint)
    with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):
        client.create_bucket(Bucket=bucket)
