"""Sharded safetensors are read back on any layout, and refused in one line if hostile."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lm.checkpoint.headers import DTYPES, TensorSlice, full_shape, read_headers
from lm.checkpoint.manifest import CheckpointError
from lm.checkpoint.tensor_files import Source, group_by_size, owned_rows, read_into, write_tensors
from lm.errors import RunError
from lm.fileio import crc32c
from lm.runtime.world import World
from tests.support.ranks import run_ranks

STATE = {
    "model.a": torch.arange(35.0).view(7, 5),
    "model.b": torch.arange(6.0, dtype=torch.bfloat16),
    "optim.a.step": torch.tensor(3.0),
    "model.one": torch.arange(4.0).view(1, 4),
}


def write(folder: Path, state: dict[str, torch.Tensor], rank: int = 0, world_size: int = 1) -> None:
    slices = owned_rows(state, rank, world_size)
    for number, names in enumerate(group_by_size(slices)):
        path = folder / f"part-{rank}-{number}.safetensors"
        checksum = write_tensors(path, {name: slices[name] for name in names})
        assert checksum == crc32c(path)


def check(folder: Path, state: dict[str, torch.Tensor]) -> None:
    found = read_headers(sorted(folder.glob("*.safetensors")))
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert full_shape(found[name]) == tensor.shape
        read = torch.zeros_like(tensor)
        read_into(read, Source(found[name]))
        assert read.equal(tensor)


ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@ALONE
def test_write_tensors_is_read_by_pytorch_and_safetensors(tmp_path: Path) -> None:
    write(tmp_path, STATE)
    check(tmp_path, STATE)
    (path,) = tmp_path.iterdir()
    assert all(tensor.equal(STATE[name]) for name, tensor in load_file(path).items())
    read = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    dcp.load(read, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert all(read[name].equal(tensor) for name, tensor in STATE.items())


def test_headers_of_many_tensors_are_read(tmp_path: Path) -> None:
    state = {f"{number:0300}": torch.zeros(1) for number in range(20_000)}
    write(tmp_path, state)
    assert read_headers(sorted(tmp_path.iterdir())).keys() == state.keys()


@ALONE
def test_read_headers_of_pytorchs_sharded_files(tmp_path: Path) -> None:
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    dcp.save(dict(STATE), storage_writer=writer, no_dist=True)
    check(tmp_path, STATE)


LAYOUTS = {"1x2": (1, 2), "2x1": (2, 1), "2x2": (2, 2), "1x3": (1, 3)}


def write_sharded(world: World, folder: Path, layout: tuple[int, int]) -> None:
    mesh = init_device_mesh("cpu", layout, mesh_dim_names=("replicate", "shard"))
    state = {
        name: distribute_tensor(tensor, mesh, [Replicate(), Shard(0)]) if tensor.dim() else tensor
        for name, tensor in STATE.items()
    }
    write(folder, state, world.rank, world.size)
    world.all_gather_object(None)
    for name, tensor in state.items():
        tensor_files = read_headers(sorted(folder.glob("*.safetensors")))
        read = torch.zeros_like(tensor)
        read_into(read, Source(tensor_files[name]))
        assert (read.full_tensor() if tensor.dim() else read).equal(STATE[name])  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_write_tensors_writes_each_slice_once(layout: str, tmp_path: Path) -> None:
    replicate, shard = LAYOUTS[layout]
    run_ranks(replicate * shard, write_sharded, tmp_path, LAYOUTS[layout])
    check(tmp_path, STATE)
    values = sum(
        tensor.numel() for path in tmp_path.iterdir() for tensor in load_file(path).values()
    )
    assert values == sum(tensor.numel() for tensor in STATE.values())


def test_read_rows_of_fused_tensors(tmp_path: Path) -> None:
    stored = torch.arange(60.0, dtype=torch.float16).view(6, 10)
    save_file({"fused": stored}, tmp_path / "model.safetensors")
    slices = read_headers([tmp_path / "model.safetensors"])["fused"]
    rows = torch.zeros(2, 10)
    read_into(rows, Source(slices, start=3))
    assert rows.equal(stored[3:5].float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_are_read_in_blocks_into_any_memory(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into the tensor itself where it is stored alike, else by way of a buffer."""
    monkeypatch.setattr("lm.checkpoint.tensor_files.READ_BYTES", 100)
    stored = torch.arange(210.0).view(21, 10)  # in 11 blocks of two rows
    save_file({"values": stored}, tmp_path / "model.safetensors")
    source = Source(read_headers([tmp_path / "model.safetensors"])["values"], start=4)
    rows = torch.zeros(15, 10, dtype=dtype)
    columns = torch.zeros(10, 15, dtype=dtype).T
    for target in (rows, columns):
        read_into(target, source)
        assert target.equal(stored[4:19].to(dtype))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_full_shape_needs_slices_that_cover_once(rows: list[int], data: Any) -> None:
    slices = [
        TensorSlice(Path(), 0, DTYPES["F32"], (n, 5), sum(rows[:i])) for i, n in enumerate(rows)
    ]
    assert full_shape(data.draw(st.permutations(slices))) == (sum(rows), 5)
    victim = data.draw(st.sampled_from(slices))
    others = [piece for piece in slices if piece is not victim]
    assert full_shape([*slices, victim]) is None
    if others:
        assert full_shape(others) != (sum(rows), 5)
        for change in (
            {"start": victim.start + 1},
            {"dtype": torch.int32},
            {"shape": (victim.n_rows, 4)},
        ):
            assert full_shape([*others, victim._replace(**change)]) is None


