"""The part of GCS's JSON API that gcsfs uses.

Source: Google Cloud Storage documentation, "JSON API v1 reference" and "Resumable uploads". Sessions of
resumable uploads are in memory, also where objects are not.
"""

from __future__ import annotations

import json
import re
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote, urlencode

from tests.servers.strict_store.api import Expected, Request, check_digests, expected_digest, read_response
from tests.servers.strict_store.checksums import digest_of
from tests.servers.strict_store.gcs import check_token, generation_condition, goog_hash, goog_hashes
from tests.servers.strict_store.http1 import Fill, Head, Response, json_response
from tests.servers.strict_store.objects import MAX_PAGE, Objects
from tests.servers.strict_store.records import Condition, StoredObject, StoreError
from tests.servers.strict_store.xml_api import iso

MAX_SESSIONS = 10_000  # unfinished resumable uploads
CHUNK_BYTES = 256 << 10  # all chunks of a resumable upload but the last are multiples of this
_PATHS = re.compile(r"/(?:(upload|download)/)?storage/v1/b(?:/([^/]+)(?:(/o)(?:/([^/]+))?)?)?")
_REWRITE = re.compile(r"/storage/v1/b/([^/]+)/o/([^/]+)/rewriteTo/b/([^/]+)/o/([^/]+)")
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")
_CANCELLED = 499  # GCS's answer to a session that is cancelled
# Query parameters that change nothing here. All others are either used below or refused.
_IGNORED = {"alt", "fields", "prettyPrint", "project", "projection", "userProject", "key"}
_USED = {
    "ListBuckets": set[str](),
    "HeadBucket": set[str](),
    "ListObjects": {
        "prefix",
        "delimiter",
        "maxResults",
        "pageToken",
        "startOffset",
        "includeTrailingDelimiter",
    },
    "HeadObject": {"generation", "ifGenerationMatch"},
    "GetObject": {"generation", "ifGenerationMatch"},
    "DeleteObject": {"generation", "ifGenerationMatch"},
    "RewriteObject": {"ifGenerationMatch"},
    "PutObject": {"uploadType", "name", "ifGenerationMatch"},
    "StartResumable": {"uploadType", "name", "ifGenerationMatch"},
    "UploadChunk": {"uploadType", "name", "ifGenerationMatch", "upload_id"},
    "CancelResumable": {"uploadType", "name", "upload_id"},
}
_REASONS = {
    400: "invalid",
    401: "authError",
    404: "notFound",
    409: "conflict",
    412: "conditionNotMet",
    416: "requestedRangeNotSatisfiable",
    429: "rateLimitExceeded",
    500: "backendError",
    501: "notImplemented",
    503: "backendError",
}


@dataclass(slots=True, kw_only=True)
class _Session:
    key: str
    headers: Mapping[str, str]
    condition: Condition | None
    received: bytearray = field(default_factory=bytearray)


