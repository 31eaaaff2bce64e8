"""Whatever fails while saving or loading, the last good checkpoint survives; the run says why."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import stat
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.checkpoint.__main__ import main
from lm.checkpoint.checkpointer import CheckpointConfig
from lm.checkpoint.contents import load_weights, verify
from lm.checkpoint.locate import locate_checkpoint
from lm.checkpoint.location import Location
from lm.checkpoint.manifest import MANIFEST, read_manifest
from lm.checkpoint.store import LocalCheckpoints
from lm.errors import ConfigError, RunError
from lm.resume import plan_resume
from lm.runtime.run_dir import RunDir
from lm.runtime.world import World
from lm.storage.folder import DRAFT, scratch
from lm.storage.lock import hold_until_exit
from lm.storage.place import Directory
from tests.support.checkpoints import (
    RUN_INFO,
    SHARDS,
    TOY,
    load_state,
    open_checkpointer,
    progress_at,
    save_toy,
    state_of,
    toy_model,
)
from tests.support.hyperparameters import EXACT_RUN
from tests.support.ranks import RANK_TIMEOUT, in_world, run_ranks
from tests.support.runs import checkpoints_by_step, read_exact_metrics, run_fsdp

RUN = EXACT_RUN | {"max_steps": 8, "checkpoint_rate": 2, "keep_checkpoints": None}
UUID = r"[0-9a-f]{8}-[0-9a-f-]{27}"


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.is_dir()]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def attempt(action: Callable[[], Any]) -> str | None:
    """The text of the RunError that `action` raises; None if it succeeds."""
    try:
        action()
    except RunError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight uninterrupted steps, with checkpoints after steps 2, 4, 6 and 8."""
    folder = tmp_path_factory.mktemp("reference")
    run_fsdp(folder, config=RUN, code=0)
    assert sorted(checkpoints_by_step(folder)) == [2, 4, 6, 8]
    return folder


@pytest.fixture
def stopped(reference: Path, tmp_path: Path) -> Path:
    """A copy of the run as it was after step 6."""
    shutil.copytree(reference / "runs", tmp_path / "runs")
    shutil.rmtree(checkpoints_by_step(tmp_path)[8])
    return tmp_path


def flip_in_shard(checkpoint: Path) -> None:
    flip(checkpoint / SHARDS[0])


def remove_manifest(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink()


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip_in_shard, remove_manifest])
def test_resume_skips_a_damaged_checkpoint(
    damage: Callable[[Path], None], reference: Path, stopped: Path
) -> None:
    newest = checkpoints_by_step(stopped)[6]
    damage(newest)
    done = run_fsdp(stopped, config=RUN, code=0)
    assert any(
        "skipping" in line and newest.name in line
        for line in (done.stdout + done.stderr).splitlines()
    )
    assert f"resumed from checkpoint {checkpoints_by_step(stopped)[4].name}, step 4" in done.stdout
    assert read_exact_metrics(stopped) == read_exact_metrics(reference)


@pytest.mark.slow
def test_resume_names_all_damaged_checkpoints(stopped: Path) -> None:
    before = (stopped / "runs/test/metrics.jsonl").read_bytes()
    folders = checkpoints_by_step(stopped)
    for path in folders.values():
        flip_in_shard(path)
    done = run_fsdp(stopped, config=RUN, code=1)
    *lines, advice = done.stderr.splitlines()
    assert len(lines) == 3
    for path in folders.values():
        assert sum(path.name in line and "checksum" in line for line in lines) == 1
    assert "resume" in advice
    assert "fresh" in advice
    assert (stopped / "runs/test/metrics.jsonl").read_bytes() == before


