"""Saving and restoring, all ranks together, inside Determined's checkpoint context; what a checkpoint is on disk
is in `manifest`.

    python -m lm.checkpoint list RUN            the checkpoints of a run's folder
    python -m lm.checkpoint verify CHECKPOINT   is every file what was written?

Saving happens in the background: `Checkpointer.save` copies the state to host memory and returns, a thread
writes it, and at a later step boundary, once all ranks have said that theirs is done, `settle` closes the
matter on all of them. The thread's collectives have a process group of their own.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from determined import core
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from lm.checkpoint.dcp_reader import Reader, first_failure
from lm.checkpoint.manifest import (
    FORMAT,
    INDEX,
    MANIFEST,
    CheckpointError,
    FileRecord,
    Manifest,
    read_manifest,
    record,
    verify,
    write_manifest,
)
from lm.checkpoint.retention import SavedCheckpoint, expired, list_saved, prune
from lm.errors import ConfigError, RunError
from lm.fileio import write_durably
from lm.runtime.world import World

POLL_SECONDS = 1.0


"""Seconds that a rank waits for its own writing before it asks how the others' goes."""


class CheckpointConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint_rate: int = Field(50, gt=0, description="steps between checkpoints; one more behind the last step")
    keep_checkpoints: int | None = Field(
        2, gt=0, description="newest checkpoints to keep, besides that of the best validation loss; null = all"
    )
    async_checkpoint: bool = Field(True, description="go on training while a checkpoint is written")
    resume: str = Field(
        "auto", description="auto = go on from the newest whole checkpoint; fresh = start anew; or a checkpoint's path"
    )
    init_from: str | None = Field(
        None, description="checkpoint or run to start with the weights of: a folder, or on a cluster a uuid"
    )


class Stateful(Protocol):
    def state_dict(self) -> Mapping[str, Tensor]:
        """The live tensors by name: saving reads them, restoring writes into them."""
        ...