class GcsJson:
    """Operations have the names of the XML API where there is one; see `_operation` for the rest."""

    def __init__(self, objects: Objects, token: str) -> None:
        self._objects = objects
        self._token = token
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}
        self._handlers: Mapping[str, Callable[[Request], Response]] = {
            "ListBuckets": self._list_buckets,
            "HeadBucket": self._get_bucket,
            "ListObjects": self._list,
            "HeadObject": self._get_metadata,
            "GetObject": self._get_media,
            "DeleteObject": self._delete,
            "RewriteObject": self._rewrite,
            "PutObject": self._insert,
            "StartResumable": self._start,
            "UploadChunk": self._chunk,
            "CancelResumable": self._cancel,
        }

    @staticmethod
    def knows(path: str) -> bool:
        return path.startswith(("/storage/v1/", "/upload/storage/v1/", "/download/storage/v1/"))

    def parse(self, head: Head) -> Request:
        if head.method == "POST" and (match := _REWRITE.fullmatch(head.raw_path)):
            bucket, key = unquote(match[3]), unquote(match[4])
            return Request(head=head, operation="RewriteObject", bucket=bucket, key=key)
        match = _PATHS.fullmatch(head.raw_path)
        if match is None:
            raise StoreError("NotImplemented", message=f"not implemented: {head.method} {head.raw_path}")
        kind, bucket, objects, quoted = match.groups()
        operation = _operation(head.method, kind or "", bucket or "", quoted or "", head.query, bool(objects))
        key = unquote(quoted or "") or head.query.get("name", "")
        return Request(head=head, operation=operation, bucket=unquote(bucket or ""), key=key)

    def authorize(self, request: Request) -> None:
        check_token(request.head, self._token)

    def decoded(self, request: Request, fill: Fill, length: int | None) -> tuple[Fill, int | None]:
        return fill, length

    def digest_names(self, request: Request, length: int | None) -> Sequence[str]:
        return ["md5"] if "content-md5" in request.head.headers else []

    def expected(self, request: Request) -> Sequence[Expected]:
        """Return the digests of the request's body. x-goog-hash is that of the object, and checked later."""
        md5 = request.head.headers.get("content-md5")
        return [] if md5 is None else [expected_digest("md5", md5)]

    def handle(self, request: Request) -> Response:
        handler = self._handlers.get(request.operation)
        unknown = set(request.head.query).difference(_IGNORED, _USED.get(request.operation, ()))
        if handler is None or unknown:
            raise StoreError(
                "NotImplemented", message=f"not implemented: {request.operation} {sorted(unknown)}"
            )
        return handler(request)

    def refuse(self, head: Head, error: StoreError) -> Response:
        reason = _REASONS.get(error.status, "invalid")
        errors = [{"domain": "global", "reason": reason, "message": error.message}]
        values = {"error": {"code": error.status, "message": error.message, "errors": errors}}
        return Response(error.status) if error.status == 304 else json_response(error.status, values)

    # -- buckets

    def _list_buckets(self, request: Request) -> Response:
        items = [_bucket_resource(name) for name in self._objects.buckets()]
        return json_response(200, {"kind": "storage#buckets", "items": items})

    def _get_bucket(self, request: Request) -> Response:
        self._objects.check_bucket(request.bucket)
        return json_response(200, _bucket_resource(request.bucket))

    # -- objects

    def _list(self, request: Request) -> Response:
        query = request.head.query
        start = query.get("startOffset", "")
        page = self._objects.page(
            request.bucket,
            prefix=query.get("prefix", ""),
            delimiter=query.get("delimiter", ""),
            after=unquote(query.get("pageToken", "")),
            limit=_number(query.get("maxResults", str(MAX_PAGE))),
        )
        values: dict[str, Any] = {"kind": "storage#objects"}
        items = [_resource(request.bucket, stored) for stored in page.objects if stored.key >= start]
        if items:
            values["items"] = items
        if page.prefixes:
            values["prefixes"] = page.prefixes
        if page.truncated:
            values["nextPageToken"] = quote(page.last, safe="")
        return json_response(200, values)

    def _found(self, request: Request) -> StoredObject:
        stored = self._objects.get(request.bucket, request.key)
        generation = request.head.query.get("generation")
        if generation is not None and generation != str(stored.generation):
            raise StoreError(
                "NoSuchKey", message=f"No such object: {request.bucket}/{request.key}#{generation}"
            )
        self._objects.check(request.bucket, request.key, self._condition(request))
        return stored

    def _get_metadata(self, request: Request) -> Response:
        return json_response(200, _resource(request.bucket, self._found(request)))

    def _get_media(self, request: Request) -> Response:
        stored = self._found(request)
        headers = {"content-type": "application/octet-stream", **stored.headers}
        more = (("x-goog-generation", str(stored.generation)), ("x-goog-hash", goog_hash(stored)))
        return read_response(stored, request.head, (*headers.items(), *more))

    def _delete(self, request: Request) -> Response:
        self._found(request)
        self._objects.delete(request.bucket, request.key, self._condition(request))
        return Response(204)

    def _insert(self, request: Request) -> Response:
        if request.head.query.get("uploadType") == "media":
            headers = {"content-type": request.head.headers.get("content-type", "application/octet-stream")}
            return self._put(request, request.key, headers, self._condition(request), request.body)
        metadata, content_type, body = _related(request.head.headers.get("content-type", ""), request.body)
        values = _json(metadata)
        headers = {"content-type": content_type, **_object_headers(values)}
        key = str(values.get("name", request.key))
        return self._put(request, key, headers, self._condition(request), body)

    def _put(
        self,
        request: Request,
        key: str,
        headers: Mapping[str, str],
        condition: Condition | None,
        body: memoryview,
    ) -> Response:
        digests = {"crc32c": digest_of("crc32c", body), "md5": digest_of("md5", body)}
        request.digests = digests
        given = goog_hashes(request.head.headers.get("x-goog-hash", ""))
        check_digests(request, [expected_digest(name, text) for name, text in given])
        blob = self._objects.new_blob(body, digests)
        stored = self._objects.put(
            request.bucket, key, (blob,), etag=blob.etag, headers=headers, checksums={}, condition=condition
        )
        return json_response(200, _resource(request.bucket, stored))

    def _rewrite(self, request: Request) -> Response:
        """Copy an object within the store, at once."""
        match = _REWRITE.fullmatch(request.head.raw_path)
        assert match is not None
        bucket, key = unquote(match[1]), unquote(match[2])
        stored = self._objects.copy((bucket, key), (request.bucket, request.key), self._condition(request))
        sizes = {"totalBytesRewritten": str(stored.size), "objectSize": str(stored.size)}
        resource = _resource(request.bucket, stored)
        return json_response(
            200, {"kind": "storage#rewriteResponse", "done": True, **sizes, "resource": resource}
        )

    def _condition(self, request: Request) -> Condition | None:
        return generation_condition(request.head.query.get("ifGenerationMatch"))

    # -- resumable uploads

    def _start(self, request: Request) -> Response:
        values = _json(request.body)
        key = str(values.get("name", request.key))
        condition = self._condition(request)
        self._objects.check(request.bucket, key, condition)
        content_type = request.head.headers.get("x-upload-content-type", "application/octet-stream")
        headers = {"content-type": content_type, **_object_headers(values)}
        session = _Session(key=key, headers=headers, condition=condition)
        upload_id = uuid.uuid4().hex
        with self._lock:
            if len(self._sessions) >= MAX_SESSIONS:
                raise StoreError("TooManyRequests")
            self._sessions[upload_id] = session
        query = urlencode({**request.head.query, "upload_id": upload_id}, quote_via=quote)
        host = request.head.headers.get("host", "")
        return Response(200, (("Location", f"http://{host}{request.head.raw_path}?{query}"),))

    def _chunk(self, request: Request) -> Response:
        upload_id = request.head.query["upload_id"]
        session = self._session(upload_id)
        first, last, total = _content_range(request)
        with self._lock:
            if first is not None and last is not None:
                _append(session, first, last, request.body, is_last=total == last + 1)
            if total != len(session.received):
                return _incomplete(len(session.received))
            self._sessions.pop(upload_id, None)
        body = memoryview(session.received)
        return self._put(request, session.key, session.headers, session.condition, body)

    def _cancel(self, request: Request) -> Response:
        upload_id = request.head.query["upload_id"]
        self._session(upload_id)
        with self._lock:
            self._sessions.pop(upload_id, None)
        return Response(_CANCELLED)

    def _session(self, upload_id: str) -> _Session:
        with self._lock:
            session = self._sessions.get(upload_id)
        if session is None:
            raise StoreError("NoSuchUpload")
        return session