def test_resume_refuses_another_directory(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    config = CheckpointConfig.model_validate({"resume": str(tmp_path / "runs")})
    with pytest.raises(ConfigError, match=f"^resume: {tmp_path}/runs: neither a checkpoint"):
        plan_resume(config.resume, config.init_from, LocalCheckpoints(tmp_path), restarted={})


def test_resume_names_its_choices_if_there_is_no_such_path(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for key, where, part in (
        ("resume", "latest", "latest: .* auto .* fresh "),
        ("init_from", str(tmp_path / "rums"), f"{tmp_path}/rums: .* did you mean {tmp_path}/runs"),
    ):
        config = CheckpointConfig.model_validate({key: where})
        store = LocalCheckpoints(tmp_path / "runs" / "new" / "checkpoints")
        with pytest.raises(ConfigError, match=f"^{key}: {part}"):
            plan_resume(config.resume, config.init_from, store, restarted={})


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("config.json", "neither a checkpoint nor a run"),
        ("model.gguf", "neither a checkpoint nor a run"),
        ("model.gguf/", "is a file"),
    ],
)
def test_locate_checkpoint_names_a_directory_that_has_none(
    name: str, part: str, tmp_path: Path
) -> None:
    (tmp_path / name.rstrip("/")).write_text("{}")
    where = tmp_path / name if name.endswith("/") else tmp_path
    with pytest.raises(ConfigError, match=f"^{where}: {part}"):
        locate_checkpoint(where)


@pytest.mark.slow
def test_resume_fresh_moves_the_old_run_aside(stopped: Path) -> None:
    def sizes() -> dict[Path, int]:
        return {
            path: path.stat().st_size
            for path in (stopped / "runs/test").rglob("*")
            if path.name != "lock"
        }

    before, old = sizes(), {path.name for path in checkpoints_by_step(stopped).values()}
    run_fsdp(stopped, "resume=fresh", "dataset=tokens", "train_data=nowhere", config=RUN, code=2)
    assert sizes() == before
    run_fsdp(stopped, "resume=fresh", "seed=9", "max_steps=2", config=RUN, code=0)
    (aside,) = (stopped / "runs" / "test").glob("before-*")
    assert old <= set(names(aside / "checkpoints"))
    assert list(checkpoints_by_step(stopped)) == [2]


@pytest.mark.slow
def test_run_files_have_the_modes_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        done = run_fsdp(tmp_path, config=RUN)
    finally:
        os.umask(before)
    assert done.returncode == 0, done.stderr
    for path in [tmp_path / "runs", *(tmp_path / "runs").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o750 if path.is_dir() else 0o640), path


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_run_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    in_world(RunDir("x").lock)
    os.chown(tmp_path / "runs" / "x", 1234, -1)
    with pytest.raises(ConfigError, match="1234"):
        in_world(RunDir("x").lock)


@pytest.mark.slow
def test_async_checkpoint_files_equal_synchronous_ones(reference: Path, tmp_path: Path) -> None:
    run_fsdp(tmp_path, "async_checkpoint=false", config=RUN, code=0)
    for step, path in checkpoints_by_step(reference).items():
        expected, found = (
            read_manifest(path).files,
            read_manifest(checkpoints_by_step(tmp_path)[step]).files,
        )
        assert found == expected


LARGE = TOY.model_copy(update={"vocab_size": 1_000_000})


def test_async_checkpoint_copies_the_state(tmp_path: Path) -> None:
    info = RUN_INFO.model_copy(update={"model": LARGE.model_dump()})

    def change_meanwhile(world: World) -> list[tuple[bool, str]]:
        saved = []
        with open_checkpointer(world, tmp_path, keep_checkpoints=None) as checkpointer:
            state = state_of(toy_model(1.0, LARGE))
            checkpointer.allocate(state)
            for step in (1, 2, 3):
                checkpointer.save(state, info, progress_at(step))
                checkpointer.wait_for_copy()
                for tensor in state["model"].values():
                    tensor.fill_(step + 1)
                saved.append((checkpointer.is_writing, checkpointer.commit()[1]))
        return saved

    saved = in_world(change_meanwhile)
    assert any(was_writing for was_writing, _ in saved)
    for step, (_, name) in enumerate(saved, start=1):
        loaded = toy_model(0.0, LARGE).state_dict()
        load_weights(tmp_path / name, loaded)
        assert all(bool((tensor == step).all()) for tensor in loaded.values())