class Checkpointer:
    """Saves and restores the tensors of named stateful objects.

    Args:
        folder: where checkpoints are kept off the cluster, None on it.
        beside: further files of every checkpoint, by name: the tokenizer's.
        background: called first in every writing thread, to choose its process group.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        context: core.CheckpointContext,
        world: World,
        folder: Path | None,
        extra_files: Mapping[str, bytes],
        thread_init: Callable[[], None],
    ) -> None:
        self._config = config
        self._context = context
        self._world = world
        self._folder = folder
        self._extra_files = extra_files
        self._in_place = context._storage_manager.store_path_is_direct_access()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=torch.cuda.is_available(),
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=torch.cuda.is_available(),
            )
        )
        self._thread_init = thread_init
        self._writing: tuple[threading.Thread, Future[tuple[int, str]]] | None = None
        self._saved: list[SavedCheckpoint] = []
        """on the cluster: what this process saved, and what it went on from"""
        self._damaged: set[str] = set()
        """names of folders that `restore` found damaged: retention neither counts nor deletes them"""

    # ---- saving ----------------------------------------------------------------------------------------

    def save(self, state: Mapping[str, Stateful], run_info: Mapping[str, Any]) -> None:
        """Take a copy of `state` and begin to write it. `pending` is then true until `settle`.

        Args:
            about: the manifest's fields, `format`, `time`, `world_size` and `files` excepted.
        """
        assert self._writing is None, "settle the last one first"
        staged = self._stager.stage(_named(state))
        assert isinstance(staged, dict)
        writing: Future[tuple[int, str]] = Future()

        def write() -> None:
            try:
                self._thread_init()
                writing.set_result(self._write(staged, run_info))
            except BaseException as error:
                writing.set_exception(error)

        # A daemon: a rank that fails must not wait for what the thread may wait for in vain.
        thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        thread.start()
        self._writing = thread, writing

    @property
    def pending(self) -> bool:
        return self._writing is not None

    @property
    def writing(self) -> bool:
        """Whether this rank's part is still being written."""
        return self._writing is not None and self._writing[0].is_alive()

    def commit(self) -> tuple[int, str]:
        """Wait for the checkpoint that is being written, on all ranks, and return its step and uuid.

        Raises:
            RunError: it could not be written; nothing of it is left.
        """
        assert self._writing is not None
        (thread, writing), self._writing = self._writing, None

        def finish() -> bool:
            thread.join(POLL_SECONDS)
            if writing.done():
                thread.join()  # to its very end: PyTorch aborts a process that exits while a thread frees tensors
                writing.result()
            return writing.done()

        # Asked again and again, since what one rank waits for, or has failed at, the others cannot know.
        while not all(self._world.all_gather_object(self._world.all_or_none(finish))):
            pass
        return writing.result()

    def _write(self, staged: dict[str, Tensor], run_info: Mapping[str, Any]) -> tuple[int, str]:
        metadata = {"steps_completed": run_info["step"]}
        run_info = {**run_info, "time": self._after_all() if self._world.rank == 0 else 0.0}
        with ExitStack() as stack:
            if self._in_place:
                path, uuid = stack.enter_context(self._context.store_path(metadata, shard=True))
                self._write_files(path, staged, run_info)
            else:
                path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="checkpoint-")))
                self._write_files(path, staged, run_info)
                # Without a selector, a folder with the device and inode of another node's is taken for the same one.
                uuid = self._context.upload(path, metadata, shard=True, selector=lambda _: True)
        if self._world.rank == 0:
            self._retire(SavedCheckpoint(run_info["time"], run_info["validation_loss"], uuid))
        return run_info["step"], uuid

    def _after_all(self) -> float:
        """The time, or later than that of any checkpoint that is there: clocks differ, and are set back."""
        known = list_saved(self._folder, self._damaged) if self._folder else self._saved
        return max([time.time(), *(entry.time + 1e-3 for entry in known)])

    def _write_files(self, path: Path, staged: dict[str, Tensor], run_info: Mapping[str, Any]) -> None:
        """Write all files of a checkpoint to `path`; on any rank's failure leave nothing and fail on all."""
        rank, group, together = self._world.rank, self._world.saver, self._world.all_or_none
        whole = sum(tensor.numel() * tensor.itemsize for tensor in staged.values())  # replicas are written once
        mine = sum(_local(tensor).nbytes for tensor in staged.values())
        needed = whole if self._in_place else min(whole, mine * self._world.launch.local_size)

        def look() -> None:
            _refuse_nonfinite(staged)
            _refuse_full(path, needed)

        def write() -> dict[str, FileRecord]:
            with _explaining(path, needed):
                # What is written was copied from the GPU before: copying ahead would only wait for training there.
                writer = dcp.FileSystemWriter(
                    path, single_file_per_rank=True, sync_files=True, overwrite=False, per_thread_copy_ahead=0
                )
                dcp.save(staged, storage_writer=writer, process_group=group)
                names = [file.name for file in path.glob(f"__{rank}_*")]
                if rank == 0:
                    for name, content in self._extra_files.items():
                        write_durably(path / name, content)
                    names += [INDEX, *self._extra_files]
                return {name: record(path / name) for name in names}

        def seal(files: dict[str, FileRecord]) -> None:
            if self._in_place and (unseen := sorted(name for name in files if not (path / name).exists())):
                raise RunError(
                    f"{path}: {unseen[0]} was written, but not where {socket.gethostname()} can see it; checkpoints"
                    " have to be in a folder that all machines share"
                )
            fields = {"format": FORMAT, "world_size": self._world.size, "files": files}
            with _explaining(path, needed):
                write_manifest(path, Manifest.model_validate(dict(run_info) | fields))

        together(lambda: _refuse_used(path), group)  # before the `try`: what is there is not ours to delete
        try:
            together(look, group)
            parts = self._world.all_gather_object(together(write, group), group)
            files = {name: entry for part in parts for name, entry in part.items()}
            together(lambda: seal(files) if rank == 0 else None, group)
        except Exception:
            if rank == 0 and self._in_place:
                shutil.rmtree(path, ignore_errors=True)
            raise

    # ---- keeping and deleting --------------------------------------------------------------------------

    def _retire(self, newest: SavedCheckpoint) -> None:
        """Delete whole checkpoints that are neither among the newest nor the best. Rank 0 alone."""
        keep = self._config.keep_checkpoints
        if self._folder:
            prune(self._folder, keep, self._damaged)
            return
        self._saved.append(newest)
        for entry in expired(self._saved, keep):
            self._context.delete(entry.name)
            self._saved.remove(entry)

    def count(self, uuid: str, manifest: Manifest) -> None:
        """Let retention on a cluster count the checkpoint that the run goes on from, which an earlier process saved."""
        if not self._folder and not Path(uuid).is_absolute():
            self._saved.append(SavedCheckpoint(manifest.time, manifest.validation_loss, uuid))

    # ---- restoring -------------------------------------------------------------------------------------

    def restore(self, uuid: str, choose: Callable[[Manifest], Mapping[str, Stateful]]) -> Manifest:
        """Check the checkpoint `uuid`, and read it into what `choose` picks.

        Args:
            uuid: as `settle` returned it, or a folder's path.
            choose: looks at the manifest and returns the objects to restore, or raises to refuse.

        Raises:
            CheckpointError: it is damaged, and nothing was read; or it was made to harm, and some of it was read.
            ConfigError: its tensors are not those of the objects; every difference is listed, nothing was read.
        """
        place = Path(uuid) if Path(uuid).is_absolute() else self._folder and self._folder / uuid
        with nullcontext(place) if place else self._context.restore_path(uuid) as where:
            path = Path(where)
            seen = self._world.all_gather_object((path / MANIFEST).is_file())
            if any(seen) and not all(seen):
                raise ConfigError(
                    f"{path}: this checkpoint is there for rank {seen.index(True)}, and not for rank"
                    f" {seen.index(False)}; it has to be in a folder that all machines share"
                )
            try:
                manifest = self._world.all_or_none(lambda: self._check(path))
                wanted = _named(choose(manifest))
                reader = Reader(path, manifest)
                self._world.all_or_none(lambda: reader.compare(wanted))
                reader.load(wanted, process_group=self._world.control)
            except CheckpointError:
                self._damaged.add(path.name)
                raise
        return manifest

    def restore_first(
        self,
        candidates: Sequence[str],
        choose: Callable[[Manifest], Mapping[str, Stateful]],
        log: Callable[[str], None],
    ) -> tuple[str, Manifest]:
        """`restore` the first of `candidates` that is sound.

        Args:
            say: is told of each one that is passed over.

        Returns:
            Which one it was, and its manifest.

        Raises:
            CheckpointError: none is; all are named.
            ConfigError: as `restore`.
        """
        problems: list[str] = []
        for uuid in candidates:
            try:
                return uuid, self.restore(uuid, choose)
            except CheckpointError as error:
                if uuid != candidates[-1]:
                    log(f"passing over {error}")
                problems += error.problems
        if len(candidates) > 1 or self._folder is None:
            problems.append("no other checkpoint to go on from: start anew, or fork from an earlier one")
        raise CheckpointError(*problems)

    def _check(self, path: Path) -> Manifest:
        manifest = read_manifest(path)
        launch = self._world.launch
        if self._in_place:
            verify(path, manifest, launch.rank, launch.world_size)
        else:  # every machine has files of its own
            verify(path, manifest, launch.local_rank, launch.local_size)
        return manifest