def with_header(
    path: Path, header: bytes, data: bytes = bytes(64), length: int | None = None
) -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


ENTRY = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
HOSTILE: dict[str, bytes | dict[str, Any]] = {
    "a size of 2^60": {"a": ENTRY | {"shape": [2**60]}},
    "sizes whose product overflows": {"a": ENTRY | {"shape": [2**40, 2**40]}},
    "a negative offset": {"a": ENTRY | {"data_offsets": [-16, 0]}},
    "an end before its begin": {"a": ENTRY | {"data_offsets": [16, 0]}},
    "an end beyond the file": {"a": ENTRY | {"data_offsets": [56, 72]}},
    "overlapping tensors": {"a": ENTRY, "b": ENTRY | {"data_offsets": [8, 24]}},
    "bytes between tensors": {"a": ENTRY, "b": ENTRY | {"data_offsets": [48, 64]}},
    "bytes before a tensor": {"a": ENTRY | {"data_offsets": [48, 64]}},
    "bytes after the tensors": {"a": ENTRY},
    "a name given twice": b'{"a": %b, "a": %b}' % ((json.dumps(ENTRY).encode(),) * 2),
    "an unknown dtype": {"a": ENTRY | {"dtype": "F8"}},
    "a float as a size": {"a": ENTRY | {"shape": [4.0]}},
    "no entry": {"a": None},
    "metadata that are text": {"__metadata__": "DCP_SHARDING_INFO", "a": ENTRY},
    "sharding of another tensor": {
        "__metadata__": {"DCP_SHARDING_INFO": '{"b": {"saved_offsets": [0]}}'},
        "a": ENTRY,
    },
    "sharding without offsets": {
        "__metadata__": {"DCP_SHARDING_INFO": '{"a": {}}'},
        "a": ENTRY,
    },
    "a list": b"[]",
    "no JSON": b"\xff{",
    "deep nesting": b"[" * 100_000,
    "sharding that is no mapping": {"__metadata__": {"DCP_SHARDING_INFO": "[1]"}, "a": ENTRY},
    "offsets of another rank": {
        "__metadata__": {"DCP_SHARDING_INFO": '{"a": {"saved_offsets": [0, 0]}}'},
        "a": ENTRY,
    },
    "columns": {
        "__metadata__": {"DCP_SHARDING_INFO": '{"a": {"saved_offsets": [0, 2]}}'},
        "a": ENTRY | {"shape": [2, 2]},
    },
    "a name of a megabyte": {"a" * 2**20: ENTRY | {"dtype": "F8"}},
}


@pytest.mark.parametrize("case", [*HOSTILE, 2**40, 2**64 - 1])
def test_read_headers_refuses_a_hostile_header(case: str | int, tmp_path: Path) -> None:
    content = HOSTILE[case] if isinstance(case, str) else b"{}"
    header = content if isinstance(content, bytes) else json.dumps(content).encode()
    path = with_header(
        tmp_path / "x.safetensors", header, length=case if isinstance(case, int) else None
    )
    with pytest.raises(CheckpointError) as refused:
        read_headers([path])
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not re.search("Error|unpack|subscript", str(refused.value))
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "header too small"),
        (b"{}", "header too small"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", "`git lfs pull`"),
        (save({"a": torch.zeros(2)}) + b"\0" * 1000, "longer than its tensors"),
    ],
)
def test_read_headers_says_what_is_no_safetensors_file(
    content: bytes, part: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(SafetensorError):
        load_file(path)
    with pytest.raises(RunError, match=re.escape(part)):
        read_headers([path])


def test_read_headers_refuses_100_mb_at_once(tmp_path: Path) -> None:
    path = with_header(tmp_path / "x.safetensors", b"[" + b"[]," * 33_000_000 + b"0]")
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(CheckpointError):
        read_headers([path])
    assert time.process_time() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def test_read_headers_opens_no_links_or_fifos(tmp_path: Path) -> None:
    write(tmp_path, STATE)
    (tmp_path / "link").symlink_to(next(tmp_path.glob("*.safetensors")))
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo"):
        with pytest.raises(CheckpointError, match=name):
            read_headers([tmp_path / name])


@given(st.integers(0, 10**9))
def test_read_headers_of_random_damage(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    write(folder, STATE)
    (path,) = folder.iterdir()
    content, draw = bytearray(path.read_bytes()), random.Random(seed)
    for _ in range(draw.randint(1, 4)):
        content[draw.randrange(len(content))] = draw.randrange(256)
    path.write_bytes(content[: draw.randint(0, len(content))] if draw.random() < 0.3 else content)
    with contextlib.suppress(CheckpointError):
        for name, slices in read_headers([path]).items():
            if name in STATE and full_shape(slices) == STATE[name].shape:
                read_into(torch.zeros_like(STATE[name]), Source(slices))
