"""Asynchronous sharded checkpointing inside Determined's checkpoint context.

Out: `Checkpointer.save` starts to copy the state to host memory, and a thread writes the copy while
training continues. At a later step, once the threads of all ranks are done, `commit` waits for the
checkpoint and raises on every rank what failed on one. The thread's collectives use a separate
process group.

In: `Checkpointer.open` verifies a checkpoint and yields its manifest; the caller compares it with
the run, then reads the tensors with `SavedState.read_into`.
"""

from __future__ import annotations

import re
import shutil
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lm.checkpoint import staging, tensor_files
from lm.checkpoint.config import CheckpointConfig
from lm.checkpoint.contents import describe_state, read_tensors, require_tensors_of, verify_files
from lm.checkpoint.layout import find_tensors
from lm.checkpoint.location import Location
from lm.checkpoint.manifest import (
    DRAFT,
    FORMAT,
    MANIFEST,
    PARTS,
    WEIGHTS,
    CheckpointError,
    Manifest,
    RunInfo,
    TrainingProgress,
    read_manifest,
    write_manifest,
)
from lm.checkpoint.store import CheckpointStore
from lm.checkpoint.tensor_files import State
from lm.errors import ConfigError, RunError
from lm.fileio import write_durably
from lm.launch.machine import host_memory
from lm.runtime.world import World
from lm.shards import Rows, to_local
from lm.storage.bucket import is_url
from lm.storage.folder import FileRecord, record, require_space
from lm.transformers_config import model_config
from lm.units import format_bytes

SHARED = "checkpoints need a directory that all machines share"


@dataclass(frozen=True)
class SavedState:
    """A checkpoint that is open on all ranks; of its files, only the manifest has been read."""

    path: Path
    manifest: Manifest
    world: World
    share: int
    """of the files that this rank verifies; on a disk of one machine, its ranks share all files"""
    n_shares: int

    def read_into(self, state: State) -> None:
        """Verify what `state` needs and fill this rank's slices of it, on all ranks together.

        Raises:
            CheckpointError: the checkpoint is damaged; no state changed, unless it holds inf or NaN
                or a file was changed while it was read.
            ConfigError: its tensors differ from the state's; lists every difference, no state
                changed.
        """
        with self.world.all_or_none():
            verify_files(self.path, self.manifest, self.share, self.n_shares, state)
        with self.world.all_or_none():
            found = find_tensors(self.path, self.manifest, state)
            require_tensors_of(state, self.path, found)
        with self.world.all_or_none():
            read_tensors(found, state)


class PendingSave(NamedTuple):
    """A checkpoint that a thread is writing."""

    step: int
    thread: threading.Thread
    saved: Future[str]
    """UUID of the complete checkpoint"""