def _named(state: Mapping[str, Stateful]) -> dict[str, Tensor]:
    return {f"{part}.{name}": tensor for part, holder in state.items() for name, tensor in holder.state_dict().items()}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _refuse_nonfinite(staged: Mapping[str, Tensor]) -> None:
    for name, tensor in staged.items():
        local = _local(tensor)
        if local.numel() and not torch.isfinite(torch.stack(torch.aminmax(local.detach()))).all():
            raise RunError(f"{name} holds inf or NaN; it is not saved, the last checkpoint is kept: lower lr")


def _refuse_used(path: Path) -> None:
    if any(path.iterdir()):
        raise RunError(f"{path}: is there already, and nothing is ever overwritten")


def _refuse_full(path: Path, needed: int) -> None:
    free = shutil.disk_usage(path).free
    if free < needed:
        raise RunError(f"{path}: disk full: a checkpoint needs {needed:,} bytes, {free:,} are free")


@contextmanager
def _explaining(path: Path, needed: int) -> Iterator[None]:
    try:
        yield
    except (dcp.api.CheckpointException, OSError) as error:
        cause = first_failure(error) if isinstance(error, dcp.api.CheckpointException) else str(error)
        free = shutil.disk_usage(path).free  # DCP hides that a disk is full
        raise RunError(
            f"{path}: cannot be written, {cause}; a checkpoint needs {needed:,} bytes, {free:,} are free"
        ) from None


def load_weights(folder: Path, model: nn.Module) -> None:
    """Read the weights of the checkpoint in `folder` into `model`, in a single process, whatever wrote them.

    Raises:
        CheckpointError: a file is damaged.
        ConfigError: the weights are not the model's.
    """
    manifest = read_manifest(folder)
    verify(folder, manifest)
    weights = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    reader = Reader(folder, manifest)
    reader.compare(weights)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what no_dist asks for
        reader.load(weights, no_dist=True)
