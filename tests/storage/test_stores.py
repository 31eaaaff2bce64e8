"""What every checkpoint store promises: a disk, a bucket (moto's S3), a cluster's of both."""

from __future__ import annotations

import errno
import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from determined import core
from determined.common import storage
from determined.errors import CheckpointNotFound
from torch import nn

from lm.checkpoint import checkpointer as checkpointer_module
from lm.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from lm.checkpoint.cluster import ClusterCheckpoints
from lm.checkpoint.location import Location
from lm.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Manifest,
    RunInfo,
    read_manifest,
    write_manifest,
)
from lm.checkpoint.object_storage import BucketCheckpoints
from lm.checkpoint.store import CheckpointStore, LocalCheckpoints
from lm.checkpoint.tensor_files import State
from lm.determined.context import TorchDistributedContext
from lm.errors import ConfigError, RunError
from lm.preflight import restoring_earlier
from lm.resume import ResumePlan, load_checkpoint, plan_resume
from lm.runtime.run_state import RunState, begin_run, finish_move, forget_launch, read_state
from lm.runtime.world import World
from lm.storage.bucket import Bucket
from lm.storage.place import Directory
from tests.support.checkpoints import OPTIM_SHARDS, RUN_INFO, load_state, save_toy, toy_model
from tests.support.ranks import in_world

pytestmark = pytest.mark.filterwarnings("ignore:You are using a Python version:FutureWarning")

WEIGHTS = "model-00000-00000.safetensors"
AUTO = CheckpointConfig.model_validate({})


class Uploaded(storage.SharedFSStorageManager):
    """Storage that checkpoints are uploaded to and downloaded from, as S3, in a directory."""

    def store_path_is_direct_access(self) -> bool:
        return False


