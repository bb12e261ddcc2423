"""Files of a parity group that are computed from the files of its other members, pulled from their nodes.

A computation reads the same range from several members, one after another, and adds the bytes to a window as
they arrive. So its memory is one window of each sum for each thread, however many members there are.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ray_ckpt.core.values import GroupPlaces
from ray_ckpt.errors import CorruptionError, FormatError, Unavailable, is_lost
from ray_ckpt.format.blocks import BlockCutter
from ray_ckpt.format.digest import Digester, digest
from ray_ckpt.format.galois import Bytes, StripeSum, solve
from ray_ckpt.format.manifest import MAX_FRAGMENT_BYTES, decode_columns
from ray_ckpt.format.names import fragment_file, is_still_name, parity_file
from ray_ckpt.format.parity import (
    DIGEST_BYTES,
    Layer,
    ParityHeader,
    Span,
    decode_header,
    encode_header,
    header_bytes,
)
from ray_ckpt.format.shard import ALIGNMENT_BYTES
from ray_ckpt.restore.sources import BUSY_TRIES, PEER_TRIES, Blocks, ByteSource, Peers
from ray_ckpt.storage.parallel import map_in_order
from ray_ckpt.transport.sending import Limiter
from ray_ckpt.transport.wire import FileName
from ray_ckpt.types import AttemptId, FileEntry, ParityGroup

PARITY = "parity"  # the place of a computed file, in messages
WINDOW_BYTES = 8 << 20  # of a sum that is computed at a time
WINDOW_SPANS = 1000  # ranges in a window; a request for each member lists them
ENCODERS = 2  # windows of a parity file at a time: one waits for the network while the other adds


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSources:
    """The addresses of the nodes with the files of a parity group; see `GroupPlaces`.

    With `prefers_q` a single lost member is computed from Q, which helps if P has damaged bytes. The member
    at position `without` counts as lost, which helps if that member has some. `nodes` are those of the
    `fragments`, by their ids.
    """

    group: ParityGroup
    num_nodes: int
    nodes: tuple[tuple[str, ...], ...]
    fragments: tuple[tuple[str, ...], ...]
    parities: tuple[tuple[str, ...], ...]
    prefers_q: bool = False
    without: int | None = None

    @property
    def left_out(self) -> tuple[str, ...]:
        """The nodes with the files of the member that is left out."""
        return () if self.without is None else self.nodes[self.without]


def group_sources(
    places: GroupPlaces, num_nodes: int, endpoints: Mapping[str, str]
) -> tuple[GroupSources, ...]:
    """Return the ways to compute files of a group, that with P first. A node without an address has ""."""

    def addresses(held: Iterable[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(endpoints.get(node, "") for node in nodes) for nodes in held)

    first = GroupSources(
        group=places.group,
        num_nodes=num_nodes,
        nodes=places.fragments,
        fragments=addresses(places.fragments),
        parities=addresses(places.parities),
    )
    return (first, replace(first, prefers_q=True))[: places.group.parity]


def further_ways(first: GroupSources) -> Iterator[GroupSources]:
    """Yield the ways for files that P and Q have computed wrong; each leaves another member out.

    A member has damaged bytes then that nobody knows of. One sum does not show which.
    """
    if first.group.parity > 1:
        for at, held in enumerate(first.fragments):
            if held:
                yield replace(first, without=at)


class _Gone(Exception):
    """A source of the group has failed and is no longer used."""


class GroupReader:
    """Reader of one parity group of an attempt, from any threads. `read_bytes` counts what it has pulled."""

    def __init__(
        self, attempt: AttemptId, sources: GroupSources, peers: Peers, limiter: Limiter | None = None
    ) -> None:
        self._attempt = attempt
        self._sources = sources
        self._peers = peers
        self._limiter = limiter or Limiter()
        self._lock = threading.Lock()
        self._failed: set[tuple[str, int, bool]] = set()  # address, position, True for its parity file
        self._header: ParityHeader | None = None
        self._layers: tuple[Layer, ...] = ()
        self._header_bytes: dict[int, int] = {}  # size of the header of each parity file, by position
        self._has_unreached = False  # a source was not reached: it may be intact
        self.read_bytes = 0

    # -- parity files ----------------------------------------------------------------------------------

    def plan(self, position: int) -> ParityHeader:
        """Return the header of a new parity file, from the fragments of all members.

        Unavailable if a fragment cannot be read, CorruptionError if it is damaged.
        """
        files = tuple(self._listed(at) for at in range(self._sources.group.size))
        has_still = any(is_still_name(file.name) for files_of in files for file in files_of)
        if has_still and any(self._sources.parities):
            with suppress(Unavailable):  # one of an earlier version stays what it is, and fits no other
                has_still = self.header().has_still
        return ParityHeader(
            attempt=self._attempt,
            num_nodes=self._sources.num_nodes,
            group=self._sources.group,
            position=position,
            files=files,
            has_still=has_still,
        )

    def _listed(self, position: int) -> tuple[FileEntry, ...]:
        """Return the entries of a member's fragment and of the files that it lists."""
        name = fragment_file(self._sources.group.members[position], self._sources.num_nodes)
        failure: Unavailable | CorruptionError = Unavailable(f"No node has {name}.", refused=True)
        for endpoint in self._sources.fragments[position]:
            try:
                data = self._peers.read_small(endpoint, self._name(name), max_bytes=MAX_FRAGMENT_BYTES)
                metadata, _ = decode_columns(data)
            except (Unavailable, CorruptionError) as error:  # another node may have it intact
                failure = error
                continue
            if metadata.attempt != self._attempt:
                raise Unavailable(f"{name} is of another attempt.", refused=True)
            entry = FileEntry(name=name, size_bytes=len(data), digest=digest(data))
            return entry, *metadata.files
        raise failure

    def encode(self, header: ParityHeader, layer: Layer) -> Iterator[bytes | memoryview]:
        """Yield the bytes of a layer's parity file. Unavailable if a member cannot be read to its end."""
        if not layer.number:
            yield encode_header(header)
        state, segment_bytes = Digester(), layer.segment_bytes
        windows = [
            (index, Span(stripe=header.stripe(index), offset=at, size=min(WINDOW_BYTES, segment_bytes - at)))
            for index in range(header.group.parity)
            for at in range(0, segment_bytes, WINDOW_BYTES)
        ]
        parity_of = partial(self._parity_of, layer)
        found = map_in_order(parity_of, windows, threads=ENCODERS, name="code", max_results=ENCODERS)
        with closing(found):
            for window in found:
                state.update(window.data)
                yield window.data
        yield state.hexdigest().encode()

    def _parity_of(self, layer: Layer, window: tuple[int, Span]) -> Bytes:
        index, span = window
        while True:
            try:
                return self._sums(layer, [span], (index,), ())[index]
            except _Gone as error:  # with one source less, so this ends
                members = self._sources.group.data_of(span.stripe)
                if not all(self._left(at, is_parity=False) for at in members):
                    text = f"A member of the group cannot be read: {error}"
                    raise Unavailable(text, refused=True) from error

    # -- lost members ----------------------------------------------------------------------------------

    def header(self) -> ParityHeader:
        """Return the header of one of the group's parity files. Unavailable if none can be read."""
        with self._lock:
            if self._header is not None:
                return self._header
        failure: Unavailable | None = None
        for position in range(self._sources.group.size):
            try:
                return self._read_header(position)
            except _Gone:
                continue
            except Unavailable as error:  # its node is busy
                failure = error
        if failure is None:
            is_sure = not (self._has_unreached or self._peers.gone)
            failure = Unavailable("No parity file of the group can be read.", refused=True, lost=is_sure)
        raise failure

    def _read_header(self, position: int) -> ParityHeader:
        """Read the header of a member's parity file; raise _Gone if it does not fit the others."""
        name = parity_file(self._sources.group.members[position], self._sources.num_nodes)
        endpoint = self._first_left(position, is_parity=True)
        first = self._read_small(position, name, ALIGNMENT_BYTES, endpoint)
        try:
            size = header_bytes(first)
            found = decode_header(
                first if size <= ALIGNMENT_BYTES else self._read_small(position, name, size, endpoint)
            )
            known = self._header or found
            if found.attempt != self._attempt or found.group != self._sources.group:
                raise FormatError(f"{name} is of another group.")
            if (found.files, found.has_still) != (known.files, known.has_still):
                raise FormatError(f"{name} is of other files than the rest of its group.")
        except FormatError as error:
            self._fail(endpoint, position, is_parity=True)
            raise _Gone(str(error)) from error
        with self._lock:
            self._header_bytes[position] = size
            self._header = known
            return known

    def _read_small(self, position: int, name: str, size: int, endpoint: str) -> bytes:
        blocks = self._pull(endpoint, position, name, [(0, size)], is_parity=True)
        return b"".join(map(bytes, blocks))

    def bad_parities(self) -> Iterator[tuple[int, str]]:
        """Yield each parity file that cannot be read, or has another size, by its position, with the reason.

        No block is read, so damage inside of a file is not found.
        """
        for position, held in enumerate(self._sources.parities):
            if held:
                try:
                    self._check_parity(position)
                except (_Gone, Unavailable) as error:
                    yield position, str(error)

    def _check_parity(self, position: int) -> None:
        """Raise _Gone or Unavailable if a member's parity file is not as its header says."""
        for layer in self._read_header(position).layers:
            name = self._name(layer.parity_file(position))
            blocks_at = 0 if layer.number else self._header_bytes[position]
            wanted = blocks_at + layer.blocks_bytes + DIGEST_BYTES
            found = self._size(self._first_left(position, is_parity=True), name)
            if found != wanted:
                raise _Gone(f"{name.file} has {found or 0} bytes instead of {wanted}.")

    def _size(self, endpoint: str, name: FileName) -> int | None:
        for tries_left in reversed(range(PEER_TRIES)):
            try:
                with self._peers.acquire(endpoint) as peer:
                    return peer.size(name)
            except Unavailable as error:
                if not tries_left or error.fields.get("refused"):
                    raise
        raise AssertionError("the last try returns or raises")

    def files_of(self, position: int) -> tuple[FileEntry, ...]:
        """Return the entries of a member's files, its fragment first, from a node with it or a parity file.

        Unavailable if there is neither.
        """
        try:
            return self._listed(position)
        except (Unavailable, CorruptionError):
            return self.header().files[position]

    def copy(
        self, position: int, file: str, ranges: Sequence[tuple[int, int]]
    ) -> Generator[memoryview, None, None]:
        """Yield the bytes of ranges of a member's file from a node that has it. Unavailable if none has."""
        done_bytes = 0
        while True:
            try:
                endpoint = self._first_left(position, is_parity=False)
            except _Gone as error:
                raise Unavailable(str(error), refused=True) from error
            with suppress(_Gone):  # with one source less, so this ends
                rest = _after(ranges, done_bytes)
                for block in self._pull(endpoint, position, file, rest, is_parity=False):
                    done_bytes += block.nbytes
                    yield block
                return

    def entries(self, file: str) -> tuple[FileEntry, ...]:
        """Return the files of the member that has `file`, its fragment first."""
        header, layer = self.header(), self._layer_of(file)
        return header.files[layer.position_of(file)]

    def _layer_of(self, file: str) -> Layer:
        header = self.header()
        with self._lock:
            self._layers = self._layers or header.layers  # once, since there may be thousands of files
            return self._layers[header.number_of(file)]

    def read(self, file: str, ranges: Sequence[tuple[int, int]]) -> Generator[memoryview, None, None]:
        """Yield the bytes of ranges of a member's file, computed from the other members.

        Unavailable if too many members are lost. The bytes are not compared with digests here.
        """
        layer = self._layer_of(file)
        position = layer.position_of(file)
        for spans in _windows(layer.spans(file, ranges, WINDOW_BYTES)):
            yield self._compute(layer, position, spans).data

    def read_whole(self, file: str, *, max_bytes: int) -> bytes:
        """Return a whole file of a member; see `read`. FormatError if it has more than `max_bytes`."""
        (entry,) = (entry for entry in self.entries(file) if entry.name == file)
        if entry.size_bytes > max_bytes:
            raise FormatError(f"{file} has {entry.size_bytes} bytes; the format allows {max_bytes}.")
        return b"".join(map(bytes, self.read(file, [(0, entry.size_bytes)])))

    def _compute(self, layer: Layer, position: int, spans: Sequence[Span]) -> Bytes:
        """Return the bytes of spans of one stripe, in which the member at `position` has data."""
        group, stripe = layer.group, spans[0].stripe
        while True:
            left_out = {position, self._sources.without}
            lost = [
                at for at in group.data_of(stripe) if at in left_out or not self._left(at, is_parity=False)
            ]
            sums = [i for i in range(group.parity) if self._left(group.place(stripe + i), is_parity=True)]
            sums = sums[::-1] if self._sources.prefers_q else sums
            if len(sums) < len(lost):
                text = "Too many members of the parity group are lost."
                is_sure = not (self._has_unreached or self._peers.gone)
                raise Unavailable(text, refused=True, lost=is_sure)
            try:
                found = self._sums(layer, spans, sums[: len(lost)], lost)
                for index, total in found.items():
                    self._add_parity(layer, group.place(stripe + index), index, spans, total)
            except _Gone:
                continue  # with one source less, so this ends
            exponents = [group.exponent(stripe, at) for at in lost]
            return solve(exponents, found)[group.exponent(stripe, position)]

    def _sums(
        self, layer: Layer, spans: Sequence[Span], indexes: Sequence[int], left_out: Sequence[int]
    ) -> dict[int, Bytes]:
        """Return sums over the members with data in the stripe of spans, without some, by index."""
        sums = {index: StripeSum(sum(span.size for span in spans), index) for index in indexes}
        for position in layer.group.data_of(spans[0].stripe):
            for total in sums.values():
                total.begin()
            if position in left_out:
                continue
            for file, parts in _by_file(layer, position, spans).items():
                endpoint = self._first_left(position, is_parity=False)
                ranges = [(offset, size) for offset, size, _ in parts]
                blocks = self._pull(endpoint, position, file, ranges, is_parity=False)
                for at, piece in _placed(blocks, [(at, size) for _, size, at in parts]):
                    for total in sums.values():
                        total.add(at, piece)
        return {index: total.finish() for index, total in sums.items()}

    def _add_parity(
        self, layer: Layer, position: int, index: int, spans: Sequence[Span], total: Bytes
    ) -> None:
        """Add the stored parity block of a stripe to the sum over the members that are left."""
        if position not in self._header_bytes:
            self._read_header(position)
        base = (0 if layer.number else self._header_bytes[position]) + index * layer.segment_bytes
        ranges = [(base + span.offset, span.size) for span in spans]
        endpoint = self._first_left(position, is_parity=True)
        blocks = self._pull(endpoint, position, layer.parity_file(position), ranges, is_parity=True)
        for at, piece in _placed(blocks, [(0, total.size)]):
            window = total[at : at + piece.nbytes]
            np.bitwise_xor(window, np.frombuffer(piece, np.uint8), out=window)

    # -- sources ---------------------------------------------------------------------------------------

    def _left(self, position: int, *, is_parity: bool) -> list[str]:
        """Return the addresses at which a member's files, or its parity file, can still be read."""
        held = self._sources.parities if is_parity else self._sources.fragments
        bad, gone = self._failed, self._peers.gone
        return [at for at in held[position] if (at, position, is_parity) not in bad and at not in gone]

    def _first_left(self, position: int, *, is_parity: bool) -> str:
        """Return the first address that `_left` returns, while other threads give up sources; else _Gone."""
        for endpoint in self._left(position, is_parity=is_parity):
            return endpoint
        raise _Gone(f"no source is left of member {self._sources.group.members[position]}")

    def _pull(
        self,
        endpoint: str,
        position: int,
        file: str,
        ranges: Sequence[tuple[int, int]],
        *,
        is_parity: bool,
    ) -> Iterator[memoryview]:
        """Yield bytes of a file; a source that fails is not used any more, and _Gone is raised.

        Unavailable for a source that only answers that it is busy: it is asked again later.
        """
        tries, done_bytes = 0, 0
        while True:
            try:
                with self._peers.acquire(endpoint) as peer:
                    slowest = self._peers.slowest_bytes_per_s
                    rest = _after(ranges, done_bytes)
                    for block in peer.read(self._name(file), rest, slowest_bytes_per_s=slowest):
                        self._limiter.wait(block.nbytes)
                        with self._lock:
                            self.read_bytes += block.nbytes
                        done_bytes += block.nbytes
                        yield block
                return
            except Unavailable as error:
                tries += 1
                is_answer, is_refused = (bool(error.fields.get(name)) for name in ("answered", "refused"))
                if not is_refused and tries < (BUSY_TRIES if is_answer else PEER_TRIES):
                    continue
                if is_answer and not is_refused:
                    raise
                self._fail(endpoint, position, is_parity=is_parity)
                self._has_unreached |= not is_lost(error)
                if not is_answer:
                    self._peers.gone.add(endpoint)
                raise _Gone(str(error)) from error

    def _fail(self, endpoint: str, position: int, *, is_parity: bool) -> None:
        with self._lock:
            self._failed.add((endpoint, position, is_parity))

    def _name(self, file: str) -> FileName:
        return FileName(run_uid=self._attempt.run_uid, directory=self._attempt.directory, file=file)


