"""No damaged checkpoint passes for a complete one, and no malicious one runs code."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
from determined import core
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.fsdp import fully_shard

from lm.checkpoint.checkpointer import CheckpointConfig, Checkpointer, load_weights
from lm.checkpoint.dcp_reader import Reader, _IndexUnpickler
from lm.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    RunInfo,
    TrainingProgress,
    _encode,
    read_manifest,
    record,
    verify,
    write_manifest,
)
from lm.checkpoint.resume import ResumePlan, completed_step, find_checkpoint, plan_resume
from lm.checkpoint.retention import COMMITTED
from lm.determined.context import TorchDistributedContext
from lm.errors import ConfigError
from lm.runtime.world import World
from tests.conftest import Message
from tests.support import run_ranks

RUN_INFO = RunInfo(
    sharding="full-shard",
    total_batch_size=2,
    hyperparameters={"lr": 1e-4},
    model={},
    tokenizer=None,
    data={"train": "x"},
    loss_scaled=False,
    trial_id=None,
)


def progress(step: int, loss: float | None = None) -> TrainingProgress:
    return TrainingProgress(step=step, tokens=0, validation_loss=loss)


def toy(value: float) -> nn.Module:
    """Two tensors, of (6, 4) and (6,) float32."""
    model = nn.Linear(4, 6)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


@contextmanager
def opened(world: World, folder: Path, **settings: Any) -> Iterator[Checkpointer]:
    """A checkpointer of a run whose checkpoints are in `folder`."""
    os.umask(0o077)
    distributed = TorchDistributedContext(world.launch, world.control, world.saver, world.node)
    with core.init(distributed=distributed, checkpoint_storage=str(folder)) as context:
        config = CheckpointConfig.model_validate(settings)
        yield Checkpointer(config, context.checkpoint, world, folder, {}, distributed.use_saver_group)


def save(
    checkpointer: Checkpointer, world: World, step: int, value: float | None = None, loss: float | None = None
) -> str:
    """Save a sharded `toy` with all values `step`, or `value` on this rank; return the directory's name."""
    model = toy(step if value is None else value)
    fully_shard(model, mesh=world.device_mesh({"shard": world.size}))
    checkpointer.save({"model": model}, RUN_INFO, progress(step, loss))
    return checkpointer.commit()[1]


def save_steps(world: World, folder: Path, steps: list[int]) -> list[str]:
    with opened(world, folder, keep_checkpoints=None) as checkpointer:
        return [save(checkpointer, world, step) for step in steps]


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


def refusal(folder: Path) -> str:
    """Why `folder` is not loaded; asserts that nothing was read from it."""
    model = toy(-1)
    with pytest.raises(CheckpointError) as refused:
        load_weights(folder, model)
    assert all(bool((parameter == -1).all()) for parameter in model.parameters())
    return str(refused.value)


def test_a_loaded_checkpoint_equals_the_saved_state(saved: list[Path]) -> None:
    for folder, step in zip(saved, (5, 10), strict=True):
        assert sorted(files(folder)) == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"]
        model = toy(-1)
        load_weights(folder, model)
        assert all(bool((parameter == step).all()) for parameter in model.parameters())