def test_async_checkpoint_copy_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    state = {"model": {"weight": torch.zeros(1).expand(1 << 40)}}

    def refusal(world: World) -> ConfigError:
        with open_checkpointer(world, tmp_path, async_checkpoint=False) as checkpointer:
            checkpointer.allocate(state)
        with (
            open_checkpointer(world, tmp_path) as checkpointer,
            pytest.raises(ConfigError) as refused,
        ):
            checkpointer.allocate(state)
        return refused.value

    error = in_world(refusal)
    assert str(error).startswith("async_checkpoint: a copy of the state needs 4,096.00 GiB")


def save_with_a_limit_on_one_rank(
    world: World, folder: Path
) -> tuple[str | None, float, list[str], str]:
    with open_checkpointer(world, folder) as checkpointer:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if world.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        started = time.monotonic()
        error = attempt(lambda: save_toy(checkpointer, world, 1))
        seconds = time.monotonic() - started
        left = names(folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        world.all_gather_object(None)
        return error, seconds, left, save_toy(checkpointer, world, 2)


@pytest.mark.slow
def test_save_fails_on_all_ranks_if_one_cannot_write(tmp_path: Path) -> None:
    results = run_ranks(2, save_with_a_limit_on_one_rank, tmp_path)
    for error, seconds, left, name in results:
        assert error is not None
        assert "rank 1 " in error
        assert seconds < RANK_TIMEOUT / 2
        assert left == []
        verify(tmp_path / name, read_manifest(tmp_path / name))
    assert results[0][0] == results[1][0]


def test_save_removes_what_a_killed_download_left(tmp_path: Path) -> None:
    """As of `resume=URL` of a run on a disk."""

    def save(world: World) -> str:
        with scratch(tmp_path) as directory:
            Path(f"{directory}x", "copy").mkdir(parents=True)
        with open_checkpointer(world, tmp_path) as checkpointer:
            return save_toy(checkpointer, world, 1)

    name = in_world(save)
    assert names(tmp_path) == [name]


def test_save_of_a_run_whose_lock_another_received_too_ends_it(tmp_path: Path) -> None:
    def save_twice(world: World) -> tuple[str, str | None]:
        lock = tmp_path / "lock"
        hold_until_exit(lock)
        with open_checkpointer(world, tmp_path / "checkpoints") as checkpointer:
            good = save_toy(checkpointer, world, 1)
            lock.write_text("process 1 on other since today\n")
            return good, attempt(lambda: save_toy(checkpointer, world, 2))

    good, error = in_world(save_twice)
    assert error is not None
    assert error.startswith(f"{tmp_path}: in use by process 1 on other since today; ")
    assert error.endswith(f"checkpoint {good} is kept")
    assert names(tmp_path / "checkpoints") == [good]


def save_nan_on_one_rank(world: World, folder: Path) -> tuple[str, RunError]:
    with open_checkpointer(world, folder, keep_checkpoints=1) as checkpointer:
        good = save_toy(checkpointer, world, 1)
        with pytest.raises(RunError) as refused:
            save_toy(checkpointer, world, 2, float("nan") if world.rank else 0.0)
        return good, refused.value


@pytest.mark.slow
def test_save_refuses_nonfinite_weights(tmp_path: Path) -> None:
    for good, error in run_ranks(2, save_nan_on_one_rank, tmp_path):
        assert re.match(r"model\.\S+ holds inf or NaN.* lr", str(error))
        assert names(tmp_path) == [good]


def test_save_refuses_an_existing_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uuid, "uuid4", lambda: "taken")

    def save_again(world: World) -> tuple[dict[str, bytes], str | None]:
        with open_checkpointer(world, tmp_path) as checkpointer:
            assert save_toy(checkpointer, world, 1) == "taken"
            before = {path.name: path.read_bytes() for path in (tmp_path / "taken").iterdir()}
            return before, attempt(lambda: save_toy(checkpointer, world, 2))

    before, error = in_world(save_again)
    assert error.startswith(f"{tmp_path}/taken: already exists")
    assert {path.name: path.read_bytes() for path in (tmp_path / "taken").iterdir()} == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes a file system of so many KiB."""
    where = tmp_path / "disk"
    where.mkdir()

    def mount(kib: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", str(where)]
        if (
            shutil.which("mount") is None
            or subprocess.run(command, capture_output=True, check=False).returncode
        ):
            pytest.skip("mounting a file system is not allowed here")
        return where

    yield mount
    if where.is_mount():
        subprocess.run(["umount", "-l", str(where)], check=True)


def test_save_on_a_full_disk_keeps_the_last_checkpoint(
    small_disk: Callable[[int], Path],
) -> None:
    disk = small_disk(1024)
    done = run_fsdp(
        disk, "async_checkpoint=false", config=RUN
    )  # else a report may meet the full disk first
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    complete = checkpoints_by_step(disk)
    assert complete
    (line,) = done.stderr.splitlines()
    needed, free = (
        int(number.replace(",", "")) for number in re.findall(r"([\d,]+) (?:bytes|are free)", line)
    )
    assert needed > free
    assert sorted(names(disk / "runs/test/checkpoints")) == sorted(
        path.name for path in complete.values()
    )
    for path in complete.values():
        verify(path, read_manifest(path))


def steps_left(folder: Path) -> list[int]:
    return sorted(json.loads(path.read_text())["step"] for path in folder.glob("*/manifest.json"))


def test_keep_checkpoints_ignores_partial_checkpoints(
    tmp_path: Path,
) -> None:
    def save_next_to_remains(world: World) -> None:
        with open_checkpointer(world, tmp_path, keep_checkpoints=2) as checkpointer:
            cut, killed = (save_toy(checkpointer, world, step) for step in (8, 9))
            shard = tmp_path / cut / SHARDS[0]
            shard.write_bytes(shard.read_bytes()[:-1])
            (tmp_path / killed).rename(tmp_path / f".{killed}.deleted-12345678")
            (tmp_path / "partial").mkdir()
            (tmp_path / "partial" / SHARDS[0]).touch()
            for step in (10, 11, 12):
                save_toy(checkpointer, world, step)

    in_world(save_next_to_remains)
    assert steps_left(tmp_path) == [8, 11, 12]
    assert (tmp_path / "partial" / SHARDS[0]).exists()
    assert not list(tmp_path.glob(".*.deleted-*"))


def test_load_lists_every_tensor_that_differs(tmp_path: Path) -> None:
    other = toy_model(-1.0).state_dict()
    other["embedding.tokens.weight"] = torch.full((6, 5), -1.0)
    other["head.norm.weight"] = other["head.norm.weight"].bfloat16()
    other["scale"] = torch.full((3,), -1.0)
    of_other = ["model.embedding.tokens.weight", "model.head.norm.weight", "model.scale"]
    fewer = toy_model(-1.0).state_dict()
    del fewer["head.norm.weight"]

    def load_others(world: World) -> None:
        with open_checkpointer(world, tmp_path) as checkpointer:
            name = save_toy(checkpointer, world, 1)
            for tensors, expected in ((other, of_other), (fewer, ["model.head.norm.weight"])):
                with pytest.raises(ConfigError) as refused:
                    load_state(checkpointer, Location(str(tmp_path / name)), {"model": tensors})
                differ = [re.split("[ :]", line)[0] for line in refused.value.problems[1:]]
                assert differ == expected
                assert all(bool((tensor == -1).all()) for tensor in tensors.values())

    in_world(load_others)


def test_checkpoint_list_says_what_is_complete_or_why_not(
    stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = (checkpoints_by_step(stopped)[step] for step in (2, 4, 6))
    truncated = (first / SHARDS[0]).read_bytes()[:-1]
    (first / SHARDS[0]).write_bytes(truncated)
    (second / MANIFEST).unlink()
    (stopped / "runs/test/checkpoints/.x.deleted-12345678").mkdir()
    assert main(["list", str(stopped / "runs" / "test")]) == 1
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines.keys() == {first.name, second.name, third.name}
    assert re.search(f"not complete: {first}/{SHARDS[0]}: has .* bytes", lines[first.name])
    assert re.search(f"not complete: {second}: .*{MANIFEST}: missing", lines[second.name])
    manifest = read_manifest(third)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))
    assert lines[third.name].startswith(f"{third.name}  step 6  {when}  369.0 KiB  ")
    assert lines[third.name].endswith(
        f"full-shard x 1  validation loss {manifest.validation_loss:.4f}  all files present  best"
    )
    flip(third / SHARDS[0])  # which only `verify` reads
    shutil.rmtree(first)
    (second / DRAFT).touch()
    assert main(["list", str(stopped / "runs" / "test")]) == 0
    assert re.search(f"^{second.name}  .*: is being saved", capsys.readouterr().out, re.M)
    assert main(["list", str(third)]) == 0
    assert capsys.readouterr().out.startswith(f"{third.name}  step 6  ")


def test_checkpoint_list_does_not_count_what_the_run_saves_and_deletes_meanwhile(
    stopped: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped / "runs/test"
    oldest = checkpoints_by_step(stopped)[2]
    folders = Directory.folders

    def change_after(place: Directory, path: str) -> dict[str, set[str]]:
        found = folders(place, path)
        shutil.rmtree(oldest, ignore_errors=True)
        draft = run / "checkpoints" / str(uuid.uuid4())
        draft.mkdir()
        (draft / DRAFT).touch()
        return found

    monkeypatch.setattr(Directory, "folders", change_after)
    assert main(["list", str(run)]) == 0
    assert oldest.name not in capsys.readouterr().out


def test_checkpoint_verify_prints_complete_or_the_damaged_file(
    stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoints_by_step(stopped)[6]
    assert main(["verify", str(path)]) == 0
    assert capsys.readouterr().out.endswith("  complete\n")
    run = str(stopped / "runs" / "test")
    assert main(["verify", run]) == 0
    n_checkpoints = len(checkpoints_by_step(stopped))
    assert capsys.readouterr().out.count("  complete") == n_checkpoints > 1
    flip(path / SHARDS[0])
    assert main(["verify", str(path)]) == 1
    problem = f"{path / SHARDS[0]}: damaged"
    assert capsys.readouterr().err.startswith(problem)
    assert main(["verify", run]) == 1
    assert f"{path.name}  not complete: {problem}" in capsys.readouterr().out


def test_checkpoint_list_refuses_another_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs" / "one" / "checkpoints").mkdir(parents=True)
    for name, problem in (
        (".", "neither a checkpoint nor a run"),
        ("runs", "neither a checkpoint nor a run"),
        ("rums", f"No such file or directory; did you mean {tmp_path / 'runs'}?"),
    ):
        where = tmp_path / name
        assert main(["list", str(where)]) == 2
        assert capsys.readouterr().err.startswith(f"{where}: {problem}")


def test_run_whose_checkpoints_were_deleted_is_refused(stopped: Path) -> None:
    run = stopped / "runs" / "test"
    shutil.rmtree(run / "checkpoints")
    metrics = (run / "metrics.jsonl").read_bytes()
    done = run_fsdp(stopped, config=RUN, code=2)
    assert re.fullmatch(".*/checkpoints: .*deleted; resume=fresh .*\n", done.stderr)
    assert (run / "metrics.jsonl").read_bytes() == metrics
