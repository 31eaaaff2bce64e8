"""Asynchronous sharded checkpointing inside Determined's checkpoint context.

`Checkpointer.save` starts to copy the state to host memory; a thread writes it while training
continues. At a later step, once the threads of all ranks are done, `commit` waits for the
checkpoint and raises on every rank what failed on one. The thread's collectives use a separate
process group.
"""

from __future__ import annotations

import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, Field

from lm.checkpoint import staging, tensor_files
from lm.checkpoint.bucket import is_url
from lm.checkpoint.manifest import (
    DRAFT,
    FORMAT,
    MANIFEST,
    CheckpointError,
    FileRecord,
    Manifest,
    RunInfo,
    TrainingProgress,
    read_manifest,
    record,
    verify,
    write_manifest,
)
from lm.checkpoint.store import CheckpointStore
from lm.checkpoint.tensor_files import State
from lm.errors import ConfigError, RunError
from lm.fields import Logged, Unlogged
from lm.fileio import write_durably
from lm.launch.machine import host_memory
from lm.runtime.world import World
from lm.shards import to_local
from model import ModelConfig

SHARED = "checkpoints need a directory that all machines share"


class CheckpointConfig(BaseModel, frozen=True, extra="forbid"):
    """Hyperparameters of saving and resuming."""

    checkpoint_rate: Logged[int] = Field(
        50,
        gt=0,
        description="steps between checkpoints; one more after the last step",
        json_schema_extra={"aliases": ["save_steps"]},
    )
    keep_checkpoints: Logged[int | None] = Field(
        2,
        gt=0,
        description="newest checkpoints to keep, in addition to the one of lowest validation loss; null = all",
        json_schema_extra={"aliases": ["save_total_limit"]},
    )
    async_checkpoint: Logged[bool] = Field(
        True, description="continue training while a checkpoint is written"
    )
    checkpoint_storage: Logged[str | None] = Field(
        None,
        description="URL under which the run's checkpoints, metrics and report are stored, outside Determined, e.g."
        " s3://bucket/prefix (also gs://, az://); null = in runs/",
    )
    resume: Unlogged[str] = Field(
        "auto",
        description="auto = newest complete checkpoint; fresh = start at step 0; or the path or URL of a checkpoint or"
        " run",
    )
    init_from: Logged[str | None] = Field(
        None,
        description="weights to start with: a Hugging Face directory or OWNER/MODEL[@REVISION], which also supplies the"
        " model's keys and the tokenizer; or a checkpoint: its or its run's directory or URL, or on a cluster a UUID",
        json_schema_extra={"aliases": ["model_name_or_path"]},
    )

    @property
    def rerun(self) -> str:
        """What resumes the run; the same command with another `resume` would discard its progress."""
        return "rerun the same command" if self.resume == "auto" else "rerun with resume=auto"