def _operation(
    method: str, kind: str, bucket: str, key: str, query: Mapping[str, str], of_objects: bool
) -> str:
    """Return the XML API's name of the operation, or StartResumable, UploadChunk, CancelResumable."""
    if kind == "upload" and of_objects:
        if "upload_id" in query:
            return "CancelResumable" if method == "DELETE" else "UploadChunk"
        return "StartResumable" if query.get("uploadType") == "resumable" else "PutObject"
    match method:
        case "GET" if key:
            return "GetObject" if query.get("alt") == "media" else "HeadObject"
        case "GET" if of_objects:
            return "ListObjects"
        case "GET":
            return "HeadBucket" if bucket else "ListBuckets"
        case "DELETE" if key:
            return "DeleteObject"
    return method


def _append(session: _Session, first: int, last: int, body: memoryview, *, is_last: bool) -> None:
    """Append a chunk, which may begin with bytes that were received before, and may skip none."""
    has = len(session.received)
    if last + 1 - first != len(body) or first > has:
        raise StoreError(
            "InvalidArgument", message=f"{has} bytes have been received; this chunk starts at {first}"
        )
    if not is_last and len(body) % CHUNK_BYTES:
        raise StoreError(
            "InvalidArgument", message=f"a chunk that is not the last is a multiple of {CHUNK_BYTES}"
        )
    session.received += body[has - first :]


