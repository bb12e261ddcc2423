"""Data positions that stay valid with another number of ranks.

    sampler = GlobalBatchSampler(len(dataset), global_batch=256, rank=rank, world_size=world_size, seed=0)
    batches = sampler.batches(DataLoader(dataset, batch_sampler=sampler, num_workers=4))
    ckpt = Checkpointer(model=model, optimizer=optimizer, batches=batches)
    for step, batch in zip(ckpt.steps(total=10_000), batches):
        ...
        ckpt.step(step)

`ckpt.steps` must come first in `zip`: otherwise `zip` takes a batch before it finds that no step is left, and
the checkpoint of the last step counts that batch as used.

All samples of a run are numbered. Number g is the data set's sample `permutation(seed, g // n)[g % n]`, so
one integer is the position of the whole group, epochs follow each other without a gap, and no sample is
lost, doubled, dropped or padded, even if the number of ranks and the batch size change. The state that
`batches` saves is that integer, the seed and the length of the data set.

Alternatives, and their limits, are in docs/guides/resume.md. In addition:

- torchdata's `StatefulDataLoader` belongs to one rank: at another world size samples are lost and doubled,
  and torchdata reports no error (`is_bound_to_world_size`). Another number of workers is an error
  (`loader_problems`). In torchdata 0.11 pass no `generator` to the loader: without worker processes the
  loader also draws the seed of workers from the generator, one time less after a restore, so the epochs after
  the restored epoch have another order. Save within an epoch: a loader restored between two epochs returns
  the right samples, but draws once more from the random state that dropout uses. Inside
  `sampler.batches(...)` the loader works as a plain DataLoader, and its own state is not needed.
- Ray Data (Ray 2.60) has no position: a `DataIterator` has no `state_dict`, each epoch executes the data set
  again, and `OutputSplitter` hands out blocks in the order in which they become ready. Skipping as many rows
  as were read would skip other rows, and is not offered.
"""

from __future__ import annotations

import hashlib
import math
import operator
import random
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from ray_ckpt.errors import ConfigError, MismatchError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Words: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"

ROUNDS = 8  # with 6, neighbours in small data sets are still correlated; with 8 no test finds a correlation
SHUFFLED = f"feistel-{ROUNDS}"  # name of the order in a checkpoint; another algorithm has another name
IN_SEQUENCE = "sequence"
SAMPLER_EPOCH = "ray_ckpt_sampler_epoch"  # a key in the saved state of a loader of torchdata
MAX_SAMPLES = 1 << 62  # the square of the permutation must fit 64 bits


class Share(list[int]):
    """Dataset indices of one rank's samples in a global batch; `first` is the first sample's number."""

    def __init__(self, indices: Iterable[int] = (), first: int = 0) -> None:
        super().__init__(indices)
        self.first = first


