"""No damaged checkpoint passes for a complete one, and no malicious one runs code."""

from __future__ import annotations

import ast
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.checkpoint.contents import load_weights, verify
from lm.checkpoint.locate import find_checkpoint
from lm.checkpoint.location import Location
from lm.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    read_manifest,
    write_manifest,
)
from lm.checkpoint.store import LocalCheckpoints, SavedCheckpoint, expired
from lm.errors import ConfigError, RunError
from lm.resume import ResumePlan, find_complete
from lm.runtime.world import World
from model import Transformer
from tests.support import REPOSITORY
from tests.support.checkpoints import (
    OPTIM_SHARDS,
    RUN_INFO,
    SHARDS,
    forge_manifest,
    open_checkpointer,
    save_toy,
    toy_model,
    write_checkpoint,
)
from tests.support.ranks import run_ranks


def save_steps(world: World, folder: Path, steps: list[int]) -> list[str]:
    with open_checkpointer(world, folder, keep_checkpoints=None) as checkpointer:
        return [save_toy(checkpointer, world, step) for step in steps]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of steps 5 and 10, each written by two ranks."""
    folder = tmp_path_factory.mktemp("checkpoints")
    first, _ = run_ranks(2, save_steps, folder, [5, 10])
    return [folder / name for name in first]


@pytest.fixture
def victim(saved: list[Path], tmp_path: Path) -> Path:
    """A copy of the checkpoint of step 10."""
    return Path(shutil.copytree(saved[1], tmp_path / "victim"))


def files(folder: Path) -> dict[str, bytes]:
    names = [*read_manifest(folder).files, MANIFEST]
    return {name: (folder / name).read_bytes() for name in sorted(names)}


def load(folder: Path, model: Transformer) -> None:
    verify(folder, read_manifest(folder))
    load_weights(folder, model.state_dict())


def refusal(folder: Path) -> str:
    """Why `folder` is not loaded; asserts that nothing was read from it."""
    model = toy_model(-1)
    with pytest.raises(CheckpointError) as refused:
        load(folder, model)
    assert all(bool((parameter == -1).all()) for parameter in model.parameters())
    return str(refused.value)


def test_load_weights_equal_the_saved_state(saved: list[Path]) -> None:
    for folder, step in zip(saved, (5, 10), strict=True):
        assert sorted(files(folder)) == ["manifest.json", *SHARDS, *OPTIM_SHARDS]
        model = toy_model(-1)
        load_weights(folder, model.state_dict())
        assert all(bool((parameter == step).all()) for parameter in model.parameters())


def test_load_refuses_a_thousand_corruptions(saved: list[Path], victim: Path) -> None:
    good, other_step, draw, n_refused = files(victim), files(saved[0]), random.Random(1), 0
    while n_refused < 1000:
        name = draw.choice([*good])
        content = good[name]
        start, end = sorted(draw.choices(range(len(content)), k=2))
        kinds = {
            "flip": content[:start]
            + bytes([content[start] ^ 1 << draw.randrange(8)])
            + content[start + 1 :],
            "truncate": content[:start],
            "zero": content[:start] + bytes(end - start) + content[end:],
            "swap": good[draw.choice([*good])],
            "mix": other_step[name],
        }
        kind = draw.choice(["flip"] * 5 + [*kinds])
        if kinds[kind] != content:
            (victim / name).write_bytes(kinds[kind])
            # A manifest of another step is intact: the shards differ from what it lists.
            message, suspects = refusal(victim), good if kind == "mix" else [name]
            assert any(str(victim / suspect) in message for suspect in suspects), kind
            (victim / name).write_bytes(content)
            n_refused += 1
    load_weights(victim, toy_model(-1).state_dict())


@pytest.mark.slow
def test_read_manifest_finds_any_flipped_bit(victim: Path) -> None:
    text = (victim / MANIFEST).read_bytes()
    for position in range(len(text)):
        changed = bytearray(text)
        changed[position] ^= 1 << position % 8
        (victim / MANIFEST).write_bytes(changed)
        with pytest.raises(CheckpointError, match=MANIFEST):
            read_manifest(victim)


@pytest.mark.parametrize("version", [2, 4])
def test_read_manifest_refuses_another_format(version: int, victim: Path) -> None:
    forge_manifest(victim, format=version, another_key={})
    with pytest.raises(
        ConfigError, match=f"format {version}, .*format 3;"
    ):  # not CheckpointError, after which an older one would be loaded
        read_manifest(victim)


@pytest.mark.parametrize("name", [*SHARDS, *OPTIM_SHARDS])
def test_load_names_a_missing_file(name: str, victim: Path) -> None:
    (victim / name).unlink()
    assert refusal(victim).startswith(f"{victim / name}: ")


def test_load_refuses_a_directory_without_a_manifest(victim: Path) -> None:
    (victim / MANIFEST).unlink()
    assert refusal(victim).endswith(f"{MANIFEST}: missing")


def test_manifest_that_is_too_long_to_be_read_is_not_written(victim: Path) -> None:
    manifest = read_manifest(victim)
    (victim / MANIFEST).unlink()
    tensors = {f"optim.{number:0200}.exp_avg": "[64] torch.float32" for number in range(40_000)}
    with pytest.raises(RunError, match="40,000 tensors"):
        write_manifest(victim, manifest.model_copy(update={"tensors": tensors}))
    assert not (victim / MANIFEST).exists()


def test_find_checkpoint_finds_the_newest_complete_one(
    saved: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    for number, path in enumerate([saved[1], saved[0], saved[0]]):
        shutil.copytree(path, checkpoints / f"{number}")
        manifest = read_manifest(path)
        write_manifest(
            checkpoints / f"{number}", manifest.model_copy(update={"time": 1000.0 + number})
        )
    (checkpoints / "2" / SHARDS[0]).unlink()
    (checkpoints / ".x.deleted-12345678").mkdir()
    assert find_checkpoint(tmp_path) == checkpoints / "1"
    assert capsys.readouterr().err.startswith(f"skipping {checkpoints}/2/{SHARDS[0]}: missing")


def test_expired_compares_losses_of_the_same_data_only(tmp_path: Path) -> None:
    losses = [(1.0, "old"), (2.0, "new"), (1.5, "new"), (3.0, "new")]
    manifest = read_manifest(write_checkpoint(tmp_path / "checkpoint"))
    saved: list[SavedCheckpoint] = []
    for time, (loss, data) in enumerate(losses):
        of_data = {"train": "", "validation": data}
        changes = {"time": float(time), "validation_loss": loss, "data": of_data}
        saved.append(SavedCheckpoint(str(time), manifest.model_copy(update=changes)))
    assert [entry.name for entry in expired(saved, 1)] == ["0", "1"]
    assert [entry.name for entry in expired(saved[:1], 1)] == []


def test_resume_compares_tokenizers_by_content(victim: Path) -> None:
    same = {"tokenizer": "9 tokens, sha256 0", "validation_loss": 1.0}
    forge_manifest(victim, hyperparameters={"tokenizer": "a/tokenizer.json"}, **same)
    plan = ResumePlan((Location(str(victim)),), may_be_complete=True)
    now = RUN_INFO.model_copy(update={"hyperparameters": {"tokenizer": "b/tokenizer.json"}})
    same_content = now.model_copy(update={"tokenizer": "9 tokens, sha256 0"})
    other_content = now.model_copy(update={"tokenizer": "9 tokens, sha256 1"})
    store = LocalCheckpoints(victim.parent)
    complete = find_complete(plan, store, same_content, 10, samples=False)
    assert complete is not None
    assert complete.step == 10
    with pytest.raises(ConfigError, match=r"tokenizer.*sha256 1"):
        find_complete(plan, store, other_content, 10, samples=False)


class Payload:
    """Makes the directory `path` when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_load_runs_no_payload(victim: Path, tmp_path: Path) -> None:
    """Next to the files of the manifest, or in place of one."""
    torch.save(Payload(tmp_path / "ran"), victim / "model.pt")
    shutil.copy(victim / "model.pt", victim / ".metadata")  # the name of PyTorch's pickled index
    load(victim, toy_model(-1))
    payload = (victim / "model.pt").read_bytes()
    size = (victim / SHARDS[0]).stat().st_size
    (victim / SHARDS[0]).write_bytes(payload.ljust(size, b"\0"))
    forge_manifest(victim)
    assert refusal(victim).startswith(f"{victim / SHARDS[0]}: damaged header")
    assert not (tmp_path / "ran").exists()
    torch.load(victim / "model.pt", weights_only=False)
    assert (tmp_path / "ran").exists()