@pytest.fixture(params=["disk", "bucket", "file system of a cluster", "bucket of a cluster"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "bucket":
        request.getfixturevalue("s3")
    return request.param


@pytest.fixture(params=["disk", "bucket"])
def kind_off_cluster(request: pytest.FixtureRequest) -> str:
    if request.param == "bucket":
        request.getfixturevalue("s3")
    return request.param


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where a test's run is: a directory, or the name of a prefix in the bucket."""
    path = tmp_path / "run"
    (path / "checkpoints").mkdir(parents=True)
    return path


@contextmanager
def opened(kind: str, place: Path, world: World, keep: int | None = 2) -> Iterator[Checkpointer]:
    """A checkpointer of the run at `place`, started."""
    distributed = TorchDistributedContext(world.launch, world.saver, world.node)
    config = CheckpointConfig.model_validate({"keep_checkpoints": keep})
    checkpoints = place / "checkpoints"
    with core.init(distributed=distributed, checkpoint_storage=str(checkpoints)) as context:
        store: CheckpointStore
        match kind:
            case "disk":
                store = LocalCheckpoints(checkpoints, context.checkpoint)
            case "bucket":
                store = BucketCheckpoints(f"s3://bucket/{place.parent.name}/run", place)
            case "file system of a cluster":
                store = ClusterCheckpoints(context.checkpoint, None, writes_in_place=True)
            case _:
                uploading = core.DummyCheckpointContext(distributed, Uploaded(str(checkpoints)))
                store = ClusterCheckpoints(uploading, None, writes_in_place=False)
        store.start(world)
        yield Checkpointer(config, store, world, {})
        store.close(world)


def loaded(checkpointer: Checkpointer, location: Location) -> nn.Module:
    """The model of a checkpoint."""
    model = toy_model(-1)
    load_state(checkpointer, location, {"model": model.state_dict()})
    return model


def is_filled_with(model: nn.Module, value: float) -> bool:
    return all(bool((parameter == value).all()) for parameter in model.parameters())


def saved_names(store: CheckpointStore) -> list[str]:
    return [entry.name for entry in store.list_saved()[0]]


def change(store: CheckpointStore, name: str, file: str, content: Callable[[bytes], bytes]) -> None:
    """Replace a file of a checkpoint."""
    if isinstance(store, BucketCheckpoints):
        path = f"checkpoints/{name}/{file}"
        store.bucket.write(path, content(store.bucket.read(path)))
    else:
        assert isinstance(store, LocalCheckpoints)
        path = store.path / name / file
        path.write_bytes(content(path.read_bytes()))


def remove(store: CheckpointStore, name: str, file: str) -> None:
    if isinstance(store, BucketCheckpoints):
        store.bucket.delete([f"checkpoints/{name}/{file}"])
    else:
        assert isinstance(store, LocalCheckpoints)
        (store.path / name / file).unlink()


def flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def test_store_loads_what_was_saved(kind: str, place: Path) -> None:
    def save_and_load(world: World) -> None:
        with opened(kind, place, world) as checkpointer:
            store = checkpointer.store
            names = [save_toy(checkpointer, world, step) for step in (1, 2)]
            assert saved_names(store) == names
            for step, name in enumerate(names, start=1):
                assert is_filled_with(loaded(checkpointer, store.locate(name)), step)
                assert store.read_manifest(store.locate(name)).step == step
            assert not list(place.rglob(".scratch.*"))

    in_world(save_and_load)


@pytest.mark.parametrize(("keep", "left"), [(2, [2, 4, 5]), (None, [1, 2, 3, 4, 5])])
def test_store_keeps_the_newest_and_the_best(
    keep: int | None, left: list[int], kind: str, place: Path
) -> None:
    def save_five(world: World) -> None:
        with opened(kind, place, world, keep) as checkpointer:
            names = {}
            for step, loss in enumerate([3.0, 1.0, 2.0, 5.0, 4.0], start=1):
                names[step] = save_toy(checkpointer, world, step, loss=loss)
            store = checkpointer.store
            counted = left
            if keep is None and "cluster" in kind:
                counted = left[-1:]  # the manifests of the others are in no memory
            assert saved_names(store) == [names[step] for step in counted]
            for step, name in names.items():
                if step in left:
                    assert store.read_manifest(store.locate(name)).step == step
                else:
                    with pytest.raises((CheckpointError, CheckpointNotFound)):
                        store.read_manifest(store.locate(name))

    in_world(save_five)


def test_store_names_the_kept_checkpoint_after_a_failed_save(kind: str, place: Path) -> None:
    def save_nan(world: World) -> None:
        with opened(kind, place, world) as checkpointer:
            with pytest.raises(RunError, match=r"lower lr.*no checkpoint exists yet"):
                save_toy(checkpointer, world, 1, float("nan"))
            good = save_toy(checkpointer, world, 2)
            with pytest.raises(RunError, match=rf"lower lr.*checkpoint {good} is kept"):
                save_toy(checkpointer, world, 3, float("nan"))
            assert saved_names(checkpointer.store) == [good]
            assert is_filled_with(loaded(checkpointer, checkpointer.store.locate(good)), 2)

    in_world(save_nan)


def test_store_loads_a_checkpoint_of_another_run(kind: str, place: Path, tmp_path: Path) -> None:
    """As with `init_from`."""

    def load_other(world: World) -> None:
        (tmp_path / "other" / "checkpoints").mkdir(parents=True)
        with opened("disk", tmp_path / "other", world) as other:
            location = other.store.locate(save_toy(other, world, 7))
        config = CheckpointConfig.model_validate({"init_from": str(tmp_path / "other")})
        with opened(kind, place, world) as checkpointer:
            plan = plan_resume(config.resume, config.init_from, checkpointer.store, restarted={})
            assert plan.init_candidates == (location,)
            assert is_filled_with(loaded(checkpointer, location), 7)

    in_world(load_other)


# ---- off the cluster, where the run itself chooses the checkpoint to resume from


def test_store_order_survives_a_clock_that_was_ahead(kind_off_cluster: str, place: Path) -> None:
    def set_clock_ahead(store: CheckpointStore, name: str, scratch: Path) -> None:
        def later(content: bytes) -> bytes:
            scratch.mkdir()
            (scratch / MANIFEST).write_bytes(content)
            manifest = read_manifest(scratch)
            write_manifest(scratch, manifest.model_copy(update={"time": manifest.time + 3600}))
            return (scratch / MANIFEST).read_bytes()

        change(store, name, MANIFEST, later)

    def save_after_another_machine(world: World) -> None:
        with opened(kind_off_cluster, place, world) as checkpointer:
            first = save_toy(checkpointer, world, 1)
            set_clock_ahead(checkpointer.store, first, place.parent / "scratch")
        with opened(kind_off_cluster, place, world) as checkpointer:
            second = save_toy(checkpointer, world, 2)
            assert saved_names(checkpointer.store) == [first, second]

    in_world(save_after_another_machine)


@pytest.mark.parametrize("damage", ["flipped bit", "no manifest", "no optimizer state"])
def test_store_resumes_the_one_before_a_damaged_one(
    damage: str, kind_off_cluster: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def resume_earlier(world: World) -> None:
        log: list[str] = []
        with opened(kind_off_cluster, place, world, keep=2) as checkpointer:
            store = checkpointer.store
            first, second = (save_toy(checkpointer, world, step) for step in (10, 20))
            if damage == "flipped bit":
                change(store, second, WEIGHTS, flipped)
            elif damage == "no optimizer state":
                remove(store, second, OPTIM_SHARDS[0])
            else:
                remove(store, second, MANIFEST)
            model = toy_model(-1)
            plan = plan_resume("auto", None, store, restarted={})
            state = {"model": model.state_dict(), "scaler": {}, "spikes": {}}
            load_checkpoint(plan, checkpointer, state, RUN_INFO, log.append)
            assert is_filled_with(model, 10)
            newer = [save_toy(checkpointer, world, step) for step in (11, 12, 13)]
            kept = [second, *newer[1:]] if damage == "flipped bit" else newer[1:]
            assert saved_names(store) == kept
        skipped = [
            line
            for line in [*log, *capsys.readouterr().err.splitlines()]
            if line.startswith("skipping")
        ]
        assert len(skipped) == 1
        assert str(store.locate(second)) in skipped[0]
        assert f"resumed from checkpoint {first}, step 10" in log

    in_world(resume_earlier)


def test_store_with_weights_only_is_a_start_and_no_resume(kind: str, place: Path) -> None:
    def lose_the_optimizer(world: World) -> None:
        with opened(kind, place, world) as checkpointer:
            store = checkpointer.store
            name = save_toy(checkpointer, world, 5)
            if isinstance(store, ClusterCheckpoints):
                (place / "checkpoints" / name / OPTIM_SHARDS[0]).unlink()
            else:
                remove(store, name, OPTIM_SHARDS[0])
                with pytest.raises(
                    CheckpointError, match=f"init_from={store.locate(name)} "
                ) as lost:
                    plan_resume("auto", None, store, restarted={})
                assert f"{OPTIM_SHARDS[0]}: missing" in str(lost.value)
            location = store.locate(name)
            model = toy_model(-1)
            state = {"model": model.state_dict(), "optim": {}}
            with pytest.raises(CheckpointError, match=f"init_from={location} ") as lost:
                load(checkpointer, ResumePlan((location,)), state, RUN_INFO)
            assert f"{OPTIM_SHARDS[0]}: missing" in str(lost.value)
            assert is_filled_with(model, -1)
            fork = RUN_INFO.model_copy(update={"trial_id": 2})
            in_place = kind != "bucket"  # the one that is downloaded without them
            for plan in (ResumePlan((location,)), ResumePlan(init_candidates=(location,))):
                if in_place or plan.init_candidates:
                    model = toy_model(-1)
                    load(checkpointer, plan, state | {"model": model.state_dict()}, fork)
                    assert is_filled_with(model, 5)

    def load(checkpointer: Checkpointer, plan: ResumePlan, state: State, run_info: RunInfo) -> None:
        full: State = {"scaler": {}, "spikes": {}, **state}
        load_checkpoint(plan, checkpointer, full, run_info, lambda _: None)

    in_world(lose_the_optimizer)


def test_store_that_lost_all_checkpoints_is_an_error(kind_off_cluster: str, place: Path) -> None:
    """A kill during the first save costs only that save."""

    def lose(world: World) -> None:
        with opened(kind_off_cluster, place, world, keep=None) as checkpointer:
            store = checkpointer.store
            assert not plan_resume("auto", None, store, restarted={}).resume_candidates
            names = [save_toy(checkpointer, world, step) for step in (1, 2)]
            for name in names:
                remove(store, name, MANIFEST)
            with pytest.raises(CheckpointError) as lost:
                plan_resume("auto", None, store, restarted={})
            assert all(name in str(lost.value) for name in names)
            for name, file in itertools.product(names, (WEIGHTS, OPTIM_SHARDS[0], "metadata.json")):
                remove(store, name, file)
            with pytest.raises(
                RunError, match="resume=fresh"
            ):  # all deleted: not silently a new run
                plan_resume("auto", None, store, restarted={})
            assert plan_resume("fresh", None, store, restarted={}).fresh

    in_world(lose)


def delete_all(store: CheckpointStore) -> None:
    """Delete everything of the run that is not on this machine's disk, or all its checkpoints."""
    if isinstance(store, BucketCheckpoints):
        store.bucket.delete([path for path in store.bucket.sizes() if "lease" not in path])
    else:
        assert isinstance(store, LocalCheckpoints)
        shutil.rmtree(store.path)


@pytest.mark.parametrize("keep", [1, None])
def test_store_whose_checkpoints_were_deleted_is_an_error(
    keep: int | None, kind_off_cluster: str, place: Path
) -> None:
    def lose(world: World) -> None:
        with opened(kind_off_cluster, place, world, keep) as checkpointer:
            for step in (1, 2):
                save_toy(checkpointer, world, step)
            delete_all(checkpointer.store)
        with opened(kind_off_cluster, place, world, keep) as checkpointer:
            store = checkpointer.store
            with pytest.raises(ConfigError, match="deleted; resume=fresh"):
                plan_resume("auto", None, store, restarted={})
            begin_run(store.places, RunState(), fresh=True)  # as resume=fresh does
            assert not plan_resume("auto", None, store, restarted={}).resume_candidates

    in_world(lose)


class Killed(BaseException):
    """Ends a save as a kill does: nothing is cleaned up."""


@pytest.mark.parametrize("moment", ["before", "after"])
def test_store_whose_first_save_was_killed_starts_anew(
    moment: str, kind_off_cluster: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Just before the manifest, or just after it, and before what follows."""

    def kill_first(world: World) -> None:
        with monkeypatch.context() as patch, opened(kind_off_cluster, place, world) as checkpointer:
            stop_at_manifest(patch, checkpointer.store, after=moment == "after")
            with pytest.raises(Killed):
                save_toy(checkpointer, world, 1)
        with opened(kind_off_cluster, place, world) as checkpointer:
            store = checkpointer.store
            plan = plan_resume("auto", None, store, restarted={})
            assert len(plan.resume_candidates) == (moment == "after")
            if moment == "after":
                (candidate,) = plan.resume_candidates
                checkpointer.add_saved(candidate, candidate.read_manifest())  # resumed from
                delete_all(store)
                with pytest.raises(ConfigError, match="resume=fresh"):
                    plan_resume("auto", None, store, restarted={})

    in_world(kill_first)


def stop_at_manifest(patch: pytest.MonkeyPatch, store: CheckpointStore, *, after: bool) -> None:
    """Kill a save when it writes the manifest that completes the checkpoint."""
    if isinstance(store, BucketCheckpoints):
        upload = store.bucket.upload

        def kill_upload(names: list[str], source: Path, target: str = "") -> None:
            is_manifest = MANIFEST in names
            if after or not is_manifest:
                upload(names, source, target)
            if is_manifest:
                raise Killed

        patch.setattr(store.bucket, "upload", kill_upload)
        return

    def kill_write(directory: Path, manifest: Manifest) -> None:
        if after:
            write_manifest(directory, manifest)
        raise Killed

    patch.setattr(checkpointer_module, "write_manifest", kill_write)


def test_store_removes_what_was_written_before_a_kill_of_rank_0(
    kind_off_cluster: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank may have written its files."""

    def kill_second(world: World) -> None:
        with opened(kind_off_cluster, place, world) as checkpointer:
            names = [save_toy(checkpointer, world, 1)]
            with monkeypatch.context() as patch:
                patch.setattr(Checkpointer, "_write_own_files", write_and_kill)
                with pytest.raises(Killed):
                    save_toy(checkpointer, world, 2)
            names.append(save_toy(checkpointer, world, 3))
            assert saved_names(checkpointer.store) == names
            assert checkpointer.store.list_saved()[1] == {}

    def write_and_kill(_self: Checkpointer, path: Path, _slices: Any) -> None:
        (path / "model-00001-00000.safetensors").touch()
        raise Killed

    in_world(kill_second)


def test_store_forgets_a_first_save_that_failed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run itself has removed its directory."""

    def fail(directory: Path, manifest: Manifest) -> None:  # noqa: ARG001
        raise OSError(errno.ENOSPC, "No space left on device")

    def save_on_a_full_disk(world: World) -> None:
        with monkeypatch.context() as patch, opened("disk", place, world) as checkpointer:
            patch.setattr(checkpointer_module, "write_manifest", fail)
            with pytest.raises(RunError, match="No space left"):
                save_toy(checkpointer, world, 1)
            plan = plan_resume("auto", None, checkpointer.store, restarted={})
            assert not plan.resume_candidates

    in_world(save_on_a_full_disk)


def test_store_forgets_only_what_a_start_shares_with_the_one_before(place: Path) -> None:
    store = LocalCheckpoints(place / "checkpoints")
    begin_run(
        store.places, RunState(resume="fresh", launch={"JOB": "1", "RUN": "none"}), fresh=True
    )
    forget_launch(store.places, {"JOB": "2", "RUN": "none"})
    assert read_state(store.places) == RunState(resume="fresh", launch={"JOB": "1"})


def test_refusal_is_told_if_the_earlier_start_cannot_be_recorded_again(tmp_path: Path) -> None:
    store = LocalCheckpoints(tmp_path / "no directory" / "run" / "checkpoints")
    plan = ResumePlan(earlier_state=RunState())

    def refuse(world: World) -> None:
        with pytest.raises(ConfigError) as refused, restoring_earlier(plan, store, world):
            raise ConfigError("prompt: is refused")
        first, second = refused.value.problems
        assert first == "prompt: is refused"
        assert "resume=auto" in second

    in_world(refuse)


def test_store_moves_earlier_runs_aside(kind_off_cluster: str, place: Path) -> None:
    def start_anew(world: World) -> None:
        with opened(kind_off_cluster, place, world) as checkpointer:
            store = checkpointer.store
            (place / "metrics.jsonl").write_text("1\n")
            save_toy(checkpointer, world, 1)
            begin_run(store.places, RunState(), fresh=True)
            assert saved_names(store) == []
            assert not store.was_committed()
            assert not (place / "metrics.jsonl").exists()
            assert [path.read_text() for path in place.glob("before-*/metrics.jsonl")] == ["1\n"]

    in_world(start_anew)


@pytest.mark.parametrize(
    "n_done", [1, 4, 7, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2, 3, 5, 6, 8))]
)
def test_store_knows_the_start_whose_move_was_killed(
    n_done: int, kind_off_cluster: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either the run before is all there, or nothing of it is left, and the new one is known."""

    def kill_the_move(world: World) -> None:
        with opened(kind_off_cluster, place, world) as checkpointer:
            (place / "metrics.jsonl").write_text("1\n")
            store = checkpointer.store
            old = store.locate(save_toy(checkpointer, world, 1))
            with monkeypatch.context() as patch, suppress(Killed):
                kill_after(n_done, patch)
                begin_run(
                    store.places, RunState(resume=str(old), resumed_from=str(old)), fresh=True
                )
        finish_move([Directory(place)])  # as `RunDir.lock` does
        with opened(kind_off_cluster, place, world) as checkpointer:
            store = checkpointer.store
            for resume in ("auto", str(old)):
                plan = plan_resume(resume, None, store, restarted={})
                (found,) = plan.resume_candidates
                assert is_filled_with(loaded(checkpointer, found), 1)
                assert (place / "metrics.jsonl").exists() == (found == old)
                assert (old.name in saved_names(store)) == (found == old)

    in_world(kill_the_move)


def kill_after(n_done: int, patch: pytest.MonkeyPatch) -> None:
    """Kill a move after some of its operations on files."""
    done = itertools.count()

    def killing(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run_or_kill(*args: Any, **options: Any) -> Any:
            if next(done) >= n_done:
                raise Killed
            return operation(*args, **options)

        return run_or_kill

    for owner, name in (
        (Path, "mkdir"),
        (Path, "rename"),
        (Directory, "write"),
        (Bucket, "write"),
        (Bucket, "copy"),
        (Bucket, "upload"),
        (Bucket, "delete"),
    ):
        patch.setattr(owner, name, killing(getattr(owner, name)))