def corruptions(good: dict[str, bytes], other: dict[str, bytes], seed: int) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Random damage without end: its kind and the content of each damaged file; `other` is another checkpoint."""
    draw = random.Random(seed)

    def flip(name: str, content: bytes) -> dict[str, bytes]:
        changed = bytearray(content)
        changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        return {name: bytes(changed)}

    def truncate(name: str, content: bytes) -> dict[str, bytes]:
        return {name: content[: draw.randrange(len(content))]}

    def zero(name: str, content: bytes) -> dict[str, bytes]:
        start = draw.randrange(len(content))
        length = min(draw.choice([1, 8, 64, 512]), len(content) - start)
        return {name: content[:start] + bytes(length) + content[start + length :]}

    def swap(name: str, content: bytes) -> dict[str, bytes]:
        second = draw.choice([key for key in good if key != name])
        return {name: good[second], second: content}

    def mix(name: str, _: bytes) -> dict[str, bytes]:
        return {name: other[name]}

    kinds = [flip] * 6 + [truncate, zero, swap, mix]
    while True:
        name, kind = draw.choice(list(good)), draw.choice(kinds)
        damaged = kind(name, good[name])
        if any(damaged[name] != good[name] for name in damaged):
            yield kind.__name__, damaged


def test_a_thousand_of_a_thousand_corruptions_are_refused_with_the_file(saved: list[Path], victim: Path) -> None:
    good, tried, named = files(victim), Counter[str](), Counter[str]()
    damages = corruptions(good, files(saved[0]), seed=1)
    while tried.total() < 1000:
        kind, damaged = next(damages)
        for name, content in damaged.items():
            (victim / name).write_bytes(content)
        message = refusal(victim)
        # A manifest of another step is intact: the shards differ from what it lists.
        suspects = good if kind == "mix" else damaged
        tried[kind] += 1
        named[kind] += any(str(victim / name) in message for name in suspects)
        for name in damaged:
            (victim / name).write_bytes(good[name])
    assert named == tried
    assert min(tried.values()) > 50
    load_weights(victim, toy(-1))


def test_any_flipped_bit_in_the_manifest_is_found(victim: Path) -> None:
    text = (victim / MANIFEST).read_bytes()
    for position in range(len(text)):
        changed = bytearray(text)
        changed[position] ^= 1 << position % 8
        (victim / MANIFEST).write_bytes(changed)
        with pytest.raises(CheckpointError, match=MANIFEST):
            read_manifest(victim)


@pytest.mark.parametrize(
    ("before", "after"),
    [('"step": 10', '"step": 11'), ('"lr": 0.0001', '"lr": 0.0002'), ('"lr": 0.0001', '"lr": 1e-4'), ("{\n", "{ \n")],
)
def test_an_edited_manifest_is_refused(before: str, after: str, victim: Path) -> None:
    text = (victim / MANIFEST).read_text()
    assert before in text
    (victim / MANIFEST).write_text(text.replace(before, after, 1))
    assert refusal(victim).startswith(f"{victim}/manifest.json: damaged: ")


@pytest.mark.parametrize("version", [1, 3])
def test_another_format_is_refused_with_its_number(version: int, victim: Path, message: Message) -> None:
    fields = json.loads((victim / MANIFEST).read_text())
    (victim / MANIFEST).write_text(json.dumps(fields | {"format": version, "else": {}}))
    message(refusal(victim))


@pytest.mark.parametrize("name", [".metadata", "__1_0.distcp"])
def test_a_missing_file_is_named(name: str, victim: Path) -> None:
    (victim / name).unlink()
    assert refusal(victim).startswith(f"{victim / name}: ")


def test_a_file_that_vanishes_before_it_is_verified_is_named(victim: Path) -> None:
    manifest = read_manifest(victim)
    (victim / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp: No such file"):
        verify(victim, manifest)


def test_a_directory_without_a_manifest_is_not_a_checkpoint(victim: Path, message: Message) -> None:
    (victim / MANIFEST).unlink()
    message(refusal(victim))


def test_the_checkpoint_written_last_is_found_and_skipped_ones_are_printed(
    saved: list[Path], tmp_path: Path, message: Message, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    for number, path in enumerate([saved[1], saved[0], saved[0]]):
        shutil.copytree(path, checkpoints / f"{number}")
        manifest = read_manifest(path)
        write_manifest(checkpoints / f"{number}", manifest.model_copy(update={"time": 1000.0 + number}))
    (checkpoints / "2" / "__0_0.distcp").unlink()
    (checkpoints / ".deleted-x").mkdir()
    assert find_checkpoint(tmp_path) == checkpoints / "1"
    message(capsys.readouterr().err)


@pytest.mark.parametrize("was_complete", [True, False])
def test_only_partial_checkpoints_are_an_error_unless_none_was_ever_complete(
    was_complete: bool, tmp_path: Path, message: Message, capsys: pytest.CaptureFixture[str]
) -> None:
    """Off a cluster a kill during the first save costs only that save; losing all checkpoints is not silent."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    if not was_complete:
        assert plan_resume(CheckpointConfig.model_validate({}), None, tmp_path, restarted=False) == ResumePlan()
        message(capsys.readouterr().err)
        return
    (tmp_path / COMMITTED).touch()
    with pytest.raises(CheckpointError) as refused:
        plan_resume(CheckpointConfig.model_validate({}), None, tmp_path, restarted=False)
    message(refused.value)


def test_tokenizers_are_compared_by_content_and_not_by_path(victim: Path, message: Message) -> None:
    forge_manifest(victim, hyperparameters={"tokenizer": "a/tokenizer.json"}, tokenizer="9 tokens, sha256 0")
    plan = ResumePlan((str(victim),), may_be_complete=True)
    path = {"hyperparameters": {"tokenizer": "b/tokenizer.json"}}
    assert completed_step(plan, RUN_INFO.model_copy(update=path | {"tokenizer": "9 tokens, sha256 0"}), 10) == 10
    with pytest.raises(ConfigError) as refused:
        completed_step(plan, RUN_INFO.model_copy(update=path | {"tokenizer": "9 tokens, sha256 1"}), 10)
    assert refused.value.keys == {"tokenizer"}
    message(refused.value)


def test_without_checkpoints_there_is_nothing_to_resume_from(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "none"):
        assert plan_resume(CheckpointConfig.model_validate({}), None, directory, restarted=False) == ResumePlan()