def test_no_product_code_unpickles() -> None:
    with_its_child = (
        REPOSITORY / "lm" / "data" / "worker.py"
    )  # over a pipe that no other process has
    for path in (
        REPOSITORY / "fsdp.py",
        REPOSITORY / "model.py",
        *(REPOSITORY / "lm").rglob("*.py"),
    ):
        if path == with_its_child:
            continue
        imported = {
            name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in (getattr(node, "module", None), *(alias.name for alias in node.names))
        }
        assert not imported & {
            "pickle",
            "torch.distributed.checkpoint",
            "dill",
            "shelve",
            "marshal",
        }, path
        assert "torch.load(" not in path.read_text(), path


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/passwd",
        "a/b",
        "..",
        ".",
        "",
        "a\0b",
        "manifest.json",
        "model-00000-00000.py",
        ".metadata",
    ],
)
def test_load_refuses_a_manifest_with_other_files(name: str, victim: Path) -> None:
    entries = read_manifest(victim).files
    files = {key: entry.model_dump() for key, entry in entries.items()}
    forge_manifest(victim, files=files | {name: {"bytes": 1, "crc32c": 1}})
    message = refusal(victim)
    assert message.startswith(f"{victim}/manifest.json: ")
    assert repr(name) in message


def test_load_refuses_a_symbolic_link(victim: Path, tmp_path: Path) -> None:
    victim.rename(tmp_path / "elsewhere")
    victim.symlink_to(tmp_path / "elsewhere")
    assert refusal(victim).startswith(f"{victim}: is a symbolic link")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b'{"format": "1"}',
        b'{"format": 3}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff\xfe\x00",
        b'{"format": ' + b"9" * 5000 + b"}",
        b'{"format": NaN}',
    ],
)
def test_read_manifest_refuses_malformed_json(text: bytes, victim: Path) -> None:
    (victim / MANIFEST).write_bytes(text)
    assert refusal(victim).startswith(f"{victim}/manifest.json: damaged: ")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", -1),
        ("step", 10**400),
        ("metric_sums", [{"loss_sum": 1e308}] * 3),
        ("metric_sums", [{"n_taken": 2, "n_steps": 2}]),
        ("metric_sums", [{"n_steps": -1}]),
        ("dataset_state", [{"streams": [{}], "turn": "x"}]),
        ("dataset_state", [{"streams": [{"read": -1}], "turn": 0}]),
        ("dataset_state", [{"turn": 0}]),
        ("tokens", 2**63),
        ("time", float("nan")),
        ("world_size", 0),
        ("validation_loss", float("nan")),
        ("files", {SHARDS[0]: {"bytes": 10**400, "crc32c": 0}}),
        ("more", 1),
        ("model", {"n_positions": True}),
        ("model", {"d_model": "\0"}),
    ],
)
def test_read_manifest_names_the_impossible_field(field: str, value: Any, victim: Path) -> None:
    forge_manifest(victim, **{field: value})
    assert refusal(victim).startswith(f"{victim}/manifest.json: damaged: {field}")
