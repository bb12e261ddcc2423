"""Requests to S3 of the libraries that write checkpoints: obstore, s3fs and Ray Train's pyarrow."""

from __future__ import annotations

import io
import random
from pathlib import Path

import obstore
import pyarrow.fs
import pytest
import s3fs
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import S3Store

from tests.servers.strict_store import StrictStore

_BODY = random.Random(8).randbytes((11 << 20) + 3)


@pytest.fixture
def rust(store: StrictStore, bucket: str) -> S3Store:
    return S3Store(
        bucket,
        endpoint=store.endpoint,
        access_key_id="strict",
        secret_access_key="strict-secret",
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )


def test_obstore(rust: S3Store, store: StrictStore, bucket: str) -> None:
    first = obstore.put(rust, "a b/k+ü", b"1", mode="create")
    with pytest.raises(AlreadyExistsError):
        obstore.put(rust, "a b/k+ü", b"2", mode="create")
    obstore.put(rust, "a b/k+ü", b"3", mode={"e_tag": first["e_tag"]})
    with pytest.raises(PreconditionError):
        obstore.put(rust, "a b/k+ü", b"4", mode={"e_tag": first["e_tag"]})
    obstore.put(rust, "big", io.BytesIO(_BODY), chunk_size=5 << 20, use_multipart=True)
    assert bytes(obstore.get(rust, "big").bytes()) == _BODY
    ranges = obstore.get_ranges(rust, "big", starts=[0, 9 << 20], lengths=[3, 9])
    assert [bytes(piece) for piece in ranges] == [_BODY[:3], _BODY[9 << 20 : (9 << 20) + 9]]
    assert sorted(meta["path"] for page in obstore.list(rust) for meta in page) == ["a b/k+ü", "big"]
    obstore.copy(rust, "big", "c")
    obstore.delete(rust, ["big", "a b/k+ü", "c"])
    assert (store.keys(bucket), store.uploads(bucket)) == ([], [])


def test_s3fs(store: StrictStore, bucket: str, tmp_path: Path) -> None:
    files = s3fs.S3FileSystem(
        key="strict",
        secret="strict-secret",
        endpoint_url=store.endpoint,
        client_kwargs={"region_name": "us-east-1"},
        skip_instance_cache=True,
    )
    files.pipe_file(f"{bucket}/a", b"1", mode="create")
    with pytest.raises(FileExistsError):
        files.pipe_file(f"{bucket}/a", b"2", mode="create")
    (tmp_path / "f").write_bytes(_BODY)
    files.put_file(str(tmp_path / "f"), f"{bucket}/dir/b", chunksize=5 << 20)
    files.get_file(f"{bucket}/dir/b", str(tmp_path / "g"))
    assert (tmp_path / "g").read_bytes() == _BODY
    assert sorted(files.ls(bucket, detail=False)) == [f"{bucket}/a", f"{bucket}/dir"]
    files.rm(f"{bucket}/dir", recursive=True)
    assert (store.keys(bucket), store.uploads(bucket)) == (["a"], [])


def test_pyarrow(store: StrictStore, bucket: str) -> None:
    files = pyarrow.fs.S3FileSystem(
        access_key="strict",
        secret_key="strict-secret",
        endpoint_override=store.endpoint,
        region="us-east-1",
    )
    files.create_dir(f"{bucket}/run/ckpt")
    with files.open_output_stream(f"{bucket}/run/ckpt/big") as out:
        out.write(_BODY)
    with files.open_output_stream(f"{bucket}/run/ckpt/small") as out:
        out.write(b"x")
    found = files.get_file_info(pyarrow.fs.FileSelector(f"{bucket}/run", recursive=True))
    sizes = {info.path: info.size for info in found if info.is_file}
    assert sizes == {f"{bucket}/run/ckpt/big": len(_BODY), f"{bucket}/run/ckpt/small": 1}
    assert files.get_file_info(f"{bucket}/run").type == pyarrow.fs.FileType.Directory
    assert files.get_file_info(f"{bucket}/no").type == pyarrow.fs.FileType.NotFound
    with files.open_input_file(f"{bucket}/run/ckpt/big") as source:
        source.seek(7)
        assert source.read() == _BODY[7:]
    files.delete_dir(f"{bucket}/run")
    assert (store.keys(bucket), store.uploads(bucket)) == ([], [])