class GlobalBatchSampler(Sampler[list[int]]):
    """Sampler of batches of dataset indices for one rank, as a function of (seed, global sample number).

    A global batch takes the next `global_batch` numbers. Rank r of w takes the contiguous share from
    `global_batch * r // w` to `global_batch * (r + 1) // w`: shares differ by at most one sample. If they
    differ, a mean over ranks weights samples unequally; weight a rank's loss by
    `len(share) * world_size / global_batch` if that matters.

    `num_samples` is the length of the data set, at most 2**62. `num_batches` is the number of global batches
    of the whole run, restarts included; None: the run has no end. Time and memory depend on the size of one
    share only, for any length of the data set: 50 to 70 us for up to 256 samples. There is no table of the
    permutation (a table for 10**8 samples would take 0.8 GB and 4 to 9 s per epoch, on each rank).

    The sampler holds no position. Iterate and register `sampler.batches(loader)`; any other iteration is
    refused, since it would count prefetched batches, or no batch. ConfigError for invalid sizes.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        global_batch: int,
        rank: int,
        world_size: int,
        seed: int = 0,
        shuffle: bool = True,
        num_batches: int | None = None,
    ) -> None:
        num_samples, global_batch = _whole("num_samples", num_samples), _whole("global_batch", global_batch)
        rank, world_size = _whole("rank", rank), _whole("world_size", world_size)
        if num_batches is not None and (num_batches := _whole("num_batches", num_batches)) < 0:
            raise ConfigError(
                f"A run of {num_batches} batches is impossible.", hint="Give 0 or more, or None for no end."
            )
        if not 1 <= num_samples <= MAX_SAMPLES:
            raise ConfigError(
                f"A data set of {num_samples} samples has no batches.", hint="Give 1 to 2**62 samples."
            )
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"There is no rank {rank} among {world_size}.",
                hint="Give the rank and world size of the training group.",
            )
        if global_batch < world_size:
            raise ConfigError(
                f"A global batch of {global_batch} leaves some of the {world_size} ranks without a sample.",
                hint=f"Give global_batch at least {world_size}: it counts the samples of all ranks.",
            )
        self.num_samples = num_samples
        self.global_batch = global_batch
        self.seed = _whole("seed", seed)
        self.order = SHUFFLED if shuffle else IN_SEQUENCE
        self.num_batches = num_batches
        self._share = (global_batch * rank // world_size, global_batch * (rank + 1) // world_size)
        self._start: tuple[int, int] | None = None

    def batches(self, loader: Iterable[T]) -> Batches[T]:
        """Return the batches of `loader`, which uses this sampler, with a position.

        Iterate and register the result. `loader` is a DataLoader with `batch_sampler=sampler`, or the sampler
        itself for bare indices.
        """
        return Batches(self, loader)

    def share(self, position: int) -> Share:
        """Return the dataset indices of this rank's samples in the global batch that begins at `position`."""
        first, end = (position + offset for offset in self._share)
        indices = Share(first=first)
        while first < end:
            epoch, start = divmod(first, self.num_samples)
            stop = min(self.num_samples, start + end - first)
            places = np.arange(start, stop, dtype=np.uint64)
            if self.order == SHUFFLED:
                places = permute(places, self.num_samples, round_keys(self.seed, epoch))
            indices += places.tolist()
            first += stop - start
        return indices

    def __len__(self) -> int:
        """Return the number of global batches of the whole run; TypeError if `num_batches` is None."""
        if self.num_batches is None:
            raise TypeError("this sampler has no end: give it num_batches")
        return self.num_batches

    def __iter__(self) -> Iterator[Share]:
        if self._start is None:
            raise ConfigError(
                "GlobalBatchSampler was iterated outside of its batches().",
                hint="batches = sampler.batches(loader); iterate and register `batches`, not the loader.",
            )
        return self._shares(*self._start)  # called twice by a DataLoader with workers

    def _shares(self, position: int, done: int) -> Iterator[Share]:
        while self.num_batches is None or done < self.num_batches:
            yield self.share(position)
            position, done = position + self.global_batch, done + 1

    @contextmanager
    def _starting(self, position: int, done: int) -> Iterator[None]:
        """Make iterations that begin in the `with` block start at `position`, after `done` global batches."""
        self._start = (position, done)
        try:
            yield
        finally:
            self._start = None


def _whole(name: str, value: Any) -> int:
    """Return an integer of any kind as an int; ConfigError for other values."""
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} is {value!r}.", hint="Give an integer.") from None


