"""Whatever goes wrong while saving or reading, the last good checkpoint is there, and the run says what happened."""

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
from torch import nn
from torch.distributed.fsdp import fully_shard

from lm.checkpoint.__main__ import main
from lm.checkpoint.checkpointer import load_weights
from lm.checkpoint.manifest import MANIFEST, read_manifest, verify, write_manifest
from lm.checkpoint.resume import complete_checkpoints
from lm.errors import ConfigError, RunError
from lm.runtime.world import World
from tests.support import TINY, checkpoints, in_world, reports, run, run_ranks
from tests.test_manifest import ABOUT, Payload, as_tensor, opened, save, toy

RUN = TINY | {
    "max_steps": 8,
    "checkpoint_rate": 2,
    "report_rate": 1,
    "validation_batches": 1,
    "keep_checkpoints": None,
    "amp_dtype": None,
}


def losses(folder: Path) -> dict[int, float]:
    return {step: line["loss"] for step, line in reports(folder).items()}


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.is_dir()]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def attempt(action: Callable[[], Any]) -> str | None:
    """What a person is told; None where all went well."""
    try:
        action()
    except RunError as error:
        return str(error)
    return None


# ---- runs ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps, undisturbed, with checkpoints behind steps 2, 4, 6 and 8."""
    folder = tmp_path_factory.mktemp("straight")
    done = run(folder, config=RUN)
    assert done.returncode == 0, done.stderr
    assert sorted(checkpoints(folder)) == [2, 4, 6, 8]
    return folder


@pytest.fixture
def stopped(straight: Path, tmp_path: Path) -> Path:
    """A copy of the run as it was behind step 6."""
    shutil.copytree(straight / "runs", tmp_path / "runs")
    shutil.rmtree(checkpoints(tmp_path)[8])
    return tmp_path


def refused(folder: Path, *overrides: str) -> list[str]:
    """The lines that a run ends with which cannot go on; asserts that it has not begun anew."""
    before = (folder / "runs" / "test" / "metrics.jsonl").read_bytes()
    done = run(folder, *overrides, config=RUN)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert (folder / "runs" / "test" / "metrics.jsonl").read_bytes() == before
    return done.stderr.splitlines()


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_gives_the_same_losses(
    straight: Path, stopped: Path
) -> None:
    newest = checkpoints(stopped)[6]
    flip(newest / "__0_0.distcp")
    done = run(stopped, config=RUN)
    assert done.returncode == 0, done.stderr
    message = f"passing over {newest}/__0_0.distcp: damaged, its checksum is not that of what was written"
    assert message in (done.stdout + done.stderr).splitlines()
    assert f"going on from checkpoint {checkpoints(stopped)[4].name}, step 4" in done.stdout
    assert losses(stopped) == losses(straight)


def test_a_checkpoint_without_its_manifest_is_named_and_the_one_before_it_is_used(
    straight: Path, stopped: Path
) -> None:
    newest = checkpoints(stopped)[6]
    (newest / MANIFEST).unlink()
    done = run(stopped, config=RUN)
    assert done.returncode == 0, done.stderr
    reason = "not a whole checkpoint, manifest.json: No such file or directory"
    assert f"passing over {newest.relative_to(stopped)}: {reason}" in done.stderr.splitlines()
    assert "step 4" in done.stdout
    assert losses(stopped) == losses(straight)


def test_where_all_are_damaged_all_are_named_and_nothing_begins(stopped: Path) -> None:
    damaged = [checkpoints(stopped)[step] / "__0_0.distcp" for step in (6, 4, 2)]
    for path in damaged:
        flip(path)
    said = refused(stopped)
    assert said[:3] == [f"{path}: damaged, its checksum is not that of what was written" for path in damaged]
    assert "no other checkpoint to go on from" in said[3]


def test_where_all_are_partial_all_are_named_and_nothing_begins(stopped: Path) -> None:
    folders = sorted(checkpoints(stopped).values())
    for path in folders:
        (path / MANIFEST).unlink()
    *partial, last = refused(stopped)
    reason = "not a whole checkpoint, manifest.json: No such file or directory"
    assert [Path(line.partition(": ")[0]).name for line in partial] == [path.name for path in folders]
    assert all(line.endswith(reason) for line in partial)
    assert last.endswith("checkpoints: no whole checkpoint to go on from; resume=fresh starts anew")


