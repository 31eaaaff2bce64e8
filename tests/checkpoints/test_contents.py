"""A checkpoint that loading refuses is not called complete, and costs little."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.checkpoint.__main__ import main
from lm.checkpoint.contents import load_weights, read_tensors, verify
from lm.checkpoint.headers import full_shape
from lm.checkpoint.manifest import MANIFEST, CheckpointError, read_manifest
from lm.checkpoint.tensor_files import torch_dtype, write_tensors
from lm.errors import ConfigError
from lm.hf.base import open_model
from lm.hf.export import export_model
from lm.shards import Rows
from lm.storage.folder import record
from model import ModelConfig, Transformer
from tests.support.checkpoints import (
    OPTIM_SHARDS,
    SHARDS,
    WEIGHTS_FILE,
    forge_manifest,
    rewrite_header,
    write_checkpoint,
)

TENSOR = "embedding.tokens.weight"
"""Of shape (300, 32)."""
MOMENT = f"{TENSOR}.exp_avg"
SCALER_FILE = "scaler-00000-00000.safetensors"

Forge = Callable[[Path], None]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A complete checkpoint of a run."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    folder = write_checkpoint(tmp_path / "run" / "checkpoints" / "saved")
    assert main(["verify", str(folder)]) == 0
    load(folder)
    return folder


def load(folder: Path) -> None:
    manifest = read_manifest(folder)
    verify(folder, manifest)
    model = Transformer(ModelConfig.model_validate(manifest.model))
    load_weights(folder, model.state_dict())


def seal(folder: Path, **changes: Any) -> None:
    """Write a manifest that lists all files of tensors, with matching checksums."""
    names = [path.name for path in folder.glob("*.safetensors")]
    files = {name: record(folder / name).model_dump() for name in names}
    forge_manifest(folder, **{"files": files} | changes)


def forge_header(file: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Forge:
    """Replace the header of `file` by `change(header)`."""

    def forge(folder: Path) -> None:
        rewrite_header(folder / file, change)
        seal(folder)

    return forge


def entry(file: str, name: str, **changes: Any) -> Forge:
    """Change what a header says of a tensor; None = it no longer lists the tensor."""

    def change(header: dict[str, Any]) -> dict[str, Any]:
        header[name] |= changes
        return header

    return forge_header(file, change)


def rename(file: str, old: str, new: str) -> Forge:
    """Give a tensor another name in a header."""

    def change(header: dict[str, Any]) -> dict[str, Any]:
        sharding = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        header[new] = header.pop(old)
        sharding[new] = sharding[old]
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(sharding)
        return header

    return forge_header(file, change)


def moved(file: str, name: str, offsets: list[int]) -> Forge:
    """Let a slice start elsewhere in its tensor."""

    def change(header: dict[str, Any]) -> dict[str, Any]:
        sharding = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        sharding[name]["saved_offsets"] = offsets
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(sharding)
        return header

    return forge_header(file, change)


def added(file: str, name: str, tensor: torch.Tensor, start: int) -> Forge:
    """Add a file with a slice."""

    def forge(folder: Path) -> None:
        write_tensors(folder / file, {name: Rows(tensor, start)})
        seal(folder)

    return forge


def without(*names: str) -> Forge:
    def forge(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()
        seal(folder)

    return forge


def copied(folder: Path) -> None:
    shutil.copy(folder / SHARDS[0], folder / SHARDS[1])
    seal(folder)


def replaced(file: str, content: bytes) -> Forge:
    def forge(folder: Path) -> None:
        size = (folder / file).stat().st_size
        (folder / file).write_bytes(content.ljust(size, b" "))
        seal(folder)

    return forge


def ends_with(file: str, value: float) -> Forge:
    def forge(folder: Path) -> None:
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(content[:-4] + struct.pack("<f", value))
        seal(folder)

    return forge


def promised(**changes: Any) -> Forge:
    return lambda folder: seal(folder, **changes)


def of_model(**changes: Any) -> Forge:
    def forge(folder: Path) -> None:
        seal(folder, model=json.loads((folder / MANIFEST).read_text())["model"] | changes)

    return forge


BASE = {"source": "base", "files": {"model.safetensors": {"bytes": 1 << 30, "crc32c": 1}}}
ADAPTERS = {"lora_rank": 2, "lora_alpha": 4.0, "lora_dropout": 0.0, "lora_targets": None}
HALF = 150 * 32 * 4
DAMAGED: dict[str, tuple[Forge, str]] = {
    "a gap": (moved(WEIGHTS_FILE, TENSOR, [1, 0]), f"model.{TENSOR} is not covered exactly once"),
    "an overlap": (
        added(SHARDS[1], TENSOR, torch.ones(1, 32), 299),
        f"model.{TENSOR} is not covered exactly once",
    ),
    "a slice after the end": (
        added(SHARDS[1], TENSOR, torch.ones(1, 32), 300),
        rf"model.{TENSOR} is \[301, 32\]",
    ),
    "all slices twice": (copied, "is not covered exactly once"),
    "columns": (moved(WEIGHTS_FILE, TENSOR, [0, 1]), "damaged header: embedding"),
    "fewer rows": (
        entry(WEIGHTS_FILE, TENSOR, shape=[150, 32], data_offsets=[0, HALF]),
        "damaged header: invalid offset for tensor",
    ),
    "another shape": (
        entry(WEIGHTS_FILE, TENSOR, shape=[150, 64]),
        rf"model.{TENSOR} is \[150, 64\]",
    ),
    "another dtype": (entry(WEIGHTS_FILE, TENSOR, dtype="I32"), f"model.{TENSOR} is .*int32"),
    "another name": (
        rename(WEIGHTS_FILE, TENSOR, "x"),
        f"model.{TENSOR} is missing in the files, and 1 more",
    ),
    "an unknown tensor": (
        added(SHARDS[1], "x", torch.ones(1, 32), 0),
        "model.x is not in the manifest",
    ),
    "no weights": (without(SHARDS[0]), "whose model files need .* have 0"),
    "no files": (promised(files={}), "whose model files need .* have 0"),
    "a header that is no JSON": (
        replaced(WEIGHTS_FILE, struct.pack("<Q", 8) + b"no JSON!"),
        f"{WEIGHTS_FILE}: damaged header",
    ),
    "a tensor beyond its file": (
        entry(WEIGHTS_FILE, TENSOR, data_offsets=[1 << 30, (1 << 30) + 2 * HALF]),
        f"{WEIGHTS_FILE}: damaged header",
    ),
    "no optimizer state": (without(OPTIM_SHARDS[0]), "optim.* is missing in the files, and"),
    "another moment": (rename(OPTIM_SHARDS[0], MOMENT, "x"), f"optim.{MOMENT} is missing"),
    "a moment of another dtype": (
        entry(OPTIM_SHARDS[0], MOMENT, dtype="I32"),
        f"optim.{MOMENT} is .*int32",
    ),
    "a tensor that the manifest does not list": (
        added(SCALER_FILE, "scale", torch.ones(()), 0),
        "scaler.scale is not in the manifest",
    ),
    "more layers": (of_model(n_layers=3), "whose model files need"),
    "adapters without a rank": (promised(base=BASE), "hyperparameters.lora_rank: null"),
    "adapters of an unknown layer": (
        promised(base=BASE, hyperparameters=ADAPTERS | {"lora_targets": ["x"]}),
        "hyperparameters.lora_targets: .*no layer x",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_verify_refuses_what_loading_refuses(
    case: str, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge, expected = DAMAGED[case]
    forge(saved)
    with pytest.raises(CheckpointError, match=expected) as refused:
        load(saved)
    (line,) = refused.value.problems
    capsys.readouterr()
    assert main(["verify", str(saved)]) == 1
    assert capsys.readouterr().err == f"{line}\n"
    is_seen_without_values = "checksum" not in line
    assert main(["list", str(saved.parent.parent)]) == is_seen_without_values
    if is_seen_without_values:
        assert capsys.readouterr().out == f"saved  not complete: {line}\n"


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("file", [WEIGHTS_FILE, OPTIM_SHARDS[0]])
def test_values_that_are_not_finite_are_not_loaded(file: str, value: str, saved: Path) -> None:
    ends_with(file, float(value))(saved)
    found = verify(saved, read_manifest(saved))
    state: dict[str, dict[str, torch.Tensor]] = {}
    for part, tensors in found.items():
        state[part] = {}
        for name, slices in tensors.items():
            shape = full_shape(slices)
            assert shape is not None
            state[part][name] = torch.empty(shape, dtype=torch_dtype(slices[0]))
    with pytest.raises(CheckpointError, match=f"{file}: contains inf or NaN"):
        read_tensors(found, state)


def deleted(folder: Path) -> None:
    (folder / OPTIM_SHARDS[0]).unlink()


def truncated(folder: Path) -> None:
    os.truncate(folder / OPTIM_SHARDS[0], 1000)


def flipped(folder: Path) -> None:
    file = folder / OPTIM_SHARDS[0]
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize("damage", [deleted, truncated, flipped])
def test_weights_are_enough_for_what_needs_weights(
    damage: Forge, saved: Path, tmp_path: Path
) -> None:
    expected, _ = open_model(saved)
    damage(saved)
    for source in (saved, saved.parent.parent):
        found, _ = open_model(source)
        assert found.state_dict().keys() == expected.state_dict().keys()
        for name, tensor in found.state_dict().items():
            assert tensor.equal(expected.state_dict()[name])
    export_model(saved, tmp_path / "out")


def test_list_and_verify_say_what_weights_without_an_optimizer_are_good_for(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deleted(saved)
    run = saved.parent.parent
    for command in (["list", str(run)], ["verify", str(run)], ["verify", str(saved)]):
        capsys.readouterr()
        assert main(command) == 1
        printed = "".join(capsys.readouterr())
        assert f"{saved / OPTIM_SHARDS[0]}: missing" in printed
        assert f"init_from={saved} " in printed
    (saved / WEIGHTS_FILE).unlink()
    assert main(["verify", str(run)]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("saved  not complete: ")
    assert "init_from" not in printed


@pytest.mark.parametrize("change", [{"n_layers": 1}, {"d_ff": 64}])
def test_weights_of_another_model_than_the_manifests_are_refused(
    change: dict[str, Any], saved: Path
) -> None:
    of_model(**change)(saved)
    with pytest.raises(ConfigError, match=r"differ from the model's:\nmodel\.blocks\."):
        load(saved)