class Batches(Generic[T]):
    """Batches of a loader, with the number of samples that all ranks have consumed.

    A batch counts once the loop has received it; prefetched batches do not count, so the position does not
    depend on the number of worker processes. The position is correct for a save at the end of a loop's body,
    where the last received batch has been used, also with several batches per step.

    The state is the same on all ranks, and valid at another world size or global batch. An iterator from
    before `load_state_dict` has another position and raises ConfigError; `Checkpointer` refuses to restore
    while such an iterator exists. Creating an iterator leaves torch's random state as it was.

    ConfigError for a loader of other batches, and for a loader without a fixed order.
    """

    def __init__(self, sampler: GlobalBatchSampler, loader: Iterable[T]) -> None:
        if getattr(loader, "batch_sampler", loader) is not sampler:
            raise ConfigError(
                "The loader does not use this sampler.",
                hint="Build DataLoader(dataset, batch_sampler=sampler); with ray.train.torch."
                "prepare_data_loader pass add_dist_sampler=False, or it puts its own sampler there.",
            )
        if getattr(loader, "num_workers", 0) > 0 and not getattr(loader, "in_order", True):
            raise ConfigError(
                "A loader with in_order=False has batches without a position.",
                hint="Leave in_order=True.",
            )
        self._sampler = sampler
        self._loader = loader
        self._position = 0
        self._done = 0
        self._turn = 0  # number of the current iterator; earlier iterators are stale
        self._live: weakref.ref[Iterator[T]] | None = None

    @property
    def position(self) -> int:
        """The number of samples that all ranks have received in this run, and so the next sample's number."""
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, from 0."""
        return self._position // self._sampler.num_samples

    @property
    def epoch_fraction(self) -> float:
        """The finished part of `epoch`, from 0 to less than 1."""
        return self._position % self._sampler.num_samples / self._sampler.num_samples

    def __len__(self) -> int:
        """Return the number of batches of the whole run; TypeError if `num_batches` is None.

        Lightning compares this length with all batches since the beginning. Without it, Lightning prefetches
        one batch to find the end, and the position would count that batch.
        """
        return len(self._sampler)

    def __iter__(self) -> Iterator[T]:
        """Begin at the position; a DataLoader starts its worker processes here."""
        with torch.random.fork_rng(devices=[]), self._sampler._starting(self._position, self._done):
            loaded = iter(self._loader)  # draws a seed for worker processes
        self._turn += 1
        handed = self._hand_out(loaded, self._turn)
        self._live = weakref.ref(handed)
        return handed

    def _hand_out(self, loaded: Iterator[T], turn: int) -> Iterator[T]:
        while True:
            if turn != self._turn:
                raise ConfigError(
                    "This iterator is at an earlier position than its batches.",
                    hint="Create one iterator, after the restore.",
                )
            try:  # no `for`: the loader of ray.train.torch.prepare_data_loader begins again at each iter()
                batch = next(loaded)
            except StopIteration:
                break
            self._position += self._sampler.global_batch
            self._done += 1
            yield batch
        self._live = None

    @property
    def _iterator(self) -> Iterator[T] | None:
        """The current iterator, under the attribute name that DataLoader uses and that a restore checks."""
        return self._live() if self._live is not None else None

    @_iterator.setter
    def _iterator(self, iterator: None) -> None:
        """Drop the current iterator. Lightning resets a loader by setting None here."""
        self._turn, self._live = self._turn + 1, None

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the properties on which the meaning of the position depends."""
        return {**self._meaning(), "position": self._position, "batches": self._done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position in `state`; MismatchError if its sample numbers mean other samples."""
        if changed := self._changed(state):
            raise MismatchError(
                f"The data position belongs to another order of samples: {'; '.join(changed.values())}.",
                hint="Give the sampler the same data set, seed and shuffle as the run that saved it, "
                "or start another run name.",
                problems=tuple(changed),
            )
        self._position, self._done = state["position"], state["batches"]
        self._turn, self._live = self._turn + 1, None

    def _changed(self, state: Mapping[str, Any]) -> dict[str, str]:
        """Return a text for each property by which sample numbers mean others than in `state`."""
        return {
            name: f"{name} was {state.get(name)!r} and is {here!r} here"
            for name, here in self._meaning().items()
            if state.get(name) != here
        }

    def _meaning(self) -> dict[str, Any]:
        sampler = self._sampler
        return {"order": sampler.order, "seed": sampler.seed, "num_samples": sampler.num_samples}


class Samples(Protocol[T_co]):
    """A data set that is read by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


class SeededSamples(Dataset[T]):
    """Wrapper that reads each sample of a data set with random state derived from (seed, sample number).

    For random augmentation with Python's `random`, `numpy.random` or torch on the CPU: a sample is the same
    in any process of any rank, and another one in each epoch. The reading process gets its own random state
    back. Costs 10 to 25 us per sample. For GlobalBatchSampler only; ConfigError for indices of other
    samplers, which have no sample number.
    """

    def __init__(self, samples: Samples[T], *, seed: int = 0) -> None:
        self._samples = samples
        self._seed = seed

    def __len__(self) -> int:
        return len(self._samples)

    def __getitems__(self, share: list[int]) -> list[T]:
        """Return the samples of a batch; called by DataLoader, once per batch."""
        if not isinstance(share, Share):
            raise ConfigError(
                "SeededSamples was read without sample numbers.",
                hint="Read it through sampler.batches(DataLoader(dataset, batch_sampler=sampler)).",
            )
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            return [self._read(index, number) for number, index in enumerate(share, share.first)]
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])

    def _read(self, index: int, number: int) -> T:
        digest = hashlib.blake2b(f"{self._seed}:{number}".encode(), digest_size=20).digest()
        random.seed(digest[:8])
        np.random.seed(int.from_bytes(digest[8:12], "little"))
        torch.default_generator.manual_seed(int.from_bytes(digest[12:], "little", signed=True))
        return self._samples[index]