def test_a_folder_that_is_asked_for_and_is_no_checkpoint_is_said(stopped: Path) -> None:
    done = run(stopped, f"resume={stopped / 'runs'}", config=RUN)
    assert done.returncode == 2
    assert (
        done.stderr == f"resume: {stopped}/runs: is neither a checkpoint's folder nor a run's; or use auto or fresh\n"
    )


def test_a_runs_folder_means_its_newest_checkpoint(stopped: Path) -> None:
    done = run(stopped, f"resume={stopped / 'runs' / 'test'}", "run_name=other", config=RUN)
    assert done.returncode == 0, done.stderr
    assert f"going on from checkpoint {checkpoints(stopped)[6].name}, step 6" in done.stdout


def test_a_clock_that_is_set_back_retires_no_newer_checkpoint(straight: Path, stopped: Path) -> None:
    for path in checkpoints(stopped).values():  # as if another machine had written them, an hour ahead
        manifest = read_manifest(path)
        write_manifest(path, manifest.model_copy(update={"time": manifest.time + 3600}))
    done = run(stopped, "keep_checkpoints=1", config=RUN)
    assert done.returncode == 0, done.stderr
    newest, *_ = complete_checkpoints(stopped / "runs/test/checkpoints", print)
    assert read_manifest(newest).step == 8
    assert losses(stopped) == losses(straight)


def test_what_fresh_would_move_aside_stays_where_nothing_begins(stopped: Path) -> None:
    before = {path: path.stat().st_size for path in (stopped / "runs/test").rglob("*") if path.name != "lock"}
    done = run(stopped, "resume=fresh", "dataset=tokens", "train_data=nowhere", config=RUN)
    assert done.returncode == 2
    assert {path: path.stat().st_size for path in (stopped / "runs/test").rglob("*") if path.name != "lock"} == before


