"""Prove from manifest, sizes and headers, without reading tensors, that a checkpoint can be restored.

The proof holds for any number of ranks: a restore plans by global tensors, so it is enough that the files
contain every element of each tensor exactly once. Flipped bits inside tensors are not found; `verify_files`
reads all bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import prod

from ray_ckpt.errors import CorruptionError
from ray_ckpt.format import names
from ray_ckpt.format.digest import Digester, root_digests
from ray_ckpt.format.manifest import CheckpointDescription, Region, by_tensor
from ray_ckpt.storage.checkpoint_files import CheckpointFiles, where_of
from ray_ckpt.types import FileEntry, Fragment, ManifestRow, ProgressCallback
from ray_ckpt.verify.content import (
    Checked,
    Damage,
    Verification,
    check_group,
    check_tensors,
    data_files,
    is_complete,
    lists_all,
    only_unreadable,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemCoverage:
    """One item in the manifest. A region that several ranks saved is counted once.

    `num_differing` counts regions that several ranks saved with different bytes; each rank restores the bytes
    that it saved.
    """

    item: str
    num_tensors: int
    num_slices: int
    size_bytes: int
    num_elements: int  # elements of the item's tensors
    num_covered: int  # elements contained in slices
    num_differing: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePart:
    """The files that one node has saved, except the fragment."""

    node_index: int
    ranks: tuple[int, ...]
    num_files: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A node or the storage path that should hold parts of a checkpoint, with the findings there."""

    where: str
    node: str  # id of the node; "" for the storage path
    fragments: tuple[int, ...]  # indices of the nodes whose fragment and files this holder should have
    damages: tuple[Damage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The report whether a checkpoint can be restored, as far as this is known without reading tensors.

    All ranks together read `tensor_bytes` of tensors, and more if several ranks need the same bytes; the rest
    of `size_bytes` are headers, further copies, and the state file of each rank that saved.

    A checkpoint may be `is_restorable` and not `ok`: for example, the folder contains a foreign file, or
    `checkpoint.json`, which the restore of a run does not read, is damaged. A live checkpoint has `holders`;
    it may be restorable from all of them together even if some copies are damaged or missing. One that has
    `only_items` may be `ok`, and is not `is_restorable`: training does not resume from it.
    """

    where: str
    is_restorable: bool
    world_size: int
    num_files: int
    size_bytes: int  # size of these files according to the manifest
    read_bytes: int  # bytes read for this report
    items: tuple[ItemCoverage, ...]
    nodes: tuple[NodePart, ...]
    damages: tuple[Damage, ...]  # damage of the checkpoint as a whole, not of one holder
    holders: tuple[Holder, ...] = ()
    only_items: str = ""  # see VerifyReport

    @property
    def ok(self) -> bool:
        return not self.num_damages

    @property
    def is_unread(self) -> bool:
        """True if files cannot be read, as without permission, and nothing shows damage."""
        return not self.holders and only_unreadable(self.damages)

    @property
    def num_damages(self) -> int:
        return len(self.damages) + sum(len(holder.damages) for holder in self.holders)

    @property
    def tensor_bytes(self) -> int:
        return sum(item.size_bytes for item in self.items)


def verify_plan(
    files: CheckpointFiles, *, root_digest: str | None = None, progress: ProgressCallback | None = None
) -> PlanReport:
    """Prove that a checkpoint can be restored, without reading its bytes.

    Reads the manifest, the list of files, and the header of each shard. Shows that the slices cover every
    element of every tensor exactly once, so that the checkpoint can be restored at any world size; that each
    file exists with the right size; and that these are the files from which `root_digest` was computed.
    Damage inside a file is not found: `verify_files` reads all bytes. Raises NewerFormat for a manifest of a
    newer version, but no error for damage.

    `root_digest` is the root digest in the log, which must match the fragments; without it `checkpoint.json`
    lists the committed files.
    """
    check = PlanVerification(files, progress or (lambda nbytes: None))
    description = check.read_description()
    fragments = check.read_committed(description, root_digest)
    check.refuse_newer()
    check.damages += check_group(description, fragments)
    gaps = tuple(check_tensors(fragments))
    check.damages += gaps
    check.check_sizes(description, fragments)
    only_items = description.items if description is not None else ""
    is_restorable = not (gaps or only_items) and check.is_restorable(description, fragments, root_digest)
    check.damages += check_listed(description, fragments, check.found, root_digest)
    if description is not None or fragments:
        check.check_unlisted(is_whole=lists_all(description, fragments))
    return plan_report(
        fragments,
        where=str(files.location),
        is_restorable=is_restorable,
        read_bytes=check.size_bytes,
        damages=check.damages,
        only_items=only_items,
    )


def plan_report(
    fragments: Mapping[str, Fragment],
    *,
    where: str,
    is_restorable: bool,
    read_bytes: int,
    damages: Sequence[Damage],
    holders: Sequence[Holder] = (),
    only_items: str = "",
) -> PlanReport:
    """Combine the content of `fragments` with the findings."""
    entries = [entry for fragment in fragments.values() for entry in fragment.files]
    return PlanReport(
        where=where,
        is_restorable=is_restorable,
        world_size=next((f.world_size for f in fragments.values()), 0),
        num_files=len(entries),
        size_bytes=sum(entry.size_bytes for entry in entries),
        read_bytes=read_bytes,
        items=_items(fragments),
        nodes=tuple(
            NodePart(
                node_index=fragment.node_index,
                ranks=fragment.ranks,
                num_files=len(fragment.files),
                size_bytes=sum(file.size_bytes for file in fragment.files),
            )
            for fragment in fragments.values()
        ),
        damages=tuple(damages),
        holders=tuple(holders),
        only_items=only_items,
    )


def check_listed(
    description: CheckpointDescription | None,
    fragments: Mapping[str, Fragment],
    found: Mapping[str, FileEntry],
    expected: str | None,
) -> Iterator[Damage]:
    """Check that all fragments, with the entries in `found`, are those that were committed."""
    if not is_complete(fragments):
        return
    entries = [entry for fragment in fragments.values() for entry in fragment.files]
    actual = root_digests([*entries, *(found[name] for name in fragments)])
    for root, who in ((expected, "the log"), (description and description.root_digest, "it")):
        if root is not None and (root not in actual or expected not in (None, root)):
            detail = f"The fragments have the root digest {actual[0]}; {who} has {root}."
            yield Damage(file=names.CHECKPOINT_JSON, where="root digest", detail=detail)
            return


class PlanVerification(Verification):
    """One pass over the manifest, sizes and headers of a checkpoint, or of some fragments, at a location."""

    def read_committed(
        self, description: CheckpointDescription | None, root_digest: str | None
    ) -> dict[str, Fragment]:
        """Read the intact fragments by file name, compared with `root_digest`, or else with `description`."""
        if description is None or root_digest is None:
            return self.read_fragments(description)
        listed = description.fragments
        read = self.read_named([(entry.name, None) for entry in listed])
        for entry in listed:
            if entry.name in read and self.found[entry.name] != entry:
                self.report(entry.name, "digest", f"{names.CHECKPOINT_JSON} has it with other bytes.")
        return read

    def is_restorable(
        self,
        description: CheckpointDescription | None,
        fragments: Mapping[str, Fragment],
        root_digest: str | None,
    ) -> bool:
        """Return True if `fragments` are the committed fragments, and no file of them has a finding."""
        witness = description if root_digest is None else None
        if not is_complete(fragments) or (witness is None and root_digest is None):
            return False
        files = {entry.name for fragment in fragments.values() for entry in fragment.files}
        return not (
            any(check_group(witness, fragments))
            or any(check_listed(witness, fragments, self.found, root_digest))
            or any(damage.file in files for damage in self.damages)
        )

    def check_sizes(
        self, description: CheckpointDescription | None, fragments: Mapping[str, Fragment]
    ) -> None:
        """Check that each data file exists with the right size, and that each shard has the saved header."""
        headers = {r.file: r for f in fragments.values() for r in f.rows if r.kind == "header"}
        listed = data_files(description) or {}
        listed |= {file.name: file for fragment in fragments.values() for file in fragment.files}
        wanted = [(entry, headers.get(name)) for name, entry in sorted(listed.items())]
        for checked in self._each(self._check_outline, wanted):
            self._take(checked)

    def _check_outline(self, wanted: tuple[FileEntry, ManifestRow | None]) -> Checked:
        entry, header = wanted
        checked = Checked(entry.name)
        try:
            file = self._files.open(entry.name)
            if file is None:
                checked.report("missing", f"Its {entry.size_bytes} bytes are not there.")
            elif file.size_bytes != entry.size_bytes:
                checked.report("size", f"{file.size_bytes} bytes, not {entry.size_bytes}.")
            elif header is not None:
                with closing(file.read([(0, header.nbytes)])) as blocks:
                    self._check_rows(checked, self._counted(blocks, Digester()), [header])
        except (OSError, EOFError) as error:
            checked.report(where_of(error), str(error))
        except CorruptionError as error:  # from a compressed file
            checked.report("content", str(error))
        return checked


def _items(fragments: Mapping[str, Fragment]) -> tuple[ItemCoverage, ...]:
    items: dict[str, Counter[str]] = {}
    for item, rows in by_tensor(row for fragment in fragments.values() for row in fragment.rows):
        items.setdefault(item, Counter()).update(_tensor_coverage(rows))
    return tuple(ItemCoverage(item=item, **counts) for item, counts in items.items())


def _tensor_coverage(rows: Sequence[ManifestRow]) -> Counter[str]:
    """Return the fields of ItemCoverage for the rows of one tensor.

    Ranks may save tensors of their own under one key; each dtype and shape then counts as `uncovered` does.
    """
    forms: dict[tuple[str, tuple[int, ...]], dict[Region, set[tuple[str, int]]]] = {}
    for row in rows:
        if (part := row.slice) is not None:
            regions = forms.setdefault((part.dtype, part.global_shape), {})
            regions.setdefault((part.offset, part.shape), set()).add((row.digest, row.nbytes))
    found = Counter(num_tensors=1, num_slices=len(rows))
    for (_, global_shape), regions in forms.items():
        found["num_elements"] += prod(global_shape)
        for (_, shape), versions in regions.items():
            found["size_bytes"] += max(nbytes for _, nbytes in versions)
            found["num_covered"] += prod(shape)
            found["num_differing"] += len(versions) > 1
    return found
