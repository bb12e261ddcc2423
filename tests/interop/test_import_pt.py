"""`ray-ckpt import pt`: files of torch.save, as data and never as programs."""

from __future__ import annotations

import collections
import os
import pickle
import zipfile
from collections import Counter, OrderedDict, defaultdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ray_ckpt
from ray_ckpt.errors import ConfigError, CorruptionError, UnsupportedLeaf
from ray_ckpt.interop.importers import archive as archives
from ray_ckpt.interop.importers import unpickler
from ray_ckpt.interop.importers.torch_file import read_file
from tests.interop.imports import assert_same, imported, make, restore, trained
from tests.support.examples import every_few

PREFIXES = ("module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod.")
WRAPPERS = (lambda model: model, nn.DataParallel, torch.compile)


def saved(value: object, tmp_path: Path, name: str = "step_3.pt", **options: Any) -> Path:
    torch.save(value, tmp_path / name, **options)
    return tmp_path / name


def loaded(value: object, tmp_path: Path) -> Any:
    """Return what a run has of a value that torch.save wrote."""
    imported("pt", saved(value, tmp_path), tmp_path / "gpt")
    return ray_ckpt.open(tmp_path / "gpt").load()


def test_state_dicts_are_items_and_restore_through_a_checkpointer(tmp_path: Path) -> None:
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    states: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    document = {name: obj.state_dict() for name, obj in states.items()} | {"epoch": 4}
    found = imported("pt", saved(document, tmp_path), tmp_path / "gpt")
    assert (found["step"], found["items"]) == (3, ["model", "optimizer", "scheduler", "epoch"])
    other = make(1)
    later = torch.optim.lr_scheduler.StepLR(other[1], 5)
    restore(tmp_path / "gpt", model=other[0], optimizer=other[1], scheduler=later)
    assert_same((model, optimizer), other)
    assert later.state_dict()["step_size"] == 3


@pytest.mark.parametrize(("wrap", "prefix"), every_few(product(WRAPPERS, PREFIXES), 3))
def test_a_model_that_was_saved_in_a_wrapper_restores_into_any_module(
    tmp_path: Path, wrap: Any, prefix: str
) -> None:
    model, optimizer = trained()
    named = {f"{prefix}{name}": value for name, value in model.state_dict().items()}
    state = {"model": named, "optimizer": optimizer.state_dict()}
    imported("pt", saved(state, tmp_path), tmp_path / "gpt")
    other, other_optimizer = make(1)
    restore(tmp_path / "gpt", model=wrap(other), optimizer=other_optimizer)
    assert_same((model, optimizer), (other, other_optimizer))


def test_a_model_alone_is_the_item_model_and_anything_else_is_state(tmp_path: Path) -> None:
    model, _ = trained()
    assert loaded(model.state_dict(), tmp_path).keys() == {"model"}
    for value in ([1, 2], {"a": 1}, {"a.b": {"c": 1}}, {"rank0": {"c": 1}}, {1: {"a": 2}}, torch.ones(2)):
        found = loaded(value, tmp_path)
        assert found.keys() == {"state"}
        if isinstance(value, torch.Tensor):
            assert torch.equal(found["state"], value)
        else:
            assert found["state"] == value


def test_values_keep_their_types(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "ordered": OrderedDict(a=1, b=2),
        "counter": Counter({30: 1, 60: 2}),
        "default": defaultdict(list, a=[1]),
        "tuple": (1, 2.5, None, True, "x", b"y", b"", 1 << 70, 1j),
        "sets": [{1, 2}, frozenset({3})],
        "size": tuple(torch.Size([2, 3])),
        "dtype": torch.float16,
        "numbers": {0: "a", 1: "b"},
        "array": bytearray(b"12"),
    }
    found = loaded({"values": values}, tmp_path)["values"]
    assert found == values and [*map(type, found.values())] == [*map(type, values.values())]


def test_a_source_may_have_a_name_that_is_no_text(tmp_path: Path) -> None:
    source = saved({"model": {"w": torch.ones(1)}}, tmp_path)
    source = source.rename(tmp_path / os.fsdecode(b"a\xff_3.pt"))
    found = imported("pt", source, tmp_path / "gpt")
    assert found["imported_from"]["source"] == str(source)
    (session,) = ray_ckpt.Catalog(tmp_path / "gpt").sessions
    assert session.owner.endswith("a\N{REPLACEMENT CHARACTER}_3.pt")


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_every_protocol_is_read(protocol: int, tmp_path: Path) -> None:
    value = {"a": {"b": torch.arange(3), "c": b"1", "d": {1}, "e": bytearray(b"2")}}
    imported("pt", saved(value, tmp_path, pickle_protocol=protocol), tmp_path / "gpt")
    found = ray_ckpt.open(tmp_path / "gpt").load("a")
    assert torch.equal(found.pop("b"), torch.arange(3))
    assert found == {"c": b"1", "d": {1}, "e": b"2"}