def round_keys(seed: int, epoch: int) -> Words:
    """Return the keys of one epoch's permutation, uint64 [ROUNDS]."""
    digest = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def permute(places: Words, num_samples: int, keys: Words) -> Words:
    """Return the image of each of `places` under a permutation of `range(num_samples)`; uint64, same shape.

    The permutation is pseudo-random: a Feistel network on pairs (left, right) with left, right < side
    permutes range(side**2). The network is applied again to results out of range (cycle walking), on average
    less than four times; see Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002. `side`
    is even, since with an odd `side` all these permutations have the same parity. The permutation has
    statistical quality only; do not use it for cryptography.
    """
    root = math.isqrt(num_samples - 1) + 1
    side = np.uint64(root + root % 2)
    moved = places.copy()
    outside = np.arange(len(places))
    while len(outside):
        left, right = np.divmod(moved[outside], side)
        for key in keys:
            left, right = right, (left + _mix(right + key) % side) % side
        moved[outside] = left * side + right
        outside = outside[moved[outside] >= num_samples]
    return moved


def _mix(words: Words) -> Words:
    """Return a hash of each number: the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def loader_problems(loader: object, saved: object) -> list[str]:
    """Return why Batches, or a StatefulDataLoader of torchdata, cannot continue from `saved`.

    Return [] for other objects. A loader of torchdata needs the same number of worker processes, and
    otherwise raises a bare AssertionError when it is iterated. The expected layout of its state is that of
    torchdata 0.11, `stateful_dataloader.py`.
    """
    if isinstance(loader, Batches):
        texts = loader._changed(saved if isinstance(saved, Mapping) else {}).values()
        return [f"{text}: the position belongs to another order of samples" for text in texts]
    if not _is_torchdata(loader) or not isinstance(saved, Mapping):
        return []
    now = getattr(loader, "num_workers", 0)
    then = saved["_snapshot"]["_main_snapshot"]["_num_workers"] if "_snapshot" in saved else 0
    if then == now:
        return []
    return [
        f"num_workers: was {then} and is {now} here; a StatefulDataLoader needs the same number of worker "
        "processes: give it the same num_workers, or use ray_ckpt.data.GlobalBatchSampler"
    ]


def loader_state(loader: Any) -> Any:
    """Return the state of `loader`; for a loader of torchdata, with the epoch of its DistributedSampler.

    The state of torchdata 0.11 has the number of samples that were read, and not the epoch that orders them.
    """
    state, sampler = loader.state_dict(), _epoch_sampler(loader)
    return state if sampler is None else {**state, SAMPLER_EPOCH: sampler.epoch}


def load_loader_state(loader: Any, saved: Any) -> None:
    """Load what `loader_state` returned, the epoch first: the next call of `state_dict` fixes the order."""
    sampler = _epoch_sampler(loader)
    if sampler is not None and isinstance(saved, Mapping) and SAMPLER_EPOCH in saved:
        sampler.set_epoch(saved[SAMPLER_EPOCH])
        saved = {key: value for key, value in saved.items() if key != SAMPLER_EPOCH}
    loader.load_state_dict(saved)


def _epoch_sampler(loader: Any) -> torch.utils.data.DistributedSampler[Any] | None:
    if not _is_torchdata(loader):
        return None
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    return next((s for s in samplers if isinstance(s, torch.utils.data.DistributedSampler)), None)


def is_bound_to_world_size(obj: object) -> bool:
    """Return whether a position in the state of `obj` is valid for one world size only."""
    return _is_torchdata(obj) or isinstance(obj, torch.utils.data.DistributedSampler)


def _is_torchdata(obj: object) -> bool:
    return any(kind.__module__.partition(".")[0] == "torchdata" for kind in type(obj).__mro__)
