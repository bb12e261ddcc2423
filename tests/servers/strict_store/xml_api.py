"""The XML API that S3 and GCS share: how a request is read, objects, uploads in parts, listings.

Sources: Amazon S3 API reference, and "XML API" of Google Cloud Storage. Other operations are refused with
501, so that no test relies on them by mistake.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import quote, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from tests.servers.strict_store.api import MD5_BYTES, Expected, Request, read_response
from tests.servers.strict_store.checksums import S3_CHECKSUMS
from tests.servers.strict_store.http1 import Fill, Head, Headers, Response
from tests.servers.strict_store.objects import MAX_PAGE, Objects
from tests.servers.strict_store.records import Blob, Condition, PartName, StoredObject, StoreError, Upload

MAX_XML_BYTES = 8 << 20  # 10,000 parts with their digests
_KEPT_HEADERS = (
    "cache-control",
    "content-disposition",
    "content-encoding",
    "content-language",
    "content-type",
)
_LIST_QUERY = {
    "list-type",
    "prefix",
    "delimiter",
    "max-keys",
    "continuation-token",
    "start-after",
    "marker",
    "encoding-type",
    "fetch-owner",
}
_UPLOADS_QUERY = {"uploads", "prefix", "key-marker", "upload-id-marker", "max-uploads", "encoding-type"}
# Allowed names in the query of each operation; other names request something that is not implemented.
_QUERY = {
    "ListObjects": _LIST_QUERY,
    "ListObjectsV2": _LIST_QUERY,
    "ListMultipartUploads": _UPLOADS_QUERY,
    "ListParts": {"uploadId", "part-number-marker", "max-parts"},
    "GetBucketLocation": {"location"},
    "DeleteObjects": {"delete"},
    "UploadPart": {"partNumber", "uploadId"},
    "CreateMultipartUpload": {"uploads"},
    "CompleteMultipartUpload": {"uploadId"},
    "AbortMultipartUpload": {"uploadId"},
}

Tree = str | Sequence["tuple[str, Tree]"]


class XmlApi(ABC):
    """The parts that differ are the abstract methods and these.

    `vendor`: how its own headers begin. `own_query`: parameters that only it knows. `misses_deleted`: whether
    to delete what is not there is an error.
    """

    vendor: str
    own_query: frozenset[str]
    misses_deleted: bool

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._handlers: Mapping[str, Callable[[Request], Response]] = {
            "ListBuckets": self._list_buckets,
            "CreateBucket": self._create_bucket,
            "DeleteBucket": self._delete_bucket,
            "HeadBucket": self._head_bucket,
            "GetBucketLocation": self._location,
            "ListObjects": self._list,
            "ListObjectsV2": self._list,
            "PutObject": self._put,
            "CopyObject": self._copy,
            "GetObject": self._get,
            "HeadObject": self._get,
            "DeleteObject": self._delete,
            "DeleteObjects": self._delete_many,
            "CreateMultipartUpload": self._create_upload,
            "UploadPart": self._put_part,
            "CompleteMultipartUpload": self._complete,
            "AbortMultipartUpload": self._abort,
            "ListMultipartUploads": self._list_uploads,
            "ListParts": self._list_parts,
        }

    @abstractmethod
    def authorize(self, request: Request) -> None: ...

    @abstractmethod
    def condition(self, request: Request) -> Condition | None:
        """Return the condition of a write."""

    @abstractmethod
    def object_headers(self, stored: StoredObject, head: Head) -> Headers:
        """Return the vendor's own headers of the answer to a read or a write of the object."""

    @abstractmethod
    def expected(self, request: Request) -> Sequence[Expected]: ...

    def parse(self, head: Head) -> Request:
        bucket, _, key = head.path.removeprefix("/").partition("/")
        copies = f"{self.vendor}copy-source" in head.headers
        operation = _operation(head.method, bucket, key, head.query, copies=copies)
        return Request(head=head, operation=operation, bucket=bucket, key=key)

    def decoded(self, request: Request, fill: Fill, length: int | None) -> tuple[Fill, int | None]:
        return fill, length

    def digest_names(self, request: Request, length: int | None) -> Sequence[str]:
        names = {expected.name for expected in self.expected(request)}
        if length is not None and length <= MD5_BYTES:
            names.add("md5")
        return sorted(names) or ["crc32c"]

    def handle(self, request: Request) -> Response:
        known = self.own_query.union(_QUERY.get(request.operation, ()))
        unknown = sorted(set(request.head.query) - known)
        handler = self._handlers.get(request.operation)
        if handler is None or unknown:
            raise StoreError("NotImplemented", message=f"not implemented: {request.operation} {unknown}")
        self.check_headers(request)
        return handler(request)

    @abstractmethod
    def check_headers(self, request: Request) -> None:
        """Refuse headers that request something that is not implemented."""

    def refuse(self, head: Head, error: StoreError) -> Response:
        tree: list[tuple[str, Tree]] = [("Code", error.code), ("Message", error.message)]
        tree += [*error.details.items(), ("Resource", head.path), ("RequestId", "0")]
        headers: Headers = ()
        if "ActualObjectSize" in error.details:
            headers = (("Content-Range", f"bytes */{error.details['ActualObjectSize']}"),)
        if head.method == "HEAD" or error.status == 304:
            return Response(error.status, headers)
        return xml_response("Error", tree, status=error.status, headers=headers)

    # -- buckets

    def _list_buckets(self, request: Request) -> Response:
        names = [("Bucket", [("Name", name)]) for name in self._objects.buckets()]
        return xml_response("ListAllMyBucketsResult", [("Buckets", names)])

    def _create_bucket(self, request: Request) -> Response:
        self._objects.create_bucket(request.bucket)
        return Response(200, (("Location", f"/{request.bucket}"),))

    def _delete_bucket(self, request: Request) -> Response:
        self._objects.delete_bucket(request.bucket)
        return Response(204)

    def _head_bucket(self, request: Request) -> Response:
        self._objects.check_bucket(request.bucket)
        return Response(200, ((f"{self.vendor}bucket-region", "us-east-1"),))

    def _location(self, request: Request) -> Response:
        self._objects.check_bucket(request.bucket)
        return xml_response("LocationConstraint", "")

    def _list(self, request: Request) -> Response:
        query = request.head.query
        second = request.operation == "ListObjectsV2"
        token = query.get("continuation-token", "")
        after = unquote(token) or query.get("start-after", "") if second else query.get("marker", "")
        limit = _number(query.get("max-keys", str(MAX_PAGE)))
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        page = self._objects.page(
            request.bucket, prefix=prefix, delimiter=delimiter, after=after, limit=limit
        )
        name = _namer(query)
        tree: list[tuple[str, Tree]] = [("Name", request.bucket), ("Prefix", name(prefix))]
        tree += [("Delimiter", name(delimiter))] if delimiter else []
        tree += [("EncodingType", "url")] if "encoding-type" in query else []
        tree += [("MaxKeys", str(limit)), ("IsTruncated", _bool(page.truncated))]
        if second:
            tree += [("KeyCount", str(len(page.objects) + len(page.prefixes)))]
            tree += [("ContinuationToken", token)] if token else []
            tree += [("NextContinuationToken", quote(page.last, safe=""))] if page.truncated else []
        else:
            tree += [("Marker", name(after))]
            tree += [("NextMarker", name(page.last))] if page.truncated and delimiter else []
        tree += [("Contents", _entry(stored, name)) for stored in page.objects]
        tree += [("CommonPrefixes", [("Prefix", name(found))]) for found in page.prefixes]
        return xml_response("ListBucketResult", tree)

    # -- objects

    def _put(self, request: Request) -> Response:
        blob = self._blob(request)
        stored = self._objects.put(
            request.bucket,
            request.key,
            (blob,),
            etag=blob.etag,
            headers=self._kept(request.head),
            checksums=self._checksums(request),
            condition=self.condition(request),
        )
        checksums = self._checksum_headers(stored.checksums, stored.checksum_type)
        return Response(
            200, (("ETag", f'"{stored.etag}"'), *checksums, *self.object_headers(stored, request.head))
        )

    def _copy(self, request: Request) -> Response:
        source = unquote(request.head.headers[f"{self.vendor}copy-source"]).removeprefix("/")
        bucket, _, key = source.partition("/")
        stored = self._objects.copy((bucket, key), (request.bucket, request.key), self.condition(request))
        tree = [("ETag", f'"{stored.etag}"'), ("LastModified", iso(stored.modified_s))]
        return xml_response("CopyObjectResult", tree, headers=self.object_headers(stored, request.head))

    def _get(self, request: Request) -> Response:
        stored = self._objects.get(request.bucket, request.key)
        if request.head.query.get("generation", str(stored.generation)) != str(stored.generation):
            raise StoreError("NoSuchKey", Key=request.key)
        headers = (*stored.headers.items(), *self.object_headers(stored, request.head))
        return read_response(stored, request.head, headers)

    def _delete(self, request: Request) -> Response:
        deleted = self._objects.delete(request.bucket, request.key, self.condition(request))
        if self.misses_deleted and not deleted:
            raise StoreError("NoSuchKey", Key=request.key)
        return Response(204)

    def _delete_many(self, request: Request) -> Response:
        root = parse_xml(request.body)
        keys = [_text(item, "Key") for item in root.iter("Object")]
        if len(keys) > MAX_PAGE:
            raise StoreError("MalformedXML", message=f"at most {MAX_PAGE} keys")
        for key in keys:
            self._objects.delete(request.bucket, key)
        quiet = _text(root, "Quiet", "false") == "true"
        tree = [] if quiet else [("Deleted", [("Key", key)]) for key in keys]
        return xml_response("DeleteResult", tree)

    # -- uploads in parts

    def _create_upload(self, request: Request) -> Response:
        checksum_type = request.head.headers.get(f"{self.vendor}checksum-type", "")
        headers = self._kept(request.head)
        upload_id = self._objects.start_upload(
            request.bucket, request.key, headers=headers, checksum_type=checksum_type
        )
        tree = [("Bucket", request.bucket), ("Key", request.key), ("UploadId", upload_id)]
        return xml_response("InitiateMultipartUploadResult", tree)

    def _put_part(self, request: Request) -> Response:
        query = request.head.query
        part = self._objects.put_part(
            request.bucket,
            request.key,
            query["uploadId"],
            _number(query.get("partNumber", "")),
            self._blob(request),
            self._checksums(request),
        )
        return Response(200, (("ETag", f'"{part.blob.etag}"'), *self._checksum_headers(part.checksums)))

    def _complete(self, request: Request) -> Response:
        stored = self._objects.complete_upload(
            request.bucket,
            request.key,
            request.head.query["uploadId"],
            [_part_name(item) for item in parse_xml(request.body).iter("Part")],
            checksums=self._given_checksums(request.head.headers),
            condition=self.condition(request),
        )
        tree = [("Bucket", request.bucket), ("Key", request.key), ("ETag", f'"{stored.etag}"')]
        tree += [(f"Checksum{name.upper()}", text) for name, text in stored.checksums.items()]
        tree += [("ChecksumType", stored.checksum_type)] if stored.checksums else []
        headers = self.object_headers(stored, request.head)
        return xml_response("CompleteMultipartUploadResult", tree, headers=headers)

    def _abort(self, request: Request) -> Response:
        self._objects.abort_upload(request.bucket, request.key, request.head.query["uploadId"])
        return Response(204)

    def _list_uploads(self, request: Request) -> Response:
        query = request.head.query
        marker = (query.get("key-marker", ""), query.get("upload-id-marker", ""))
        limit = min(_number(query.get("max-uploads", str(MAX_PAGE))), MAX_PAGE)
        found = [
            upload
            for upload in self._objects.uploads(request.bucket, query.get("prefix", ""))
            if _after(upload, *marker)
        ]
        page, truncated = found[:limit], len(found) > limit
        name = _namer(query)
        tree: list[tuple[str, Tree]] = [("Bucket", request.bucket), ("KeyMarker", name(marker[0]))]
        tree += [("UploadIdMarker", marker[1]), ("Prefix", name(query.get("prefix", "")))]
        tree += [("MaxUploads", str(limit)), ("IsTruncated", _bool(truncated))]
        tree += [("EncodingType", "url")] if "encoding-type" in query else []
        if truncated and page:
            tree += [("NextKeyMarker", name(page[-1].key)), ("NextUploadIdMarker", page[-1].upload_id)]
        for upload in page:
            entry = [
                ("Key", name(upload.key)),
                ("UploadId", upload.upload_id),
                ("Initiated", iso(upload.initiated_s)),
            ]
            tree.append(("Upload", [*entry, ("StorageClass", "STANDARD")]))
        return xml_response("ListMultipartUploadsResult", tree)

    def _list_parts(self, request: Request) -> Response:
        query = request.head.query
        upload, parts = self._objects.upload(request.bucket, request.key, query["uploadId"])
        after = _number(query.get("part-number-marker", "0"))
        limit = min(_number(query.get("max-parts", str(MAX_PAGE))), MAX_PAGE)
        found = [part for part in parts if part.number > after]
        page = found[:limit]
        tree: list[tuple[str, Tree]] = [
            ("Bucket", upload.bucket),
            ("Key", upload.key),
            ("UploadId", upload.upload_id),
        ]
        tree += [("PartNumberMarker", str(after)), ("MaxParts", str(limit))]
        tree += [("IsTruncated", _bool(len(found) > limit))]
        tree += [("NextPartNumberMarker", str(page[-1].number))] if page else []
        for part in page:
            entry = [("PartNumber", str(part.number)), ("LastModified", iso(part.modified_s))]
            entry += [("ETag", f'"{part.blob.etag}"'), ("Size", str(len(part.blob.data)))]
            tree.append(("Part", entry))
        return xml_response("ListPartsResult", tree)

    # -- bodies and headers

    def _blob(self, request: Request) -> Blob:
        return self._objects.new_blob(request.body, request.digests)

    def _kept(self, head: Head) -> dict[str, str]:
        """Return the headers that come back with the object."""
        kept = {
            name: value
            for name, value in head.headers.items()
            if name in _KEPT_HEADERS or name.startswith((f"{self.vendor}meta-", f"{self.vendor}server-side-"))
        }
        encodings = [part.strip() for part in kept.pop("content-encoding", "").split(",")]
        encoding = ", ".join(part for part in encodings if part not in ("", "aws-chunked"))
        return {**kept, "content-encoding": encoding} if encoding else kept

    def _checksums(self, request: Request) -> dict[str, str]:
        """Return the checksums that came with the body, in headers or trailers; they have been compared."""
        return self._given_checksums({**request.head.headers, **request.trailers})

    def _given_checksums(self, headers: Mapping[str, str]) -> dict[str, str]:
        prefix = f"{self.vendor}checksum-"
        return {name: headers[prefix + name] for name in S3_CHECKSUMS if prefix + name in headers}

    def _checksum_headers(self, checksums: Mapping[str, str], checksum_type: str = "") -> Headers:
        headers = [(f"{self.vendor}checksum-{name}", text) for name, text in checksums.items()]
        if headers and checksum_type:
            headers.append((f"{self.vendor}checksum-type", checksum_type))
        return tuple(headers)


