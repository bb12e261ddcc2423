"""All that a store holds, behind one lock: it is linearizable.

Bodies are never copied: an object of several parts is the tuple of its parts' blobs.
"""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise

from tests.servers.strict_store.checksums import digest_of, from_text, joined_crc64, to_text
from tests.servers.strict_store.records import (
    Blob,
    Condition,
    Conditions,
    IfAbsent,
    IfETag,
    IfGeneration,
    Keeper,
    Memory,
    Page,
    Part,
    PartName,
    StoredObject,
    StoreError,
    Upload,
)

MAX_KEY_BYTES = 1024  # S3 and GCS alike
MAX_PARTS = 10_000
MIN_PART_BYTES = 5 << 20  # of every part but the last
MAX_BODY_BYTES = 5 << 30  # of one request
MAX_PAGE = 1000  # entries of a listing


class _Bucket:
    def __init__(self) -> None:
        self.objects: dict[str, StoredObject] = {}
        self.keys: list[str] = []  # sorted: code points sort as UTF-8 does

    def put(self, stored: StoredObject) -> StoredObject | None:
        old = self.objects.get(stored.key)
        if old is None:
            insort(self.keys, stored.key)
        self.objects[stored.key] = stored
        return old

    def remove(self, key: str) -> StoredObject | None:
        old = self.objects.pop(key, None)
        if old is not None:
            del self.keys[bisect_left(self.keys, key)]
        return old