class Coded(ByteSource):
    """A file of a lost member of a parity group."""

    def __init__(self, group: GroupReader, file: str, left_out: tuple[str, ...] = ()) -> None:
        self._group = group
        self._file = file
        self.left_out = left_out

    def open(self) -> None:
        self._group.header()

    def read(self, ranges: Sequence[tuple[int, int]]) -> Blocks:
        yield from self._group.read(self._file, ranges)


def _after(ranges: Iterable[tuple[int, int]], nbytes: int) -> list[tuple[int, int]]:
    """Return the ranges without their first bytes."""
    left = []
    for offset, size in ranges:
        skipped = min(nbytes, size)
        nbytes -= skipped
        if skipped < size:
            left.append((offset + skipped, size - skipped))
    return left


def _windows(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Join spans of one stripe that follow each other into windows."""
    window: list[Span] = []
    size = 0
    for span in spans:
        is_full = size + span.size > WINDOW_BYTES or len(window) == WINDOW_SPANS
        if window and (is_full or span.stripe != window[0].stripe):
            yield window
            window, size = [], 0
        window.append(span)
        size += span.size
    if window:
        yield window


def _by_file(layer: Layer, position: int, spans: Iterable[Span]) -> dict[str, list[tuple[int, int, int]]]:
    """Return by file the parts of a member in spans: offset in the file, size, position in the window."""
    found: dict[str, list[tuple[int, int, int]]] = {}
    start = 0
    for span in spans:
        for file, offset, size, at in layer.pieces(position, span):
            found.setdefault(file, []).append((offset, size, start + at))
        start += span.size
    return found


def _placed(
    blocks: Iterable[memoryview], places: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, memoryview]]:
    """Yield the pieces of blocks, each with its position; `places` has positions and sizes in order."""
    cutter = BlockCutter(blocks)
    for at, size in places:
        for piece in cutter.pieces(size):
            yield at, piece
            at += piece.nbytes
    cutter.at_end()  # the client checks here that all bytes came, and no more