class Payload:
    """Makes the directory `path` when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def forge_manifest(folder: Path, **changes: Any) -> None:
    """Write a manifest that matches the files in `folder`, with `changes`."""
    fields = {key: value for key, value in json.loads((folder / MANIFEST).read_text()).items() if key != "checksum"}
    fields["files"] = {name: record(folder / name).model_dump() for name in fields["files"] if (folder / name).exists()}
    (folder / MANIFEST).write_bytes(_encode(fields | changes))


def index(folder: Path) -> Metadata:
    return pickle.loads((folder / ".metadata").read_bytes())


def rewrite_index(folder: Path, content: Any) -> None:
    (folder / ".metadata").write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    forge_manifest(folder)


def test_the_payload_runs_where_it_is_trusted(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


def bare(folder: Path, payload: Payload) -> None:
    rewrite_index(folder, payload)


def nested(folder: Path, payload: Payload) -> None:
    changed = index(folder)
    changed.planner_data = {"model.weight": [payload]}
    rewrite_index(folder, changed)


def as_version(folder: Path, payload: Payload) -> None:
    changed = index(folder)
    changed.version = payload  # type: ignore[assignment]
    rewrite_index(folder, changed)


def as_item(folder: Path, payload: Payload) -> None:
    changed = index(folder)
    content = io.BytesIO()
    torch.save(payload, content)
    shard = folder / "__0_0.distcp"
    changed.state_dict_metadata["model.extra"] = BytesStorageMetadata()
    changed.storage_data[MetadataIndex("model.extra")] = _StorageInfo(
        shard.name, shard.stat().st_size, len(content.getvalue())
    )
    shard.write_bytes(shard.read_bytes() + content.getvalue())
    rewrite_index(folder, changed)


def replace_tensor(folder: Path, content: bytes) -> None:
    """Put `content` where the index expects the tensors."""
    changed = index(folder)
    shard = folder / "__0_0.distcp"
    for key in changed.storage_data:
        changed.storage_data[key] = _StorageInfo(shard.name, 0, len(content))
    shard.write_bytes(content)
    rewrite_index(folder, changed)


def as_tensor(folder: Path, payload: Payload) -> None:
    content = io.BytesIO()
    torch.save(payload, content)
    replace_tensor(folder, content.getvalue())


def as_tensor_of_old(folder: Path, payload: Payload) -> None:
    content = io.BytesIO()
    torch.save(payload, content, _use_new_zipfile_serialization=False)
    replace_tensor(folder, content.getvalue())


def as_plain_pickle(folder: Path, payload: Payload) -> None:
    replace_tensor(folder, pickle.dumps(payload, protocol=2))


@pytest.mark.parametrize(
    ("plant", "why"),
    [
        (bare, r"\.metadata: damaged or malicious: it asks for posix.mkdir"),
        (nested, r"\.metadata: damaged or malicious: it asks for posix.mkdir"),
        (as_version, r"\.metadata: damaged or malicious: it asks for posix.mkdir"),
        (as_item, r"\.metadata: damaged or malicious: it asks for .*BytesStorageMetadata"),
        (as_tensor, r"victim: cannot be read: rank 0: UnpicklingError: Weights only load failed"),
        (as_tensor_of_old, r"victim: cannot be read: rank 0: UnpicklingError: Weights only load failed"),
        (as_plain_pickle, r"victim: cannot be read: rank 0: UnpicklingError: Weights only load failed"),
    ],
)
def test_no_payload_runs(plant: Callable[[Path, Payload], None], why: str, victim: Path, tmp_path: Path) -> None:
    plant(victim, Payload(tmp_path / "ran"))
    with pytest.raises(CheckpointError, match=why):
        load_weights(victim, toy(-1))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "__9_0.distcp", "manifest.json", "", "a\0b"])
def test_an_index_that_refers_to_another_file_is_refused(name: str, victim: Path) -> None:
    changed = index(victim)
    for key in changed.storage_data:
        changed.storage_data[key] = _StorageInfo(name, 0, 100)
    rewrite_index(victim, changed)
    message = refusal(victim)
    assert message.startswith(f"{victim}/.metadata: ")
    assert repr(name) in message


def call(function: str, arguments: bytes) -> bytes:
    """A pickle that calls `function`, "module name", with what the opcodes `arguments` leave on the stack."""
    return b"\x80\x04c" + function.replace(" ", "\n").encode() + b"\n" + arguments + b"."


def unicode(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


GETATTR = "builtins getattr"
ENCODING = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
LAYOUT, META = "torch.serialization _get_layout", "torch.distributed.checkpoint.metadata Metadata"


def test_an_enumeration_member_is_read_in_every_form_that_python_pickles() -> None:
    pickled = call(GETATTR, ENCODING + unicode("TORCH_PRESERVE_FORMAT") + b"\x86R")
    assert pickle.loads(pickled) is _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT
    assert _IndexUnpickler(io.BytesIO(pickled)).load() is _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (call(LAYOUT, unicode("__import__('os').mkdir('x')") + b"\x85R"), "__import__"),
        (call(LAYOUT, b"]\x85R"), "unhashable"),
        (call(LAYOUT, b")R"), "missing 1 required"),
        (call(LAYOUT, b"}" + unicode("cache") + b"}sb"), "it changes <function _get_layout"),
        (call(META, b"N}" + unicode("__init__") + b"Ns\x86b"), "it changes <class .*Metadata"),
        (call("pathlib PosixPath", b"N}" + unicode("is_symlink") + b"Ns\x86b"), "it changes <class .*PosixPath"),
        (call("pathlib PosixPath", b")R}" + unicode("x") + b"Nsb"), "it changes PosixPath"),
        (call("torch load", b""), "it asks for torch.load"),
        (call("torch.serialization load", b""), "it asks for torch.serialization.load"),
        (call("numpy load", b""), "it asks for numpy.load"),
        (call("builtins eval", b""), "it asks for builtins.eval"),
        (
            call(GETATTR, b"c" + META.replace(" ", "\n").encode() + b"\n" + unicode("__init__") + b"\x86R"),
            "it asks for '__init__'",
        ),
        (call(GETATTR, ENCODING + unicode("__class__") + b"\x86R"), "it asks for '__class__'"),
        (call(GETATTR, ENCODING + b"]\x86R"), "it asks for "),
        (b"\x80\x04" + unicode(META.split()[0]) + unicode("Metadata.__init__") + b"\x93.", "it asks for .*__init__"),
        (call("torch Size", b"]K\x00K\x00\x86\x85R"), "not callable"),
        (call(META, b")\x81"), "state_dict_metadata"),
        (call(META, b"}\x85R"), "NoneType"),
        (b"\x80\x04N.", "it is a NoneType"),
        (b"", "EOFError"),
        (b"\x80\x04" + b"(" * 100_000, ""),
        (b"\x80\x04\x8e" + b"\xff" * 8, ""),
    ],
)
def test_a_malicious_index_is_refused_and_changes_nothing(content: bytes, why: str, victim: Path) -> None:
    def attributes() -> list[dict[str, Any]]:
        return [dict(vars(what)) for what in (PosixPath, Metadata, torch.serialization._get_layout)]

    before = attributes()
    rewrite_index(victim, content)
    with pytest.raises(CheckpointError, match=rf"{victim}/\.metadata: damaged or malicious: .*{why}"):
        Reader(victim, read_manifest(victim)).read_metadata()
    assert attributes() == before


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", ".", "", "a\0b", "manifest.json", "__0_0.py"])
def test_a_manifest_that_lists_other_files_is_refused(name: str, victim: Path) -> None:
    entries = read_manifest(victim).files
    files = {key: entry.model_dump() for key, entry in entries.items()}
    forge_manifest(victim, files=files | {name: {"bytes": 1, "crc32c": 1}})
    message = refusal(victim)
    assert message.startswith(f"{victim}/manifest.json: ")
    assert repr(name) in message


def test_a_manifest_without_the_index_is_refused(victim: Path, message: Message) -> None:
    entries = read_manifest(victim).files
    forge_manifest(victim, files={key: entry.model_dump() for key, entry in entries.items() if key != ".metadata"})
    message(refusal(victim))


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "manifest.json", ""])
def test_a_symbolic_link_is_not_a_checkpoint_nor_a_file_of_one(
    name: str, victim: Path, tmp_path: Path, message: Message
) -> None:
    path = victim / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    message(refusal(victim))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b'{"format": "1"}',
        b'{"format": 2}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff\xfe\x00",
        b'{"format": ' + b"9" * 5000 + b"}",
        b'{"format": NaN}',
    ],
)
def test_malformed_json_is_refused(text: bytes, victim: Path) -> None:
    (victim / MANIFEST).write_bytes(text)
    assert refusal(victim).startswith(f"{victim}/manifest.json: damaged: ")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", -1),
        ("step", 10**400),
        ("tokens", 2**63),
        ("time", 1e308),
        ("time", float("inf")),
        ("time", float("nan")),
        ("world_size", 0),
        ("validation_loss", float("nan")),
        ("files", {".metadata": {"bytes": 10**400, "crc32c": 0}}),
        ("files", {".metadata": {"bytes": 1, "crc32c": 2**32}}),
        ("more", 1),
    ],
)
def test_a_manifest_with_impossible_values_is_refused_with_the_field(field: str, value: Any, victim: Path) -> None:
    forge_manifest(victim, **{field: value})
    assert refusal(victim).startswith(f"{victim}/manifest.json: damaged: {field}")