class Objects:
    """`now`: the store's clock, in seconds since 1970."""

    def __init__(
        self,
        *,
        conditions: Conditions = "enforced",
        min_part_bytes: int = MIN_PART_BYTES,
        now: Callable[[], float] = time.time,
        keeper: Keeper | None = None,
    ) -> None:
        self._conditions = conditions
        self._min_part_bytes = min_part_bytes
        self._now = now
        self._keeper: Keeper = keeper or Memory()
        self._lock = threading.RLock()
        self._buckets: dict[str, _Bucket] = {}
        self._uploads: dict[str, Upload] = {}
        self._generation = 0
        contents = self._keeper.load()
        for name in contents.buckets:
            self._buckets[name] = _Bucket()
        for name, stored in contents.objects:
            self._buckets[name].put(stored)
            self._generation = max(self._generation, stored.generation)
        for upload in contents.uploads:
            self._uploads[upload.upload_id] = upload

    def new_blob(self, data: memoryview, digests: Mapping[str, bytes]) -> Blob:
        """Return a new body that nothing refers to yet."""
        name = uuid.uuid4().hex
        data = self._keeper.write_body(name, data).toreadonly()
        return Blob(name=name, data=data, digests=digests)

    @contextmanager
    def _forgotten_if_refused(self, *blobs: Blob) -> Iterator[None]:
        try:
            yield
        except StoreError:
            self._keeper.forget(blobs)
            raise

    # -- buckets

    def create_bucket(self, name: str) -> None:
        with self._lock:
            if name in self._buckets:
                raise StoreError("BucketAlreadyOwnedByYou", BucketName=name)
            self._keeper.write("buckets", name, {})
            self._buckets[name] = _Bucket()

    def delete_bucket(self, name: str) -> None:
        with self._lock:
            if self._bucket(name).keys:
                raise StoreError("BucketNotEmpty", BucketName=name)
            for upload in self.uploads(name):
                self._end_upload(upload, kept=())
            self._keeper.remove("buckets", name)
            del self._buckets[name]

    def buckets(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(sorted(self._buckets))

    def check_bucket(self, name: str) -> None:
        with self._lock:
            self._bucket(name)

    def _bucket(self, name: str) -> _Bucket:
        bucket = self._buckets.get(name)
        if bucket is None:
            raise StoreError("NoSuchBucket", BucketName=name)
        return bucket

    # -- objects

    def get(self, bucket: str, key: str) -> StoredObject:
        with self._lock:
            stored = self._bucket(bucket).objects.get(key)
            if stored is None:
                raise StoreError("NoSuchKey", Key=key)
            return stored

    def put(
        self,
        bucket: str,
        key: str,
        blobs: tuple[Blob, ...],
        *,
        etag: str,
        headers: Mapping[str, str],
        checksums: Mapping[str, str],
        checksum_type: str = "FULL_OBJECT",
        condition: Condition | None,
    ) -> StoredObject:
        with self._lock, self._forgotten_if_refused(*blobs):
            _check_key(key)
            self._check(self._bucket(bucket), key, condition)
            stored = StoredObject(
                key=key,
                blobs=blobs,
                etag=etag,
                generation=self._next_generation(),
                modified_s=self._now(),
                headers=headers,
                checksums=checksums,
                checksum_type=checksum_type,
            )
            self._keep(bucket, stored)
            return stored

    def copy(
        self, source: tuple[str, str], target: tuple[str, str], condition: Condition | None
    ) -> StoredObject:
        """(bucket, key) to (bucket, key)."""
        stored = self.get(*source)
        blobs = tuple(self.new_blob(blob.data, blob.digests) for blob in stored.blobs)
        return self.put(
            *target,
            blobs,
            etag=stored.etag,
            headers=stored.headers,
            checksums=stored.checksums,
            checksum_type=stored.checksum_type,
            condition=condition,
        )

    def _keep(self, bucket: str, stored: StoredObject) -> None:
        self._keeper.write("objects", f"{bucket}/{stored.key}", stored)
        old = self._bucket(bucket).put(stored)
        if old is not None:
            self._keeper.forget(old.blobs)

    def delete(self, bucket: str, key: str, condition: Condition | None = None) -> bool:
        """Delete an object; return whether there was one."""
        with self._lock:
            where = self._bucket(bucket)
            self._check(where, key, condition)
            if key not in where.objects:
                return False
            self._keeper.remove("objects", f"{bucket}/{key}")
            old = where.remove(key)
            assert old is not None
            self._keeper.forget(old.blobs)
            return True

    def check(self, bucket: str, key: str, condition: Condition | None) -> None:
        """Raise the error with which a write with this condition would be refused now."""
        with self._lock:
            self._check(self._bucket(bucket), key, condition)

    def _check(self, bucket: _Bucket, key: str, condition: Condition | None) -> None:
        if condition is None or self._conditions == "ignored":
            return
        if self._conditions == "501":
            raise StoreError("NotImplemented", Header=condition.name)
        stored = bucket.objects.get(key)
        match condition:
            case IfAbsent():
                holds = stored is None
            case IfETag(etag):
                if stored is None:
                    raise StoreError("NoSuchKey", Key=key)
                holds = etag in ("*", stored.etag)
            case IfGeneration(generation):
                holds = (stored.generation if stored else 0) == generation
        if not holds:
            raise StoreError(
                "PreconditionFailed",
                message="At least one of the pre-conditions you specified did not hold",
                Condition=condition.name,
            )

    def _next_generation(self) -> int:
        """Microseconds, as GCS has them, and always more than the last one."""
        self._generation = max(self._generation + 1, int(self._now() * 1e6))
        return self._generation

    def all(self, bucket: str) -> tuple[StoredObject, ...]:
        """Return all objects in the order of their keys."""
        with self._lock:
            where = self._bucket(bucket)
            return tuple(where.objects[key] for key in where.keys)

    def page(
        self, bucket: str, *, prefix: str = "", delimiter: str = "", after: str = "", limit: int
    ) -> Page:
        """Keys with `prefix`, in order, from behind `after`; rolled up where `delimiter` is in the rest."""
        objects: list[StoredObject] = []
        prefixes: list[str] = []
        last = ""
        limit = min(limit, MAX_PAGE)
        with self._lock:
            where = self._bucket(bucket)
            at = max(bisect_left(where.keys, prefix), bisect_right(where.keys, after) if after else 0)
            while at < len(where.keys) and where.keys[at].startswith(prefix):
                key = where.keys[at]
                cut = key.find(delimiter, len(prefix)) if delimiter else -1
                rolled = key[: cut + len(delimiter)] if cut >= 0 else ""
                if rolled and after.startswith(rolled):  # a page that ended with this prefix, or inside it
                    at = _past(where.keys, rolled)
                    continue
                if len(objects) + len(prefixes) >= limit:
                    return Page(
                        objects=tuple(objects), prefixes=tuple(prefixes), truncated=limit > 0, last=last
                    )
                if rolled:
                    prefixes.append(rolled)
                    last, at = rolled, _past(where.keys, rolled)
                else:
                    objects.append(where.objects[key])
                    last, at = key, at + 1
        return Page(objects=tuple(objects), prefixes=tuple(prefixes), truncated=False, last=last)

    # -- uploads in parts

    def start_upload(self, bucket: str, key: str, *, headers: Mapping[str, str], checksum_type: str) -> str:
        _check_key(key)
        with self._lock:
            self._bucket(bucket)
            upload = Upload(
                upload_id=f"{int(self._now() * 1e6):016x}-{uuid.uuid4().hex[:16]}",
                bucket=bucket,
                key=key,
                initiated_s=self._now(),
                headers=headers,
                checksum_type=checksum_type,
            )
            self._keeper.write("uploads", upload.upload_id, upload)
            self._uploads[upload.upload_id] = upload
            return upload.upload_id

    def put_part(
        self, bucket: str, key: str, upload_id: str, number: int, blob: Blob, checksums: Mapping[str, str]
    ) -> Part:
        with self._lock, self._forgotten_if_refused(blob):
            if not 1 <= number <= MAX_PARTS:
                raise StoreError("InvalidArgument", message=f"part numbers are 1 to {MAX_PARTS}")
            upload = self._upload(bucket, key, upload_id)
            part = Part(number=number, blob=blob, modified_s=self._now(), checksums=checksums)
            self._keeper.write("parts", f"{upload_id}/{number}", part)
            old = upload.parts.get(number)
            upload.parts[number] = part
            if old is not None:
                self._keeper.forget((old.blob,))
            return part

    def complete_upload(
        self,
        bucket: str,
        key: str,
        upload_id: str,
        names: Sequence[PartName],
        *,
        checksums: Mapping[str, str],
        condition: Condition | None,
    ) -> StoredObject:
        """Complete an upload and return the object. `checksums` are the client's, of the whole object."""
        with self._lock:
            upload = self._upload(bucket, key, upload_id)
            parts = self._chosen(upload, names)
            self._check(self._bucket(bucket), key, condition)
            found, checksum_type = _checksums_of(upload, parts, checksums)
            stored = StoredObject(
                key=key,
                blobs=tuple(part.blob for part in parts),
                etag=_etag_of(parts),
                generation=self._next_generation(),
                modified_s=self._now(),
                headers=upload.headers,
                checksums=found,
                checksum_type=checksum_type,
            )
            self._keep(bucket, stored)
            self._end_upload(upload, kept=stored.blobs)
            return stored

    def abort_upload(self, bucket: str, key: str, upload_id: str) -> None:
        with self._lock:
            upload = self._upload(bucket, key, upload_id)
            self._end_upload(upload, kept=())

    def _end_upload(self, upload: Upload, *, kept: tuple[Blob, ...]) -> None:
        self._keeper.remove("uploads", upload.upload_id)
        for number in upload.parts:
            self._keeper.remove("parts", f"{upload.upload_id}/{number}")
        del self._uploads[upload.upload_id]
        names = {blob.name for blob in kept}
        self._keeper.forget([part.blob for part in upload.parts.values() if part.blob.name not in names])

    def upload(self, bucket: str, key: str, upload_id: str) -> tuple[Upload, tuple[Part, ...]]:
        with self._lock:
            upload = self._upload(bucket, key, upload_id)
            return upload, tuple(upload.parts[number] for number in sorted(upload.parts))

    def uploads(self, bucket: str, prefix: str = "") -> tuple[Upload, ...]:
        """Return the uploads by key, then by id, which is the order in which they began."""
        with self._lock:
            self._bucket(bucket)
            found = [u for u in self._uploads.values() if u.bucket == bucket and u.key.startswith(prefix)]
            return tuple(sorted(found, key=lambda u: (u.key, u.upload_id)))

    def _upload(self, bucket: str, key: str, upload_id: str) -> Upload:
        self._bucket(bucket)
        upload = self._uploads.get(upload_id)
        if upload is None or (upload.bucket, upload.key) != (bucket, key):
            raise StoreError("NoSuchUpload", UploadId=upload_id)
        return upload

    def _chosen(self, upload: Upload, names: Sequence[PartName]) -> tuple[Part, ...]:
        if not names:
            raise StoreError("MalformedXML", message="an upload is completed with one part at least")
        numbers = [name.number for name in names]
        if any(number >= after for number, after in pairwise(numbers)):
            raise StoreError("InvalidPartOrder")
        parts = []
        for name in names:
            part = upload.parts.get(name.number)
            given = {} if part is None else {key: part.checksums.get(key) for key in name.checksums}
            if part is None or name.etag.strip('"') != part.blob.etag or given != dict(name.checksums):
                raise StoreError("InvalidPart", PartNumber=str(name.number), UploadId=upload.upload_id)
            parts.append(part)
        for part in parts[:-1]:
            if len(part.blob.data) < self._min_part_bytes:
                raise StoreError(
                    "EntityTooSmall",
                    PartNumber=str(part.number),
                    ProposedSize=str(len(part.blob.data)),
                    MinSizeAllowed=str(self._min_part_bytes),
                )
        return tuple(parts)


def _past(keys: Sequence[str], prefix: str) -> int:
    """Return the index of the first key after all that begin with `prefix`."""
    return bisect_left(keys, prefix[:-1] + chr(ord(prefix[-1]) + 1))


def _check_key(key: str) -> None:
    size = len(key.encode())
    if size > MAX_KEY_BYTES:
        raise StoreError("KeyTooLongError", Size=str(size), MaxSizeAllowed=str(MAX_KEY_BYTES))


def _etag_of(parts: Sequence[Part]) -> str:
    """Return the MD5 of the parts' MD5s and their number, as on AWS, where all parts have one."""
    md5 = hashlib.md5(usedforsecurity=False)
    for part in parts:
        md5.update(part.blob.digests.get("md5") or part.blob.etag.encode())
    return f"{md5.hexdigest()}-{len(parts)}"


def _checksums_of(
    upload: Upload, parts: Sequence[Part], given: Mapping[str, str]
) -> tuple[Mapping[str, str], str]:
    """Checksums of the whole object, those that its parts or the request to complete it came with.

    Source: Amazon S3 user guide, "Checking object integrity for data uploads". Composite: the digest of the
    parts' digests; of the full object: CRCs only. Checksums from the client must be correct.
    """
    names = {name for part in parts for name in part.checksums}
    names = {name for name in names if all(name in part.checksums for part in parts)} | set(given)
    composite = upload.checksum_type != "FULL_OBJECT" and "crc64nvme" not in names
    found = {}
    for name in sorted(names):
        found[name] = _composite(name, parts) if composite else _full(name, parts)
        if name in given and given[name].partition("-")[0] != found[name].partition("-")[0]:
            raise StoreError("BadDigest", message=f"the {name} of the object is {found[name]}")
    return found, "COMPOSITE" if composite and names else "FULL_OBJECT"


def _composite(name: str, parts: Sequence[Part]) -> str:
    digests = [
        from_text(part.checksums[name]) if name in part.checksums else digest_of(name, part.blob.data)
        for part in parts
    ]
    return f"{to_text(digest_of(name, b''.join(digests)))}-{len(parts)}"


def _full(name: str, parts: Sequence[Part]) -> str:
    if name == "crc64nvme" and all(name in part.checksums for part in parts):
        digests = [from_text(part.checksums[name]) for part in parts]
        return to_text(joined_crc64(digests, [len(part.blob.data) for part in parts]))
    return to_text(digest_of(name, *(part.blob.data for part in parts)))