class Checkpointer:
    """Saves the state of a run to `store` and opens what was saved, on all ranks together.

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
        self._saver_world = world.for_saver()
        self._extra_files = extra_files
        self._starts: dict[str, dict[str, int]] = {}
        """first rows of the slices that this rank writes"""
        self._tensors: dict[str, str] = {}
        """what manifests say of the tensors"""
        self._stager: staging.Stager | None = None
        self._pending: PendingSave | None = None
        self._newest: str | None = None  # complete checkpoint of this run
        self._newest_time: float | None = None  # of all checkpoints
        self._damaged: set[str] = set()

    # Out

    def allocate(self, state: State) -> int:
        """Choose the rows that this rank writes, and allocate memory for asynchronous saves.

        Call it once, before the first `save`.

        Returns:
            Bytes of the copies of this machine's ranks; 0 without asynchronous saves.

        Raises:
            ConfigError: the copies of this machine's ranks do not fit into its memory.
        """
        self._tensors = describe_state(state)
        tensors: list[Tensor] = []
        for part, part_tensors in state.items():
            owned = tensor_files.owned_rows(part_tensors, self.world.rank, self.world.size)
            self._starts[part] = {name: start for name, (_, start) in owned.items()}
            tensors += [tensor for tensor, _ in owned.values()]
        if not self._config.async_checkpoint:
            return 0
        n_bytes = staging.buffer_size(tensors)
        needed = sum(self.world.all_gather_on_node(n_bytes))
        with self.world.all_or_none():
            _require_host_memory(needed)
        self._stager = staging.Stager(n_bytes, self.world.device)
        return needed

    def save(self, state: State, run_info: RunInfo, progress: TrainingProgress) -> None:
        """Start to copy `state` to host memory and to write it; `is_pending` until `commit`.

        The state must not change until `wait_for_copy`, or without `async_checkpoint` until
        `commit`.
        """
        assert self._pending is None, "commit the previous checkpoint first"
        slices: staging.Slices = {}
        for part, starts in self._starts.items():
            slices[part] = {
                name: Rows(to_local(state[part][name]), start) for name, start in starts.items()
            }
        if self._stager is not None:
            slices = self._stager.copy(slices)
        saved: Future[str] = Future()
        # A daemon thread: a rank that fails must not wait for a thread that waits for other ranks.
        thread = threading.Thread(
            target=self._write_in_thread,
            args=(saved, slices, run_info, progress),
            name="checkpoint",
            daemon=True,
        )
        thread.start()
        self._pending = PendingSave(progress.step, thread, saved)

    def wait_for_copy(self) -> None:
        """Make the device complete the copies of the last `save` before what follows.

        Called before the optimizer step, which changes what is copied.
        """
        if self._stager is not None:
            self._stager.protect_copies()

    @property
    def is_pending(self) -> bool:
        """Whether a checkpoint has to be committed."""
        return self._pending is not None

    @property
    def is_writing(self) -> bool:
        """Whether this rank is still writing its part of a checkpoint."""
        return self._pending is not None and self._pending.thread.is_alive()

    def commit(self) -> tuple[int, str]:
        """Wait on all ranks for the pending checkpoint and return its step and UUID.

        Raises:
            RunError: the checkpoint could not be written and was removed.
        """
        pending = self._pending
        assert pending is not None
        self._pending = None
        try:
            name = self.world.wait_for(pending.saved)
        finally:
            if pending.saved.done():
                # To its end: PyTorch aborts a process that exits while a thread frees tensors.
                pending.thread.join()
        return pending.step, name

    def _write_in_thread(
        self,
        saved: Future[str],
        slices: staging.Slices,
        run_info: RunInfo,
        progress: TrainingProgress,
    ) -> None:
        try:
            if self._stager is not None:
                self._stager.synchronize()
            saved.set_result(self._write(slices, run_info, progress))
        except OSError as error:  # of the directory, Determined's metadata, storage, or retention
            step = progress.step
            problem = f"rank {self.world.rank} cannot save the checkpoint of step {step}: {error}"
            saved.set_exception(RunError(problem))
        except BaseException as error:
            saved.set_exception(error)

    def _write(self, slices: staging.Slices, run_info: RunInfo, progress: TrainingProgress) -> str:
        """Write a checkpoint of all ranks; return its UUID."""
        is_rank0 = self.world.rank == 0
        manifest = Manifest(
            format=FORMAT,
            time=self._next_time() if is_rank0 else 0.0,
            world_size=self.world.size,
            files={},
            tensors=self._tensors,
            **dict(run_info),
            **dict(progress),
        )
        try:
            with self.store.new_checkpoint(_metadata(manifest), self._saver_world) as new:
                self._write_files(new.path, slices, manifest)
        except RunError as error:
            kept = "no checkpoint exists yet"
            if self._newest:
                kept = f"checkpoint {self._newest} is kept"
            raise type(error)(f"{error}; {kept}", rank_local=error.rank_local) from None
        self._newest = new.name
        if is_rank0:
            self.store.add(self.store.locate(new.name), manifest)
            self.store.prune(self._config.keep_checkpoints, self._damaged)
        return new.name

    def _next_time(self) -> float:
        """Return a time later than that of every checkpoint: clocks differ, and are set back."""
        if self._newest_time is None:
            saved, _ = self.store.list_saved(WEIGHTS)
            self._newest_time = max((entry.manifest.time for entry in saved), default=0.0)
        self._newest_time = max(time.time(), self._newest_time + 1e-3)
        return self._newest_time

    def _write_files(self, path: Path, slices: staging.Slices, manifest: Manifest) -> None:
        """Write all files of a checkpoint to `path`; if a rank fails, remove them."""
        world = self._saver_world
        with world.all_or_none():  # outside of `try`, which would delete what exists
            if any(path.iterdir()):
                raise RunError(f"{path}: already exists; checkpoints are never overwritten")
        try:
            needed = self._needed_bytes(slices)
            with world.all_or_none():
                if world.rank == 0:
                    (path / DRAFT).touch()  # before any rank writes, so that a kill leaves it
                _require_finite(slices)
                remedy = f"free space, then {self._config.rerun} to resume"
                require_space(path, needed, remedy)
            with world.all_or_none(), _oserror_as_run_error(path, world.rank, needed):
                own_files = self._write_own_files(path, slices)
            files: dict[str, FileRecord] = {}
            for files_of_rank in world.all_gather_object(own_files):
                files |= files_of_rank
            with world.all_or_none():
                if world.rank == 0:
                    self._require_visible(path, files)
                    self.store.require_lock()
                    with _oserror_as_run_error(path, world.rank, needed):
                        write_manifest(path, manifest.model_copy(update={"files": files}))
        except Exception:
            if world.rank == 0:
                if self.store.writes_in_place:
                    shutil.rmtree(path, ignore_errors=True)
                self.store.require_lock()  # another run may have removed the files
            raise

    def _needed_bytes(self, slices: staging.Slices) -> int:
        """Return the bytes of all ranks that write to this rank's disk."""
        own = 0
        for part in slices.values():
            own += sum(tensor.nbytes for tensor, _ in part.values())
        if self.store.writes_in_place:
            return sum(self._saver_world.all_gather_object(own))
        return sum(self._saver_world.all_gather_on_node(own))

    def _write_own_files(self, path: Path, slices: staging.Slices) -> dict[str, FileRecord]:
        """Write the files of this rank; return what the manifest says of each."""
        rank = self.world.rank
        files: dict[str, FileRecord] = {}
        for part, part_slices in slices.items():
            for number, names in enumerate(tensor_files.group_by_size(part_slices)):
                file = path / f"{part}-{rank:05}-{number:05}.safetensors"
                group = {name: part_slices[name] for name in names}
                checksum = tensor_files.write_tensors(file, group)
                files[file.name] = FileRecord(bytes=file.stat().st_size, crc32c=checksum)
        if rank == 0:
            for name, content in self._extra_files.items():
                write_durably(path / name, content)
                files[name] = record(path / name)
        return files

    def _require_visible(self, path: Path, files: Collection[str]) -> None:
        """Raise RunError if this rank does not see the files of all in the directory they share."""
        if not self.store.writes_in_place:
            return
        missing = sorted(name for name in files if not (path / name).exists())
        if missing:
            problem = f"{missing[0]} was written, but {socket.gethostname()} cannot see it"
            raise RunError(f"{path}: {problem}; {SHARED}")

    # In

    @contextmanager
    def open(self, location: Location, parts: Collection[str] = PARTS) -> Iterator[SavedState]:
        """Yield the checkpoint at `location` on all ranks together, to compare and then read it.

        Args:
            parts: those that can be read into.

        Raises:
            CheckpointError: the checkpoint is damaged, as was found now or in the block.
        """
        is_downloaded = is_url(location.where)
        with self.store.open(location, self.world, parts) as path:
            seen = self.world.all_gather_object((path / MANIFEST).is_file())
            if any(seen) and not all(seen):
                sees, misses = seen.index(True), seen.index(False)
                problem = f"rank {sees} can see this checkpoint, but rank {misses} cannot"
                raise ConfigError(f"{path}: {problem}; {SHARED}")
            try:
                with self.world.all_or_none():
                    manifest = read_manifest(path)
                launch = self.world.launch
                share, n_shares = launch.rank, launch.world_size
                if is_downloaded or not self.store.writes_in_place:
                    # Every machine has its own copy.
                    share, n_shares = launch.local_rank, launch.local_size
                yield SavedState(path, manifest, self.world, share, n_shares)
            except CheckpointError as error:
                self._damaged.add(path.name)
                copy = rf"[^\s=]*/{re.escape(path.name)}"  # on any machine
                if not is_downloaded:
                    copy = f"(?<=init_from=){copy}"  # a damaged file is named where it lies
                problems = [re.sub(copy, str(location), problem) for problem in error.problems]
                raise type(error)(*problems) from None

    def add_saved(self, location: Location, manifest: Manifest) -> None:
        """Count the complete checkpoint that this run resumed from, on all ranks together."""
        self._newest = location.name
        self.world.run_in_thread_on_rank0(self.store.add, location, manifest)