def _operation(method: str, bucket: str, key: str, query: Mapping[str, str], *, copies: bool) -> str:
    """Return the operation's name in Amazon's reference."""
    upload = "uploadId" in query
    match method:
        case "GET" if not bucket:
            return "ListBuckets"
        case "GET" if not key:
            if "uploads" in query or "location" in query:
                return "ListMultipartUploads" if "uploads" in query else "GetBucketLocation"
            return "ListObjectsV2" if query.get("list-type") == "2" else "ListObjects"
        case "GET":
            return "ListParts" if upload else "GetObject"
        case "HEAD":
            return "HeadObject" if key else "HeadBucket"
        case "PUT" if not key:
            return "CreateBucket"
        case "PUT":
            if upload:
                return "UploadPartCopy" if copies else "UploadPart"
            return "CopyObject" if copies else "PutObject"
        case "DELETE" if not key:
            return "DeleteBucket"
        case "DELETE":
            return "AbortMultipartUpload" if upload else "DeleteObject"
        case "POST" if not key:
            return "DeleteObjects" if "delete" in query else "PostObject"
        case "POST":
            return "CompleteMultipartUpload" if upload else "CreateMultipartUpload"
    return method


def _after(upload: Upload, key_marker: str, id_marker: str) -> bool:
    """Return whether this upload comes after the markers, in the order of keys and then ids."""
    if not id_marker:
        return upload.key > key_marker
    return (upload.key, upload.upload_id) > (key_marker, id_marker)


