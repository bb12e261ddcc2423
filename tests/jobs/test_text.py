"""The loader's promise: an exact resume needs to know no more than (seed, epoch, position)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from jobs.model.text import ByteLoader, as_batch, cut_blocks, read_text, split_text

NUM_BLOCKS = 50


def numbered_blocks(num_blocks: int = NUM_BLOCKS) -> Tensor:
    """Blocks of context 2 whose first byte is their index."""
    return torch.arange(num_blocks, dtype=torch.uint8)[:, None].expand(num_blocks, 3).contiguous()


def loader(batch_size: int = 4, rank: int = 0, world_size: int = 1, seed: int = 7) -> ByteLoader:
    return ByteLoader(numbered_blocks(), batch_size=batch_size, rank=rank, world_size=world_size, seed=seed)


def samples(of: ByteLoader) -> Iterator[list[int]]:
    """Block indices of each batch."""
    return (inputs[:, 0].tolist() for inputs, _ in of)


def global_samples(world_size: int, global_batch: int, count: int, skip: int = 0) -> list[int]:
    """Block indices of `count` global batches, put together from all ranks, after the first `skip`."""
    ranks = [samples(loader(global_batch // world_size, r, world_size)) for r in range(world_size)]
    batches = islice(zip(*ranks, strict=True), skip, skip + count)
    return [index for batch in batches for turn in zip(*batch, strict=True) for index in turn]


@given(world_size=st.sampled_from([2, 3, 4, 6, 12]), count=st.integers(1, 12))
def test_the_order_does_not_depend_on_the_world_size(world_size: int, count: int) -> None:
    assert global_samples(world_size, 12, count) == global_samples(1, 12, count)


def test_an_epoch_hands_out_every_sample_at_most_once_and_drops_only_the_last_partial_batch() -> None:
    first = global_samples(2, 12, 4)
    assert len(set(first)) == len(first) == NUM_BLOCKS - NUM_BLOCKS % 12
    second = global_samples(2, 12, 4, skip=4)
    assert len(set(second)) == 48
    assert second != first


def test_an_epoch_that_divides_evenly_hands_out_all() -> None:
    assert sorted(global_samples(1, 10, 5)) == list(range(NUM_BLOCKS))
    assert sorted(global_samples(1, 10, 5, skip=5)) == list(range(NUM_BLOCKS))


@given(batch_size=st.integers(1, NUM_BLOCKS), before=st.integers(0, 30), after=st.integers(1, 30))
def test_a_resumed_loader_goes_on_where_the_saved_one_stood(batch_size: int, before: int, after: int) -> None:
    whole = samples(loader(batch_size))
    saved = loader(batch_size)
    assert list(islice(samples(saved), before)) == list(islice(whole, before))
    resumed = loader(batch_size, seed=99)  # the order of the checkpoint wins
    resumed.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert list(islice(samples(resumed), after)) == list(islice(whole, after))


def test_the_state_holds_at_another_world_size() -> None:
    saved = loader(batch_size=6, rank=1, world_size=2)
    list(islice(saved, 3))
    resumed = loader(batch_size=12)
    resumed.load_state_dict(saved.state_dict())
    assert next(samples(resumed)) == global_samples(1, 12, 1, skip=3)


def test_the_state_is_the_same_on_every_rank_and_moves_as_batches_are_handed_out() -> None:
    ranks = [loader(4, rank, 2) for rank in range(2)]
    iterators = [iter(rank) for rank in ranks]
    for handed_out in range(1, 6):
        for iterator in iterators:
            next(iterator)
        assert ranks[0].state_dict() == ranks[1].state_dict()
        assert ranks[0].position == 8 * handed_out


def test_seeds_give_different_orders() -> None:
    assert next(samples(loader(seed=1))) != next(samples(loader(seed=2)))


def test_another_text_is_refused() -> None:
    other = ByteLoader(numbered_blocks(NUM_BLOCKS - 1), batch_size=4)
    with pytest.raises(ValueError, match=r"other text or --context.*--name"):
        loader().load_state_dict(other.state_dict())


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="too short: 50 samples, and a global batch takes 64"):
        loader(batch_size=32, world_size=2)


def test_too_short_a_text_is_refused() -> None:
    with pytest.raises(ValueError, match="too short: 64 bytes, and one sample takes 65"):
        cut_blocks(torch.zeros(64, dtype=torch.uint8), 64)


@given(length=st.integers(5, 300), context=st.integers(1, 4))
def test_blocks_predict_every_byte_once(length: int, context: int) -> None:
    text = torch.arange(length).to(torch.uint8)
    inputs, targets = as_batch(cut_blocks(text, context))
    used = inputs.numel()
    assert length - 1 - context < used <= length - 1
    assert torch.equal(inputs.flatten(), text[:used].long())
    assert torch.equal(targets.flatten(), text[1 : used + 1].long())


@given(length=st.integers(0, 300))
def test_the_held_out_part_is_the_rest_of_the_text(length: int) -> None:
    text = torch.arange(length)
    train, held_out = split_text(text)
    assert torch.equal(torch.cat([train, held_out]), text)
    assert len(held_out) == length // 10


def test_the_default_text_is_real_bounded_and_the_same_each_time() -> None:
    text = read_text(max_bytes=100_000)
    assert text.dtype == torch.uint8
    assert len(text) == 100_000
    assert b"import " in bytes(text.tolist())
    assert torch.equal(text, read_text(max_bytes=100_000))


def test_a_folder_is_read_in_name_order_without_hidden_files(tmp_path: Path) -> None:
    for name, content in {"b.txt": "B", "a/z.txt": "A", ".git/config": "no", "c/.hidden": "no"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert bytes(read_text(str(tmp_path)).tolist()) == b"AB"
    assert bytes(read_text(str(tmp_path / "b.txt")).tolist()) == b"B"
    assert bytes(read_text(str(tmp_path), max_bytes=1).tolist()) == b"A"


def test_a_missing_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no text at .*nowhere"):
        read_text(str(tmp_path / "nowhere"))