def test_tensors_of_any_layout_and_dtype(tmp_path: Path) -> None:
    base = torch.arange(60.0).view(3, 4, 5)
    dtypes = (torch.bool, torch.uint16, torch.int8, torch.bfloat16, torch.float8_e5m2, torch.complex64)
    tensors: dict[str, Any] = {
        "turned": base.permute(2, 0, 1),
        "part": base[1:, ::2, 3],
        "wide": torch.ones(1).expand(4, 3),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(2, 0, 3),
        "parameter": nn.Parameter(torch.ones(2)),
        **{str(dtype).partition(".")[2]: torch.ones(3).to(dtype) for dtype in dtypes},
    }
    tensors["marked"] = torch.ones(3)
    tensors["marked"].note = "an attribute, which is left"
    found = loaded({"t": dict(tensors)}, tmp_path)["t"]
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].to(torch.complex64), tensor.detach().to(torch.complex64)), name


def test_one_tensor_with_several_names_is_stored_once_and_a_view_is_stored(tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    imported(
        "pt", saved({"m": {"a": weight, "b": weight.detach(), "c": weight[:3]}}, tmp_path), tmp_path / "gpt"
    )
    run = ray_ckpt.open(tmp_path / "gpt")
    assert [*run.catalog[3]] == ["m.a", "m.c"]
    state = run.load("m")
    assert torch.equal(state["b"], weight) and torch.equal(state["c"], weight[:3])


def test_arrays_of_numpy_are_kept(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "scalar": np.float64(0.25),
        "flag": np.bool_(True),
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "turned": np.arange(6.0).reshape(2, 3).T,
        "empty": np.zeros((0, 2), np.int8),
        "scalars": np.array(3, np.int16),
    }
    random: Any = np.random.RandomState(1).get_state()
    found = loaded({"values": {**values, "random": random}}, tmp_path)["values"]
    for name, value in values.items():
        assert type(found[name]) is type(value) and found[name].dtype == value.dtype
        assert np.array_equal(found[name], value)
    kind, keys, *_ = found["random"]
    assert kind == "MT19937" and np.array_equal(keys, random[1])
    for bad in (np.array(["a"]), np.array([1], ">i4")):
        with pytest.raises(UnsupportedLeaf, match=r"a\.b is a numpy"):
            read_file(saved({"a": {"b": bad}}, tmp_path))


# -- what is refused -----------------------------------------------------------------------------------


def test_tensors_of_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    dense = torch.eye(2)
    with pytest.warns(UserWarning, match="."):
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    refused = {
        "a sparse tensor": dense.to_sparse(),
        "without memory": torch.ones(2, device="meta"),
        "a quantized tensor": quantized,
        "a tensor of torch.complex128": torch.ones(2, dtype=torch.complex128),
        "conjugated": torch.ones(2, dtype=torch.complex64).conj(),
        "is a torch.device": torch.device("cpu"),
        "is the name torch.complex128": torch.complex128,
        "has a key that is float": {1.5: 2},
    }
    for message, value in refused.items():
        with pytest.raises(UnsupportedLeaf, match=rf"step_3\.pt: model\.layer\.w .*{message}"):
            imported("pt", saved({"model": {"layer": {"w": value}}}, tmp_path), tmp_path / "gpt")
    assert not (tmp_path / "gpt").exists()


def test_names_joined_with_dots_must_differ(tmp_path: Path) -> None:
    value = {"m": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}}
    with pytest.raises(UnsupportedLeaf, match=r"Two tensors would be stored under the name m\.a\.b"):
        imported("pt", saved(value, tmp_path), tmp_path / "gpt")


class Evil:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


class Mine(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Evil(os.system, "touch /tmp/evil"), r"posix\.system"),
        (Evil(eval, "1"), r"builtins\.eval"),
        (Evil(getattr, "1", "real"), r"builtins\.getattr"),
        (nn.Linear(1, 1), r"torch\.nn\.modules\.linear\.Linear"),
        (torch.ones(2).as_subclass(Mine), r"tests\.interop\.test_import_pt\.Mine"),
        (np.polynomial.Polynomial([1]), r"numpy\.polynomial\.polynomial\.Polynomial"),
        (collections.deque([1]), r"collections\.deque"),
        (torch.Generator, r"torch\._C\.Generator"),
    ],
)
def test_names_outside_the_list_are_refused_and_not_run(value: object, name: str, tmp_path: Path) -> None:
    source = saved({"model": {"w": value}}, tmp_path)
    with pytest.raises(ConfigError, match=rf"has {name}\S*, which is not on the list"):
        imported("pt", source, tmp_path / "gpt")
    assert not (tmp_path / "gpt").exists() and not Path("/tmp/evil").exists()