def _content_range(request: Request) -> tuple[int | None, int | None, int | None]:
    """Return first and last byte of this chunk, and the length of the whole; None if the request lacks it."""
    text = request.head.headers.get("content-range")
    if text is None:  # all of it in one request
        return 0, len(request.body) - 1, len(request.body)
    match = _CONTENT_RANGE.fullmatch(text)
    if match is None:
        raise StoreError("InvalidArgument", message=f"Content-Range: {text}")
    first, last, total = (int(part) if part and part != "*" else None for part in match.groups())
    return first, last, total


def _incomplete(received: int) -> Response:
    """308, which is GCS's "go on"."""
    return Response(308, (("Range", f"bytes=0-{received - 1}"),) if received else ())


def _related(content_type: str, body: memoryview) -> tuple[memoryview, str, memoryview]:
    """Return metadata, type of the media, and media of a multipart/related body (RFC 2387, RFC 2046).

    A boundary inside the media makes a third part, and the body malformed: it is not cut short silently.
    """
    match = re.search(r'boundary="?([^";]+)"?', content_type)
    if not content_type.startswith("multipart/related") or match is None:
        raise StoreError("InvalidArgument", message="uploadType=multipart needs a multipart/related body")
    delimiter = re.compile(
        rb"(?:\A|\r?\n)--" + re.escape(match.group(1).encode()) + rb"(--)?[ \t]*(?:\r?\n|\Z)"
    )
    found = list(delimiter.finditer(body))
    if len(found) != 3 or found[0].group(1) or found[1].group(1) or not found[2].group(1):
        raise StoreError("InvalidArgument", message="Malformed multipart body.")
    metadata, _ = _part(body[found[0].end() : found[1].start()])
    media, media_type = _part(body[found[1].end() : found[2].start()])
    return metadata, media_type, media


def _part(part: memoryview) -> tuple[memoryview, str]:
    """Return the body and the type of a part."""
    end = re.search(rb"(?:\A|\r?\n)\r?\n", part)
    if end is None:
        raise StoreError("InvalidArgument", message="Malformed multipart body.")
    content_type = re.search(rb"(?i)^content-type:\s*(\S[^\r\n]*)", bytes(part[: end.start()]), re.MULTILINE)
    return part[end.end() :], content_type.group(1).decode(
        "latin-1"
    ) if content_type else "application/octet-stream"


def _object_headers(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers that come back with the object, under the names of the XML API."""
    kept = {f"x-goog-meta-{name}": str(text) for name, text in values.get("metadata", {}).items()}
    names = {
        "cacheControl": "cache-control",
        "contentEncoding": "content-encoding",
        "contentType": "content-type",
    }
    return {**kept, **{header: str(values[name]) for name, header in names.items() if name in values}}


def _resource(bucket: str, stored: StoredObject) -> dict[str, Any]:
    prefix = "x-goog-meta-"
    metadata = {name[len(prefix) :]: text for name, text in stored.headers.items() if name.startswith(prefix)}
    when = iso(stored.modified_s)
    resource: dict[str, Any] = {
        "kind": "storage#object",
        "id": f"{bucket}/{stored.key}/{stored.generation}",
        "name": stored.key,
        "bucket": bucket,
        "generation": str(stored.generation),
        "metageneration": "1",
        "contentType": stored.headers.get("content-type", "application/octet-stream"),
        "storageClass": "STANDARD",
        "size": str(stored.size),
        "crc32c": stored.crc32c,
        "etag": stored.etag,
        "timeCreated": when,
        "updated": when,
    }
    if stored.md5:
        resource["md5Hash"] = stored.md5
    if metadata:
        resource["metadata"] = metadata
    return resource


def _bucket_resource(name: str) -> dict[str, Any]:
    return {"kind": "storage#bucket", "id": name, "name": name, "location": "US", "storageClass": "STANDARD"}


def _json(body: memoryview) -> dict[str, Any]:
    try:
        values = json.loads(bytes(body) or b"{}")
    except ValueError as error:
        raise StoreError("InvalidArgument", message="the body is no JSON") from error
    if not isinstance(values, dict):
        raise StoreError("InvalidArgument", message="the body is no JSON object")
    return values


def _number(text: str) -> int:
    if not text.isdecimal():
        raise StoreError("InvalidArgument", message=f"{text!r} is no number")
    return int(text)
