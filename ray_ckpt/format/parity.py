"""Parity files: what the nodes of a group keep, so that each node's files can be computed from the others'.

A group has `n` nodes in a fixed order; any `m` of them may be lost. The files of a node, its fragment first,
form one sequence of bytes, cut into `k = n - m` segments of the same size; the end of the longest sequence
defines the size, and shorter ones are read as if zeros followed. The group has `n` stripes: stripe `s` has
its P in the parity file of node `s`, its Q in that of node `s + 1`, and one segment of each other node. So
a node's parity file has `m` blocks of one segment, and its own bytes are in the other `k` stripes, as in
RAID-5 and RAID-6 with rotating parity. Positions count modulo `n`. If a node has still shards, these form a
sequence of their own, and each node has a second parity file for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import asdict, dataclass
from typing import Any

from ray_ckpt.errors import FormatError
from ray_ckpt.format import jsontext
from ray_ckpt.format.names import (
    MAX_RANKS,
    STILL,
    check_file,
    fragment_file,
    is_still_name,
    parity_file,
)
from ray_ckpt.format.shard import ALIGNMENT_BYTES
from ray_ckpt.types import MAX_PARITY, MAX_PARITY_DATA, AttemptId, FileEntry, ParityGroup

PARITY_VERSION = 2  # of files with `has_still`; others are of version 1
MAX_HEADER_BYTES = 16 << 20  # size of the header: 34 nodes with a few thousand files each
DIGEST_BYTES = 32  # at the end of the file: the digest of the blocks, in hex digits
_LENGTH_BYTES = 8
_ATTEMPT = ("run_uid", "epoch", "session", "step", "attempt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Bytes of one stripe: `size` bytes at `offset` in its segments."""

    stripe: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Files that are coded together, for each position of a group, and the layout of their segments."""

    group: ParityGroup
    num_nodes: int
    number: int  # of the parity files: 0, or STILL for still shards
    files: tuple[tuple[FileEntry, ...], ...]
    segment_bytes: int  # size of a segment, a multiple of 4096 bytes

    @classmethod
    def of(cls, header: ParityHeader, number: int, files: Iterable[tuple[FileEntry, ...]]) -> Layer:
        files = tuple(files)
        longest = max(sum(file.size_bytes for file in files_of) for files_of in files)
        segment_bytes = -(-longest // (header.group.num_data * ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
        return cls(
            group=header.group,
            num_nodes=header.num_nodes,
            number=number,
            files=files,
            segment_bytes=segment_bytes,
        )

    @property
    def blocks_bytes(self) -> int:
        """Size of the blocks of one parity file."""
        return self.group.parity * self.segment_bytes

    def parity_file(self, position: int) -> str:
        """Return the name of the parity file of a member."""
        return parity_file(self.group.members[position], self.num_nodes, self.number)

    def pieces(self, position: int, span: Span) -> Iterator[tuple[str, int, int, int]]:
        """Yield the parts of a member's segment that exist: file, offset in it, size, position in `span`."""
        start = self.group.segment_in(span.stripe, position) * self.segment_bytes + span.offset
        at = 0
        for file in self.files[position]:
            begin, end = max(start, at), min(start + span.size, at + file.size_bytes)
            if begin < end:
                yield file.name, begin - at, end - begin, begin - start
            at += file.size_bytes

    def spans(self, file: str, ranges: Iterable[tuple[int, int]], max_bytes: int) -> Iterator[Span]:
        """Yield the spans with the bytes of ranges of a member's file, in order, at most `max_bytes` each.

        FormatError if no member has the file, or if a range is not in it.
        """
        position, base, size_bytes = self._place(file)
        for offset, size in ranges:
            if offset + size > size_bytes:
                raise FormatError(f"{file} ends at byte {size_bytes}, before {offset + size}.")
            at, end = base + offset, base + offset + size
            while at < end:
                segment, inside = divmod(at, self.segment_bytes)
                nbytes = min(end - at, self.segment_bytes - inside, max_bytes)
                stripe = self.group.stripe_of(position, segment)
                yield Span(stripe=stripe, offset=inside, size=nbytes)
                at += nbytes

    def position_of(self, file: str) -> int:
        """Return the position of the member that has the file. FormatError if no member has it."""
        return self._place(file)[0]

    def _place(self, file: str) -> tuple[int, int, int]:
        for position, files in enumerate(self.files):
            at = 0
            for entry in files:
                if entry.name == file:
                    return position, at, entry.size_bytes
                at += entry.size_bytes
        raise FormatError(f"No parity file of the group covers {file}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityHeader:
    """The header of a parity file: the group, and the files of each member at the time of the coding.

    `files` has for each position of the group the fragment of that member and the files that it lists. With
    `has_still` the still shards are coded apart, into a file that later checkpoints may link.
    """

    attempt: AttemptId
    num_nodes: int
    group: ParityGroup
    position: int  # of the node for which the file was made
    files: tuple[tuple[FileEntry, ...], ...]
    has_still: bool = False

    @property
    def name(self) -> str:
        return parity_file(self.group.members[self.position], self.num_nodes)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The files that are coded together: all of them, or first the moving and then the still ones."""
        if not self.has_still:
            return (Layer.of(self, 0, self.files),)
        moving = (tuple(f for f in files if not is_still_name(f.name)) for files in self.files)
        still = (tuple(f for f in files if is_still_name(f.name)) for files in self.files)
        return Layer.of(self, 0, moving), Layer.of(self, STILL, still)

    def number_of(self, file: str) -> int:
        """Return the number of the layer with a member's file."""
        return STILL if self.has_still and is_still_name(file) else 0

    def stripe(self, index: int) -> int:
        """Return the stripe of a block of this file: P for `index` 0, Q for 1."""
        return self.group.place(self.position - index)

    def size_bytes(self, layer: Layer) -> int:
        """Size of the whole parity file of a layer."""
        return blocks_at(self, layer) + layer.blocks_bytes + DIGEST_BYTES


def blocks_at(header: ParityHeader, layer: Layer) -> int:
    """Return the position of the first block in the parity file of a layer: only the first has a header."""
    return 0 if layer.number else len(encode_header(header))


def encode_header(header: ParityHeader) -> bytes:
    """Return the beginning of a parity file: its length, sealed JSON and spaces up to a multiple of 4096."""
    document = {
        "format": PARITY_VERSION if header.has_still else 1,
        **{name: getattr(header.attempt, name) for name in _ATTEMPT},
        "num_nodes": header.num_nodes,
        "members": list(header.group.members),
        "parity": header.group.parity,
        "position": header.position,
        "files": [[asdict(file) for file in files] for files in header.files],
    }
    limit = MAX_HEADER_BYTES - ALIGNMENT_BYTES
    body = jsontext.dumps_sealed(document, what="A parity header", max_bytes=limit)
    padding = b" " * (-(_LENGTH_BYTES + len(body)) % ALIGNMENT_BYTES)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body + padding


def header_bytes(first: bytes) -> int:
    """Return the size of a header from its first 8 bytes or more. FormatError if it cannot be one."""
    length = int.from_bytes(first[:_LENGTH_BYTES], "little")
    if len(first) < _LENGTH_BYTES or not 0 < length <= MAX_HEADER_BYTES:
        raise FormatError("A parity file has no header.")
    return -(-(_LENGTH_BYTES + length) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def decode_header(data: bytes) -> ParityHeader:
    """Return the header at the beginning of a parity file. FormatError for any violation of the format."""
    what, size = "A parity header", header_bytes(data)
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if len(data) < size or data[_LENGTH_BYTES + length : size].strip(b" "):
        raise FormatError(f"{what} is cut short.")
    body = data[_LENGTH_BYTES : _LENGTH_BYTES + length]
    found = jsontext.loads_sealed(body, what=what, max_bytes=MAX_HEADER_BYTES, newest=PARITY_VERSION)
    epoch, session, step = (jsontext.integer(found.get(name), name) for name in ("epoch", "session", "step"))
    run_uid, attempt = (jsontext.text(found.get(name), name) for name in ("run_uid", "attempt"))
    num_nodes = jsontext.integer(found.get("num_nodes"), "num_nodes", low=1, high=MAX_RANKS)
    members = tuple(
        jsontext.integer(member, "member", high=num_nodes - 1)
        for member in jsontext.array(found.get("members"), "members")
    )
    parity = jsontext.integer(found.get("parity"), "parity", low=1, high=MAX_PARITY)
    group = ParityGroup(members=members, parity=parity)
    if len(set(members)) < len(members) or not 1 <= group.num_data <= MAX_PARITY_DATA:
        raise FormatError(f"{what}: {members} with {parity} parity blocks is no group.")
    files = tuple(tuple(map(_entry, files)) for files in map(_list, _list(found.get("files"))))
    names = [fragment_file(member, num_nodes) for member in members]
    if [files_of[0].name if files_of else "" for files_of in files] != names:
        raise FormatError(f"{what} does not list the fragments of its members.")
    listed = [file.name for files_of in files for file in files_of]
    if len(set(listed)) < len(listed):
        raise FormatError(f"{what} lists a file twice.")
    has_still = found["format"] == PARITY_VERSION
    if has_still and not any(map(is_still_name, listed)):
        raise FormatError(f"{what} lists no still shard.")
    return ParityHeader(
        attempt=AttemptId(run_uid=run_uid, epoch=epoch, session=session, step=step, attempt=attempt),
        num_nodes=num_nodes,
        group=group,
        position=jsontext.integer(found.get("position"), "position", high=len(members) - 1),
        files=files,
        has_still=has_still,
    )


def is_decodable(group: ParityGroup, lost: Set[int], without_parity: Set[int]) -> bool:
    """Return True if all lost fragments can be computed; both sets have positions of the group."""
    for stripe in range(group.size if lost else 0):
        sums = [group.place(stripe + index) for index in range(group.parity)]
        gone = sum(at in without_parity for at in sums) + sum(at not in sums for at in lost)
        if gone > group.parity and any(at not in sums for at in lost):
            return False
    return True


def _list(value: object) -> list[Any]:
    return jsontext.array(value, "files")


def _entry(value: object) -> FileEntry:
    found = jsontext.mapping(value, "file")
    return FileEntry(
        name=check_file(jsontext.text(found.get("name"), "name")),
        size_bytes=jsontext.integer(found.get("size_bytes"), "size_bytes"),
        digest=jsontext.hex_digest(found.get("digest"), "digest"),
    )
