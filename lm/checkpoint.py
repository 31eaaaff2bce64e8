"""Saving and restoring, all ranks together, inside Determined's checkpoint context; what a checkpoint is on disk
is in `manifest`.

    python -m lm.checkpoint list RUN            the checkpoints of a run's folder
    python -m lm.checkpoint verify CHECKPOINT   is every file what was written?

Saving happens in the background: `Checkpointer.save` copies the state to host memory and returns, a thread
writes it, and at a later step boundary, once all ranks have said that theirs is done, `settle` closes the
matter on all of them. The thread's collectives have a process group of their own.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from determined import core
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from lm.errors import ConfigError, RunError
from lm.manifest import FORMAT, INDEX, CheckpointError, Manifest, Reader, read_manifest, record, verify, write_manifest
from lm.mesh import World


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


class Stateful(Protocol):
    def state_dict(self) -> Mapping[str, Tensor]:
        """The live tensors by name: saving reads them, restoring writes into them."""
        ...


class Checkpointer:
    """Saves and restores the tensors of named stateful objects.

    Args:
        folder: where checkpoints are kept off the cluster, None on it.
        background: called first in every writing thread, to choose its process group.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        context: core.CheckpointContext,
        ranks: World,
        folder: Path | None,
        background: Callable[[], None],
    ) -> None:
        self._config = config
        self._context = context
        self._ranks = ranks
        self._folder = folder
        self._in_place = context._storage_manager.store_path_is_direct_access()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=torch.cuda.is_available(),
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=torch.cuda.is_available(),
            )
        )
        self._background = background
        self._writing: Future[tuple[int, str]] | None = None
        self._kept: list[tuple[int, float, str]] = []
        """on the cluster: step, validation loss and uuid of what this process saved"""

    # ---- saving ----------------------------------------------------------------------------------------

    def save(self, state: Mapping[str, Stateful], about: Mapping[str, Any]) -> None:
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
                self._background()
                writing.set_result(self._write(staged, about))
            except BaseException as error:
                writing.set_exception(error)

        # A daemon: a rank that fails must not wait for what the thread may wait for in vain.
        threading.Thread(target=write, name="checkpoint", daemon=True).start()
        self._writing = writing

    @property
    def pending(self) -> bool:
        return self._writing is not None

    @property
    def writing(self) -> bool:
        """Whether this rank's part is still being written."""
        return self._writing is not None and not self._writing.done()

    def settle(self) -> tuple[int, str]:
        """Wait for the checkpoint that is being written, on all ranks, and return its step and uuid.

        Raises:
            RunError: it could not be written; nothing of it is left.
        """
        assert self._writing is not None
        writing, self._writing = self._writing, None
        return self._ranks.together(writing.result)

    def _write(self, staged: dict[str, Tensor], about: Mapping[str, Any]) -> tuple[int, str]:
        needed = sum(part.nbytes for part in map(_local, staged.values()))
        metadata = {"steps_completed": about["step"]}
        with ExitStack() as stack:
            if self._in_place:
                path, uuid = stack.enter_context(self._context.store_path(metadata, shard=True))
                self._fill(path, staged, about, needed)
            else:
                path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="checkpoint-")))
                self._fill(path, staged, about, needed)
                uuid = self._context.upload(path, metadata, shard=True)
        if self._ranks.rank == 0:
            self._retire(about["step"], about["validation_loss"], uuid)
        return about["step"], uuid

    def _fill(self, path: Path, staged: dict[str, Tensor], about: Mapping[str, Any], needed: int) -> None:
        """Write all files of a checkpoint to `path`; on any rank's failure leave nothing and fail on all."""
        rank, group = self._ranks.rank, self._ranks.saver

        def look() -> None:
            _refuse_nonfinite(staged)
            everywhere = needed * (self._ranks.size if self._in_place else 1)
            free = shutil.disk_usage(path).free
            if free < everywhere:
                raise RunError(f"{path}: disk full: a checkpoint needs {everywhere:,} bytes, {free:,} are free")

        try:
            self._ranks.together(look, group)
            writer = dcp.FileSystemWriter(path, single_file_per_rank=True, sync_files=True)
            self._ranks.together(lambda: _dcp_save(staged, writer, group, path, needed), group)
            names = [file.name for file in path.glob(f"__{rank}_*")] + ([INDEX] if rank == 0 else [])
            records = self._ranks.together(lambda: {name: record(path / name) for name in names}, group)
            files = {name: entry for part in self._ranks.gather(records, group) for name, entry in part.items()}
            fields = dict(about) | {"format": FORMAT, "time": time.time(), "world_size": self._ranks.size}
            manifest = Manifest.model_validate(fields | {"files": files})
            self._ranks.together(lambda: write_manifest(path, manifest) if rank == 0 else None, group)
        except Exception:
            if rank == 0 or not self._in_place:
                shutil.rmtree(path, ignore_errors=True)
            raise

    # ---- keeping and deleting --------------------------------------------------------------------------

    def _retire(self, step: int, loss: float | None, uuid: str) -> None:
        """Delete whole checkpoints that are neither among the newest nor the best. Rank 0 alone."""
        if self._folder is None:
            self._kept.append((step, _rank_loss(loss), uuid))
            for entry in _superfluous(self._kept, self._config.keep_checkpoints):
                self._context.delete(entry[2])
                self._kept.remove(entry)
            return
        whole = []
        for path in self._folder.iterdir():
            if path.name.startswith(DELETED):  # a kill came between the two steps below
                shutil.rmtree(path, ignore_errors=True)
            elif path.is_dir():
                try:
                    manifest = read_manifest(path)
                except CheckpointError:
                    continue
                whole.append((manifest.step, _rank_loss(manifest.validation_loss), path.name))
        for *_, name in _superfluous(whole, self._config.keep_checkpoints):
            # Renamed first: whatever happens next, it is no checkpoint any more, and not half of one.
            gone = (self._folder / name).rename(self._folder / f"{DELETED}{name}")
            shutil.rmtree(gone)

    # ---- restoring -------------------------------------------------------------------------------------

    def restore(self, uuid: str, choose: Callable[[Manifest], Mapping[str, Stateful]]) -> Manifest:
        """Check the checkpoint `uuid`, and read it into what `choose` picks.

        Args:
            uuid: as `settle` returned it, or a folder's path.
            choose: looks at the manifest and returns the objects to restore, or raises to refuse.

        Raises:
            CheckpointError: it is damaged; nothing was read.
            ConfigError: its tensors are not those of the objects; every difference is listed, nothing was read.
        """
        with self._context.restore_path(uuid) as where:
            path = Path(where)
            manifest = self._ranks.together(lambda: self._check(path))
            wanted = _named(choose(manifest))
            reader = Reader(path, manifest)
            self._ranks.together(lambda: _compare(path, reader, wanted))
            dcp.load(wanted, storage_reader=reader, process_group=self._ranks.control)
        return manifest

    def _check(self, path: Path) -> Manifest:
        manifest = read_manifest(path)
        verify(path, manifest, self._ranks.rank, self._ranks.size)
        return manifest