def _part_name(item: ElementTree.Element) -> PartName:
    checksums = {name: _text(item, f"Checksum{name.upper()}", "") for name in S3_CHECKSUMS}
    given = {name: text for name, text in checksums.items() if text}
    return PartName(number=_number(_text(item, "PartNumber")), etag=_text(item, "ETag"), checksums=given)


def _entry(stored: StoredObject, name: Callable[[str], str]) -> list[tuple[str, Tree]]:
    return [
        ("Key", name(stored.key)),
        ("LastModified", iso(stored.modified_s)),
        ("ETag", f'"{stored.etag}"'),
        ("Size", str(stored.size)),
        ("StorageClass", "STANDARD"),
    ]


def _namer(query: Mapping[str, str]) -> Callable[[str], str]:
    return (lambda name: quote(name, safe="/")) if query.get("encoding-type") == "url" else str


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _number(text: str) -> int:
    if not text.isdecimal():
        raise StoreError("InvalidArgument", message=f"{text!r} is no number")
    return int(text)


def iso(when_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(when_s)) + f".{int(when_s * 1000) % 1000:03d}Z"


def parse_xml(body: memoryview) -> ElementTree.Element:
    if len(body) > MAX_XML_BYTES:
        raise StoreError("MalformedXML")
    try:
        root = ElementTree.fromstring(bytes(body))
    except ElementTree.ParseError as error:
        raise StoreError("MalformedXML") from error
    for item in root.iter():
        item.tag = item.tag.rpartition("}")[2]
    return root


def _text(item: ElementTree.Element, name: str, default: str | None = None) -> str:
    text = item.findtext(name, default)
    if text is None:
        raise StoreError("MalformedXML", message=f"{name} is missing")
    return text


def xml_response(tag: str, tree: Tree, *, status: int = 200, headers: Headers = ()) -> Response:
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n{_render(tag, tree)}'
    return Response(
        status, (("Content-Type", "application/xml"), *headers), (text.encode("utf-8", "replace"),)
    )


def _render(tag: str, tree: Tree) -> str:
    inner = (
        escape(tree, {"\r": "&#13;"}) if isinstance(tree, str) else "".join(_render(*item) for item in tree)
    )
    return f"<{tag}>{inner}</{tag}>"