class Checkpointer:
    """Saves the state of a run to `store` and loads it, on all ranks together.

    Args:
        extra_files: further files of every checkpoint, by name.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        store: CheckpointStore,
        world: World,
        extra_files: Mapping[str, bytes],
    ) -> None:
        self._config = config
        self.store = store
        self.world = world
        self._extra_files = extra_files
        self._starts: dict[
            str, dict[str, int]
        ] = {}  # first rows of the slices that this rank writes
        self._stager: staging.Stager | None = None
        self._writing: tuple[threading.Thread, Future[tuple[int, str]]] | None = None
        self._newest: str | None = None  # complete checkpoint of this run
        self._damaged: set[str] = set()

    def allocate(self, state: State) -> int:
        """Choose the slices that this rank writes and, for asynchronous saves, start to allocate memory for a copy.

        Call it once, before the first `save`.

        Returns:
            Bytes of the copies of this machine's ranks; 0 without asynchronous saves.

        Raises:
            ConfigError: the copies of this machine's ranks do not fit into its memory.
        """
        rank, size, node = self.world.rank, self.world.size, self.world.launch.node_rank
        slices = {
            part: tensor_files.owned_rows(tensors, rank, size) for part, tensors in state.items()
        }
        self._starts = {
            part: {name: start for name, (_, start) in owned.items()}
            for part, owned in slices.items()
        }
        if not self._config.async_checkpoint:
            return 0
        n_bytes = staging.buffer_size(
            tensor for owned in slices.values() for tensor, _ in owned.values()
        )
        needed = sum(
            size
            for its_node, size in self.world.all_gather_object((node, n_bytes))
            if its_node == node
        )

        def check() -> None:
            _, available = host_memory()
            if needed > available:
                need, free = (f"{size / 2**30:.2f} GiB" for size in (needed, available))
                problem = f"a copy of the state needs {need} of memory on {socket.gethostname()}, {free} are available"
                remedy = "use async_checkpoint: false or more machines"
                raise ConfigError(f"async_checkpoint: {problem}; {remedy}")

        self.world.all_or_none(check)
        self._stager = staging.Stager(n_bytes, self.world.device)
        return needed

    def save(self, state: State, run_info: RunInfo, progress: TrainingProgress) -> None:
        """Start to copy `state` to host memory and to write it; `is_pending` until `commit`.

        Until `protect_copy`, or without `async_checkpoint` until `commit`, the state must not
        change.
        """
        assert self._writing is None, "commit the previous checkpoint first"
        staged = self._stage(state)
        result: Future[tuple[int, str]] = Future()

        def write() -> None:
            try:
                if self._stager is not None:
                    self._stager.synchronize()
                result.set_result(self._write(staged, run_info, progress))
            except OSError as error:  # of the directory itself, of Determined's metadata, of storage, or of retention
                problem = f"rank {self.world.rank} cannot save the checkpoint of step {progress.step}: {error}"
                result.set_exception(RunError(problem))
            except BaseException as error:
                result.set_exception(error)

        # A daemon thread: a rank that fails must not wait for a thread that may be waiting for
        # other ranks.
        thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        thread.start()
        self._writing = thread, result

    def _stage(self, state: State) -> staging.Slices:
        """Return the slices that this rank writes: copies of them, or without `async_checkpoint` the live ones."""
        slices: staging.Slices = {}
        for part, starts in self._starts.items():
            slices[part] = {
                name: (to_local(state[part][name]), start) for name, start in starts.items()
            }
        return slices if self._stager is None else self._stager.copy(slices)

    def protect_copy(self) -> None:
        """Make the device complete the copies of the last `save` before what follows, e.g. an optimizer step."""
        if self._stager is not None:
            self._stager.protect_copies()

    @property
    def is_pending(self) -> bool:
        """Whether a checkpoint has to be committed."""
        return self._writing is not None

    @property
    def is_writing(self) -> bool:
        """Whether this rank is still writing its part of a checkpoint."""
        return self._writing is not None and self._writing[0].is_alive()

    def commit(self) -> tuple[int, str]:
        """Wait on all ranks for the pending checkpoint and return its step and UUID.

        Raises:
            RunError: the checkpoint could not be written and was removed.
        """
        assert self._writing is not None
        (thread, result), self._writing = self._writing, None

        try:
            return self.world.wait_for(result)
        finally:
            if result.done():
                thread.join()  # to its end: PyTorch aborts a process that exits while a thread frees tensors

    def _write(
        self, staged: staging.Slices, run_info: RunInfo, progress: TrainingProgress
    ) -> tuple[int, str]:
        metadata = self._metadata(run_info, progress)
        written = {
            "time": self._next_time() if self.world.rank == 0 else 0.0,
            "world_size": self.world.size,
        }
        fields = dict(run_info) | dict(progress) | written | {"format": FORMAT, "files": {}}
        manifest = Manifest.model_validate(fields)
        try:
            with self.store.new_checkpoint(metadata, self.world) as new:
                self._write_files(new.path, staged, manifest)
        except RunError as error:
            kept = (
                f"checkpoint {self._newest} is kept" if self._newest else "no checkpoint exists yet"
            )
            raise type(error)(f"{error}; {kept}", rank_local=error.rank_local) from None
        self._newest = new.name
        if self.world.rank == 0:
            self.store.add(new.name, manifest)
            self.store.prune(self._config.keep_checkpoints, self._damaged)
        return progress.step, new.name

    def _metadata(self, run_info: RunInfo, progress: TrainingProgress) -> dict[str, Any]:
        """Return what Determined shows of a checkpoint."""
        metadata = {
            "steps_completed": progress.step,
            "tokens": progress.tokens,
            "world_size": self.world.size,
        }
        metadata |= {
            "sharding": run_info.sharding,
            "amp_dtype": run_info.hyperparameters.get("amp_dtype"),
        }
        metadata |= {"parameters": ModelConfig.model_validate(run_info.model).n_parameters}
        return metadata | (
            {}
            if progress.validation_loss is None
            else {"validation_loss": progress.validation_loss}
        )

    def _next_time(self) -> float:
        """Return the time, or a later one than that of every checkpoint: clocks differ, and are set back."""
        saved, _ = self.store.list_saved()
        return max([time.time(), *(entry.time + 1e-3 for entry in saved)])

    def _write_files(self, path: Path, staged: staging.Slices, manifest: Manifest) -> None:
        """Write all files of a checkpoint to `path`; if a rank fails, remove them and fail on all ranks."""
        world, node = self.world, self.world.launch.node_rank
        own = sum(tensor.nbytes for slices in staged.values() for tensor, _ in slices.values())
        per_rank = world.all_gather_object((node, own))
        needed = sum(
            size for its_node, size in per_rank if self.store.writes_in_place or its_node == node
        )

        def check() -> None:
            for part, slices in staged.items():
                for name, (tensor, _) in slices.items():
                    if not torch.isfinite(torch.stack(torch.aminmax(tensor))).all():
                        problem = f"{part}.{name} holds inf or NaN"
                        raise ConfigError(f"{problem}, so it is not saved: lower lr")
            free = shutil.disk_usage(path).free
            if free < needed:
                problem = f"disk full: a checkpoint needs {needed:,} bytes, {free:,} are free"
                raise RunError(
                    f"{path}: {problem}; free space, then {self._config.rerun} to resume"
                )

        def write() -> dict[str, FileRecord]:
            files = {}
            with _oserror_as_run_error(path, world.rank, needed):
                if world.rank == 0:
                    (path / DRAFT).touch()
                for part, slices in staged.items():
                    for number, names in enumerate(tensor_files.group_by_size(slices)):
                        file = path / f"{part}-{world.rank:05}-{number:05}.safetensors"
                        checksum = tensor_files.write_tensors(
                            file, {name: slices[name] for name in names}
                        )
                        files[file.name] = FileRecord(bytes=file.stat().st_size, crc32c=checksum)
                for name, content in self._extra_files.items() if world.rank == 0 else ():
                    write_durably(path / name, content)
                    files[name] = record(path / name)
            return files

        def complete(files: dict[str, FileRecord]) -> None:
            missing = sorted(name for name in files if not (path / name).exists())
            if self.store.writes_in_place and missing:
                problem = f"{missing[0]} was written, but {socket.gethostname()} cannot see it"
                raise RunError(f"{path}: {problem}; {SHARED}")
            with _oserror_as_run_error(path, world.rank, needed):
                write_manifest(path, manifest.model_copy(update={"files": files}))

        def refuse_existing() -> None:
            if any(path.iterdir()):
                raise RunError(f"{path}: already exists; checkpoints are never overwritten")

        world.all_or_none(refuse_existing)  # outside of `try`, which would delete what exists
        try:
            world.all_or_none(check)
            parts = world.all_gather_object(world.all_or_none(write))
            files = {name: entry for part in parts for name, entry in part.items()}
            world.all_or_none(lambda: complete(files) if world.rank == 0 else None)
        except Exception:
            if world.rank == 0 and self.store.writes_in_place:
                shutil.rmtree(path, ignore_errors=True)
            raise

    def add_saved(self, location: str, manifest: Manifest) -> None:
        """Count the complete checkpoint that this run resumed from."""
        self._newest = Path(location).name
        self.store.add(location, manifest)

    def load(self, checkpoint: str, select: Callable[[Manifest], State]) -> Manifest:
        """Verify a checkpoint, load it into the state that `select` returns, and return its manifest.

        Args:
            checkpoint: its location, see `lm.checkpoint.store`.
            select: returns the state to load for a manifest, or raises to refuse it.

        Raises:
            CheckpointError: the checkpoint is damaged; no state changed, unless it holds inf or
                NaN, or a file was changed while it was read.
            ConfigError: its tensors differ from the state's; lists every difference, no state
                changed.
        """
        with self.store.open(checkpoint, self.world) as path:
            seen = self.world.all_gather_object((path / MANIFEST).is_file())
            if any(seen) and not all(seen):
                problem = f"rank {seen.index(True)} can see this checkpoint, but rank {seen.index(False)} cannot"
                raise ConfigError(f"{path}: {problem}; {SHARED}")
            try:
                manifest = self.world.all_or_none(
                    lambda: self._verify(path, not is_url(checkpoint))
                )
                state = select(manifest)
                sources = self.world.all_or_none(
                    lambda: tensor_files.find_tensors(path, manifest, state)
                )
                self.world.all_or_none(lambda: tensor_files.read_tensors(sources))
            except CheckpointError as error:
                self._damaged.add(path.name)
                if not is_url(checkpoint):
                    raise
                copy = rf"\S*/{re.escape(path.name)}"  # on any machine
                raise CheckpointError(
                    *(re.sub(copy, checkpoint, problem) for problem in error.problems)
                ) from None
        return manifest

    def _verify(self, path: Path, is_on_disk: bool) -> Manifest:
        manifest, launch = read_manifest(path), self.world.launch
        is_shared = (
            is_on_disk and self.store.writes_in_place
        )  # otherwise every machine has downloaded the files
        ranks = (
            (launch.rank, launch.world_size)
            if is_shared
            else (launch.local_rank, launch.local_size)
        )
        verify(path, manifest, *ranks)
        return manifest


@contextmanager
def _oserror_as_run_error(path: Path, rank: int, needed: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(path).free
        problem = f"rank {rank} cannot write: {error.strerror or error}"
        raise RunError(
            f"{path}: {problem}; a checkpoint needs {needed:,} bytes, {free:,} are free"
        ) from None