DELETED = ".deleted-"


def _rank_loss(loss: float | None) -> float:
    return float("inf") if loss is None else loss


def _superfluous(whole: list[tuple[int, float, str]], keep: int | None) -> list[tuple[int, float, str]]:
    """Of (step, validation loss, name): all but the `keep` of the highest steps and the one of the lowest loss."""
    if keep is None:
        return []
    ordered = sorted(whole)
    best = min(whole, key=lambda entry: (entry[1], -entry[0]))
    return [entry for entry in ordered[:-keep] if entry is not best]


def _named(state: Mapping[str, Stateful]) -> dict[str, Tensor]:
    return {f"{part}.{name}": tensor for part, holder in state.items() for name, tensor in holder.state_dict().items()}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _refuse_nonfinite(staged: Mapping[str, Tensor]) -> None:
    for name, tensor in staged.items():
        local = _local(tensor)
        if local.numel() and not torch.isfinite(torch.stack(torch.aminmax(local.detach()))).all():
            raise RunError(f"{name} holds inf or NaN; it is not saved, the last checkpoint is kept: lower lr")


def _dcp_save(
    staged: dict[str, Tensor], writer: dcp.FileSystemWriter, group: dist.ProcessGroup, path: Path, needed: int
) -> None:
    try:
        dcp.save(staged, storage_writer=writer, process_group=group)
    except dcp.api.CheckpointException as error:  # not an Exception, and too long for a person
        rank, (cause, _) = next(iter(error.failures.items()))
        free = shutil.disk_usage(path).free
        if free < needed:
            raise RunError(f"{path}: disk full: rank {rank} needs {needed:,} bytes, {free:,} are free") from None
        raise RuntimeError(f"writing {path} failed on rank {rank}: {type(cause).__name__}: {cause}") from cause


def _compare(path: Path, reader: Reader, wanted: Mapping[str, Tensor]) -> None:
    """Refuse a checkpoint that lacks a tensor, has one too many, or one of another shape or dtype."""
    parts = {name.partition(".")[0] for name in wanted}
    there = {
        name: (entry.size, entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and name.partition(".")[0] in parts
    }
    problems = [f"{name}: not in the checkpoint" for name in wanted if name not in there]
    problems += [f"{name}: only in the checkpoint" for name in there if name not in wanted]
    problems += [
        f"{name}: {list(there[name][0])} {there[name][1]} in the checkpoint, here {list(t.shape)} {t.dtype}"
        for name, t in wanted.items()
        if name in there and there[name] != (t.shape, t.dtype)
    ]
    if problems:
        raise ConfigError(f"{path}: its tensors are not this run's:", *problems)


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
    _compare(folder, reader, weights)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what no_dist asks for
        dcp.load(weights, storage_reader=reader, no_dist=True)


# ---- command ------------------------------------------------------------------------------------------


def describe(folder: Path) -> str:
    """One line on the checkpoint in `folder`: what it is, or why it is none."""
    try:
        manifest = read_manifest(folder)
        verify(folder, manifest)
    except CheckpointError as error:
        return f"{folder.name}  damaged: {error}"
    size = sum(entry.bytes for entry in manifest.files.values())
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))
    loss = "" if manifest.validation_loss is None else f"  validation loss {manifest.validation_loss:.4f}"
    ranks = f"{manifest.sharding} x {manifest.world_size}"
    return f"{folder.name}  step {manifest.step}  {when}  {size / 1e6:,.1f} MB  {ranks}{loss}  whole"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lm.checkpoint", description="Look at checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="all checkpoints of a run").add_argument("folder", type=Path, metavar="RUN")
    commands.add_parser("verify", help="compare every file with its checksum").add_argument(
        "folder", type=Path, metavar="CHECKPOINT"
    )
    args = parser.parse_args(arguments)
    try:
        if args.command == "verify":
            verify(args.folder, read_manifest(args.folder))
            print(describe(args.folder))
            return 0
        runs = args.folder / "checkpoints"
        if not runs.is_dir():
            raise ConfigError(f"{args.folder}: is no run's folder, it has no checkpoints/")
        paths = [path for path in runs.iterdir() if path.is_dir() and not path.name.startswith(DELETED)]
        for path in sorted(paths, key=lambda path: path.stat().st_mtime):
            print(describe(path))
        return 0
    except RunError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