def _require_host_memory(needed: int) -> None:
    available = host_memory().available
    if needed > available:
        problem = (
            f"a copy of the state needs {format_bytes(needed)} of memory on"
            f" {socket.gethostname()}, {format_bytes(available)} are available"
        )
        remedy = "use async_checkpoint: false or more machines"
        raise ConfigError(f"async_checkpoint: {problem}; {remedy}")


def _require_finite(slices: staging.Slices) -> None:
    for part, part_slices in slices.items():
        for name, (tensor, _) in part_slices.items():
            if not tensor_files.is_finite(tensor):
                problem = f"{part}.{name} holds inf or NaN, so it is not saved"
                raise ConfigError(f"{problem}: lower lr")


def _metadata(manifest: Manifest) -> dict[str, Any]:
    """Return what Determined shows of a checkpoint."""
    metadata: dict[str, Any] = {
        "steps_completed": manifest.step,
        "tokens": manifest.tokens,
        "world_size": manifest.world_size,
        "sharding": manifest.sharding,
        "amp_dtype": manifest.hyperparameters.get("amp_dtype"),
        "parameters": model_config(manifest.model).n_parameters,
    }
    if manifest.validation_loss is not None:
        metadata["validation_loss"] = manifest.validation_loss
    return metadata


@contextmanager
def _oserror_as_run_error(path: Path, rank: int, needed: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(path).free
        problem = f"rank {rank} cannot write: {error.strerror or error}"
        space = f"a checkpoint needs {needed:,} bytes, {free:,} are free"
        raise RunError(f"{path}: {problem}; {space}") from None