def rewritten(path: Path, change: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    """Replace records of an archive."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    root = next(iter(records)).partition("/")[0]
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in {**records, **{f"{root}/{key}": data for key, data in change.items()}}.items():
            archive.writestr(name, data)
    return path


def program(*lines: bytes) -> bytes:
    return b"\x80\x02" + b"".join(lines) + b"."


HOSTILE = {
    "a class is changed": program(b"ctorch\nTensor\n", b"N}U\x04kindU\x01xs\x86b"),
    "an instance is changed": program(b"ctorch\nTensor\n)R", b"N}U\x04kindU\x01xs\x86b"),
    "a tensor of junk": program(b"ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x02K\x03K\x04tR"),
    "a parameter of nothing": program(b"ctorch._utils\n_rebuild_parameter\n)R"),
    "a storage of junk": program(b"ctorch._utils\n_rebuild_tensor_v2\n((U\x01atQK\x00)))\x89NtR"),
    "no pickle": b"hello",
    "nothing": b"",
    "a list in itself": program(b"]q\x00h\x00a"),
    "a missing memo": program(b"h\x07"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_pickle_is_only_data(name: str, tmp_path: Path) -> None:
    source = rewritten(saved([1], tmp_path), {"data.pkl": HOSTILE[name]})
    with pytest.raises((CorruptionError, UnsupportedLeaf)):
        read_file(source)
    assert unpickler.Foreign.kind == "" and unpickler.Foreign.__slots__ == ("args", "entries", "state")


def test_shared_lists_do_not_multiply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value: list[Any] = [1] * 10
    for _ in range(20):
        value = [value] * 10
    monkeypatch.setattr("ray_ckpt.interop.importers.values.MAX_VALUES", 1000)
    with pytest.raises(UnsupportedLeaf, match="has more than 1000 values"):
        read_file(saved(value, tmp_path))
    monkeypatch.setattr("ray_ckpt.interop.importers.values.MAX_VALUES_BYTES", 10_000)
    for shared in ("x" * 1000, b"x" * 1000, frozenset(range(100)), np.zeros(1000, np.uint8), 1 << 8000):
        with pytest.raises(UnsupportedLeaf, match="is beyond 10000 bytes of values"):
            read_file(saved([shared] * 20, tmp_path))


def test_damaged_archives_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved({"model": {"w": torch.arange(100_000.0)}}, tmp_path)
    whole = source.read_bytes()
    for size in (0, 3, 100, 5_000, len(whole) - 1):
        source.write_bytes(whole[:size])
        with pytest.raises(CorruptionError, match=r"step_3\.pt is (damaged|cut short)"):
            read_file(source)
    source.write_bytes(
        whole.replace(b"archive/data/0", b"archive/data/9").replace(b"step_3/data/0", b"step_3/data/9")
    )
    with pytest.raises(CorruptionError, match="has no record data/0"):
        read_file(source)
    source.write_bytes(whole)
    rewritten(source, {"data/0": b"1234"})
    with pytest.raises(CorruptionError, match="a tensor is larger than its storage"):
        read_file(source)
    rewritten(source, {"byteorder": b"big"})
    with pytest.raises(ConfigError, match="byte order b'big'"):
        read_file(source)
    monkeypatch.setattr(archives, "MAX_DATA_BYTES", 10)
    with pytest.raises(ConfigError, match=r"at most 10 are read"):
        read_file(saved(["a long text"], tmp_path))
    monkeypatch.setattr(archives, "MAX_LIST_BYTES", 10)
    with pytest.raises(CorruptionError, match="list of records is too long"):
        read_file(source)


def test_old_and_compressed_files_are_refused_with_a_remedy(tmp_path: Path) -> None:
    old = saved({"a": 1}, tmp_path, _use_new_zipfile_serialization=False)
    with pytest.raises(ConfigError, match=r"before torch 1\.6\. Load it with torch\.load and save it again"):
        read_file(old)
    source = rewritten(saved({"a": 1}, tmp_path), {}, zipfile.ZIP_DEFLATED)
    with pytest.raises(ConfigError, match="compressed archive"):
        read_file(source)
    with pytest.raises(ConfigError, match="is a folder"):
        read_file(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        read_file(tmp_path / "no.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ConfigError, match="is no archive"):
        read_file(tmp_path / "plain.pt")