def test_all_that_a_run_writes_is_its_owners_alone(straight: Path) -> None:
    for path in [straight / "runs", *(straight / "runs").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_run_folder_that_anyone_can_write_to_is_refused(stopped: Path) -> None:
    (stopped / "runs" / "test" / "checkpoints").chmod(0o707)
    done = run(stopped, config=RUN)
    assert done.returncode == 2
    where = "runs/test/checkpoints"
    assert done.stderr == f"{where}: anyone can write to it; look at what is in it, then: chmod o-w {where}\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_run_folder_of_another_user_is_refused(stopped: Path) -> None:
    os.chown(stopped / "runs" / "test", 1234, -1)
    done = run(stopped, config=RUN)
    assert done.returncode == 2
    assert done.stderr == "runs/test: belongs to user 1234, not to you (0); choose another run_name\n"


def test_saving_in_the_background_gives_the_same_files(straight: Path, tmp_path: Path) -> None:
    done = run(tmp_path, "async_checkpoint=false", config=RUN)
    assert done.returncode == 0, done.stderr
    for step, path in checkpoints(straight).items():
        there, here = read_manifest(path).files, read_manifest(checkpoints(tmp_path)[step]).files
        assert there["__0_0.distcp"] == here["__0_0.distcp"]


# ---- saving -------------------------------------------------------------------------------------------


def test_training_may_change_the_state_while_it_is_being_written(tmp_path: Path) -> None:
    class Large(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((30_000_000,), float(value)))

    def change_meanwhile(world: World) -> tuple[bool, str]:
        with opened(world, tmp_path) as checkpointer:
            state = Large(1)
            checkpointer.save({"model": state}, ABOUT | {"step": 1})
            state.weight.data.fill_(2)
            goes_on = checkpointer.writing
            return goes_on, checkpointer.commit()[1]

    goes_on, name = in_world(change_meanwhile)
    assert goes_on
    read = Large(0)
    load_weights(tmp_path / name, read)
    assert bool((read.weight == 1).all())


def save_with_a_limit_on_one_rank(world: World, folder: Path) -> tuple[str | None, float, list[str], str]:
    with opened(world, folder) as checkpointer:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if world.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        began = time.monotonic()
        said = attempt(lambda: save(checkpointer, world, 1))
        took = time.monotonic() - began
        left = names(folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        world.all_gather_object(None)
        return said, took, left, save(checkpointer, world, 2)


def test_what_one_rank_cannot_write_fails_on_all_at_once_and_the_next_save_works(tmp_path: Path) -> None:
    results = run_ranks(2, save_with_a_limit_on_one_rank, tmp_path)
    for said, took, left, name in results:
        assert said is not None
        assert "cannot be written, rank 1: " in said
        assert took < 10
        assert left == []
        verify(tmp_path / name, read_manifest(tmp_path / name))
    assert results[0][0] == results[1][0]


def save_nan_on_one_rank(world: World, folder: Path) -> tuple[str, str | None]:
    with opened(world, folder, keep_checkpoints=1) as checkpointer:
        good = save(checkpointer, world, 1)
        return good, attempt(lambda: save(checkpointer, world, 2, float("nan") if world.rank else 0.0))


def test_weights_that_are_not_finite_are_not_saved_and_evict_nothing(tmp_path: Path) -> None:
    for good, said in run_ranks(2, save_nan_on_one_rank, tmp_path):
        assert said == "model.weight holds inf or NaN; it is not saved, the last checkpoint is kept: lower lr"
        assert names(tmp_path) == [good]


def test_a_folder_that_is_there_is_never_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uuid, "uuid4", lambda: "taken")

    def save_again(world: World) -> tuple[dict[str, bytes], str | None]:
        with opened(world, tmp_path) as checkpointer:
            assert save(checkpointer, world, 1) == "taken"
            before = {path.name: path.read_bytes() for path in (tmp_path / "taken").iterdir()}
            return before, attempt(lambda: save(checkpointer, world, 2))

    before, said = in_world(save_again)
    assert said == f"{tmp_path}/taken: is there already, and nothing is ever overwritten"
    assert {path.name: path.read_bytes() for path in (tmp_path / "taken").iterdir()} == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes a file system of so many KiB."""
    where = tmp_path / "disk"
    where.mkdir()

    def mount(kib: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", str(where)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting a file system is not allowed here")
        return where

    yield mount
    if where.is_mount():
        subprocess.run(["umount", "-l", str(where)], check=True)


def test_a_full_disk_ends_the_run_with_the_bytes_and_keeps_what_is_there(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(1024)
    done = run(disk, "async_checkpoint=false", config=RUN)  # else a report may meet the full disk first
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    whole = checkpoints(disk)
    assert whole
    (line,) = done.stderr.splitlines()
    figures = re.fullmatch(rf"{disk}/runs/\S+: .* a checkpoint needs ([\d,]+) bytes, ([\d,]+) are free", line)
    assert figures, line
    assert int(figures[1].replace(",", "")) > int(figures[2].replace(",", ""))
    assert names(disk / "runs/test/checkpoints") == sorted(path.name for path in whole.values())
    for path in whole.values():
        verify(path, read_manifest(path))


class Rows(nn.Module):
    """`count` tensors of 1 KiB."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.rows = nn.ParameterList(torch.zeros(256) for _ in range(count))


def test_a_disk_that_is_too_small_is_seen_before_anything_is_written(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(32)

    def save_too_much(world: World) -> str | None:
        with opened(world, disk) as checkpointer:
            checkpointer.save({"model": Rows(64)}, ABOUT | {"step": 1})
            return attempt(checkpointer.commit)

    said = in_world(save_too_much)
    assert re.fullmatch(rf"{disk}/\S+: disk full: a checkpoint needs 65,536 bytes, [\d,]+ are free", said or ""), said
    assert names(disk) == []


def save_replicas(world: World, folder: Path) -> None:
    with opened(world, folder) as checkpointer:
        state = nn.Linear(256, 256, bias=False)
        fully_shard(state, mesh=world.mesh(world.size, 1))
        checkpointer.save({"model": state}, ABOUT | {"step": 1})
        checkpointer.commit()


def test_replicas_need_the_room_of_one(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(400)
    run_ranks(2, save_replicas, disk)
    (name,) = names(disk)
    verify(disk / name, read_manifest(disk / name))


def fill_the_disk(world: World, folder: Path) -> tuple[str, str | None]:
    with opened(world, folder) as checkpointer:
        good = save(checkpointer, world, 1)
        state = Rows(16)
        fully_shard(state, mesh=world.mesh(1, world.size)["shard"])
        checkpointer.save({"model": state}, ABOUT | {"step": 2})
        return good, attempt(checkpointer.commit)


def test_a_disk_that_is_full_sooner_than_reckoned_leaves_nothing_half_written(
    small_disk: Callable[[int], Path],
) -> None:
    disk = small_disk(56)
    for good, said in run_ranks(2, fill_the_disk, disk):
        assert said is not None
        assert ": cannot be written, rank " in said
        assert "; a checkpoint needs 16,384 bytes, " in said
        assert names(disk) == [good]
        verify(disk / good, read_manifest(disk / good))


def use_disks_of_their_own(world: World, folder: Path) -> tuple[str | None, str | None]:
    """Ranks with a folder each, which only look alike: what saving says, and restoring what one of them has."""
    disk = folder / f"disk-{world.rank}"
    disk.mkdir()
    with opened(world, folder) as checkpointer:
        name = save(checkpointer, world, 1)
    if world.rank == 0:
        (folder / name).rename(disk / name)
    with opened(world, disk) as checkpointer:
        saving = attempt(lambda: save(checkpointer, world, 2))
        return saving, attempt(lambda: checkpointer.restore(name, lambda _: {"model": toy(0)}))


def test_machines_with_disks_of_their_own_neither_save_nor_restore_half_a_checkpoint(tmp_path: Path) -> None:
    results = run_ranks(2, use_disks_of_their_own, tmp_path)
    for saving, restoring in results:
        assert saving is not None
        assert "__1_0.distcp was written, but not where" in saving
        assert restoring is not None
        assert restoring.endswith(
            "this checkpoint is there for rank 0, and not for rank 1; it has to be in a folder that all machines share"
        )
    (only,) = (tmp_path / "disk-0").iterdir()
    verify(only, read_manifest(only))


# ---- keeping ------------------------------------------------------------------------------------------


def steps_left(folder: Path) -> list[int]:
    return sorted(json.loads(path.read_text())["step"] for path in folder.glob("*/manifest.json"))


@pytest.mark.parametrize(("keep", "left"), [(1, [2, 5]), (2, [2, 4, 5]), (4, [2, 3, 4, 5]), (None, [1, 2, 3, 4, 5])])
def test_the_newest_and_the_best_are_kept(keep: int | None, left: list[int], tmp_path: Path) -> None:
    def save_five(world: World) -> None:
        with opened(world, tmp_path, keep_checkpoints=keep) as checkpointer:
            for step, loss in enumerate([3.0, 1.0, 2.0, 5.0, 4.0], start=1):
                save(checkpointer, world, step, validation_loss=loss)

    in_world(save_five)
    assert steps_left(tmp_path) == left


def test_partial_checkpoints_neither_count_nor_go_and_half_deleted_ones_go(tmp_path: Path) -> None:
    def save_among_remains(world: World) -> None:
        with opened(world, tmp_path, keep_checkpoints=2) as checkpointer:
            cut, killed = (save(checkpointer, world, step) for step in (8, 9))
            shard = tmp_path / cut / "__0_0.distcp"
            shard.write_bytes(shard.read_bytes()[:-1])
            (tmp_path / killed).rename(tmp_path / f".deleted-{killed}")
            (tmp_path / "partial").mkdir()
            (tmp_path / "partial" / "__0_0.distcp").touch()
            assert whole_or_none(tmp_path) is None
            for step in (10, 11, 12):
                save(checkpointer, world, step)

    in_world(save_among_remains)
    assert steps_left(tmp_path) == [8, 11, 12]
    assert (tmp_path / "partial" / "__0_0.distcp").exists()
    assert not list(tmp_path.glob(".deleted-*"))


def whole_or_none(folder: Path) -> list[Path] | None:
    try:
        return complete_checkpoints(folder, print)
    except RunError:
        return None


def test_a_run_that_went_back_keeps_what_it_writes_from_there(tmp_path: Path) -> None:
    """The checkpoint of the highest step is damaged in a way that only its checksum shows."""

    def go_back(world: World) -> list[str]:
        said: list[str] = []
        with opened(world, tmp_path, keep_checkpoints=2) as checkpointer:
            first, second = (save(checkpointer, world, step) for step in (10, 20))
            flip(tmp_path / second / "__0_0.distcp")
            model = toy(-1)
            found, manifest = checkpointer.restore_first([second, first], lambda _: {"model": model}, said.append)
            assert (found, manifest.step) == (first, 10)
            assert all(bool((parameter == 10).all()) for parameter in model.parameters())
            newest = [save(checkpointer, world, step) for step in (11, 12, 13)]
        assert complete_checkpoints(tmp_path, print)[:2] == [tmp_path / newest[2], tmp_path / newest[1]]
        return said

    (message,) = in_world(go_back)
    assert message.endswith("/__0_0.distcp: damaged, its checksum is not that of what was written")
    assert steps_left(tmp_path) == [12, 13, 20]


# ---- reading ------------------------------------------------------------------------------------------


def test_every_tensor_that_differs_is_listed_and_none_is_read(tmp_path: Path) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((6, 5), -1.0))
            self.bias = nn.Parameter(torch.full((6,), -1.0, dtype=torch.bfloat16))
            self.scale = nn.Parameter(torch.full((3,), -1.0))

    class Fewer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((6, 4), -1.0))

    def restore_others(world: World) -> tuple[str, list[list[str]]]:
        said = []
        with opened(world, tmp_path) as checkpointer:
            name = save(checkpointer, world, 1)
            for model in (Other(), Fewer()):
                with pytest.raises(ConfigError) as error:
                    checkpointer.restore(name, lambda _, model=model: {"model": model})
                assert error.value.exit_code == 2
                assert all(bool((parameter == -1).all()) for parameter in model.parameters())
                said.append(list(error.value.problems))
        return name, said

    name, said = in_world(restore_others)
    assert said == [
        [
            f"{tmp_path}/{name}: its tensors are not this run's:",
            "model.scale: not in the checkpoint",
            "model.weight: [6, 4] torch.float32 in the checkpoint, here [6, 5] torch.float32",
            "model.bias: [6] torch.float32 in the checkpoint, here [6] torch.bfloat16",
        ],
        [f"{tmp_path}/{name}: its tensors are not this run's:", "model.bias: only in the checkpoint"],
    ]


def restore_behind_a_hostile_one(world: World, folder: Path) -> tuple[list[str], int, list[float]]:
    said: list[str] = []
    with opened(world, folder) as checkpointer:
        good, bad = (save(checkpointer, world, step) for step in (1, 2))
        if world.rank == 0:
            as_tensor(folder / bad, Payload(folder / "ran"))
        world.all_gather_object(None)
        model = toy(-1)
        fully_shard(model, mesh=world.mesh(1, world.size)["shard"])
        _, manifest = checkpointer.restore_first([bad, good], lambda _: {"model": model}, said.append)
    return said, manifest.step, [parameter.sum().full_tensor().item() for parameter in model.parameters()]  # type: ignore[attr-defined]


def test_all_ranks_pass_over_a_hostile_checkpoint_to_the_good_one(tmp_path: Path) -> None:
    for said, step, sums in run_ranks(2, restore_behind_a_hostile_one, tmp_path):
        assert len(said) == 1
        assert "cannot be read: rank 0: UnpicklingError: Weights only load failed" in said[0]
        assert (step, sums) == (1, [24.0, 6.0])
    assert not (tmp_path / "ran").exists()


# ---- the command --------------------------------------------------------------------------------------


def test_list_says_what_each_checkpoint_is_or_why_it_is_none(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = (checkpoints(stopped)[step] for step in (2, 4, 6))
    flip(first / "__0_0.distcp")
    (second / MANIFEST).unlink()
    (stopped / "runs/test/checkpoints/.deleted-x").mkdir()
    assert main(["list", str(stopped / "runs" / "test")]) == 1
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines[first.name] == (
        f"{first.name}  not whole: {first}/__0_0.distcp: damaged, its checksum is not that of what was written"
    )
    reason = "not a whole checkpoint, manifest.json: No such file or directory"
    assert lines[second.name] == f"{second.name}  not whole: {second}: {reason}"
    manifest = read_manifest(third)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))
    assert manifest.validation_loss is not None
    assert lines[third.name].startswith(f"{third.name}  step 6  {when}  0.")
    assert lines[third.name].endswith(f" MB  full-shard x 1  validation loss {manifest.validation_loss:.4f}  whole")
    assert len(lines) == 3


def test_verify_says_whole_or_names_the_file(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = checkpoints(stopped)[6]
    assert main(["verify", str(path)]) == 0
    assert capsys.readouterr().out.endswith("  whole\n")
    flip(path / "__0_0.distcp")
    assert main(["verify", str(path)]) == 1
    assert capsys.readouterr().err == (f"{path}/__0_0.distcp: damaged, its checksum is not that of what was written\n")


def test_list_of_another_folder_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{tmp_path}: is no run's folder, it has no checkpoints/\n"
