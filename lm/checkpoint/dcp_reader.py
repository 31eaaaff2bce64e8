"""PyTorch's distributed checkpoint reader for untrusted directories."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import EnumType
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lm.checkpoint.manifest import INDEX, CheckpointError, Manifest
from lm.errors import ConfigError


def _member(kind: Any, name: Any) -> Any:
    """Replace `getattr`, with which Python 3.11.0 to 3.11.3 pickle an enumeration's member, and allow only that."""
    if not (isinstance(kind, EnumType) and isinstance(name, str) and name in kind.__members__):
        raise pickle.UnpicklingError(f"it asks for {name!r} of {kind!r}")
    return kind.__members__[name]


class _IndexUnpickler(pickle._Unpickler):
    """Unpickler for DCP's index that allows only its classes; any other pickle could run code.

    It extends the pure-Python unpickler because only there `load_build` can be overridden: a pickle could otherwise
    set attributes of the classes themselves, e.g. replace a method of `Path` for the rest of the process.
    """

    DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32")
    METADATA = ("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")
    METADATA += ("TensorStorageMetadata", "_MEM_FORMAT_ENCODING")
    PATHS = ("PosixPath", "PurePosixPath", "Path")
    ALLOWED: ClassVar = {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *(("torch", name) for name in DTYPES),
        *(("torch.distributed.checkpoint.metadata", name) for name in METADATA),
        *(("pathlib", name) for name in PATHS),
        *(("pathlib._local", name) for name in PATHS),  # Python 3.13
    }
    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)

    def load_build(self) -> None:
        target = self.stack[-2]
        if isinstance(target, type) or not is_dataclass(target):
            raise pickle.UnpicklingError(f"it changes {target!r}")
        super().load_build()  # pyright: ignore[reportAttributeAccessIssue]

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}


class Reader(dcp.FileSystemReader):
    """Checkpoint reader that refuses an index with anything but tensors in the files that the manifest lists."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        super().__init__(directory)
        self._directory = directory
        self._files = manifest.files.keys()

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Return DCP's index.

        Raises:
            CheckpointError: the index is damaged, or holds anything but tensors in the manifest's files.
        """
        path = self._directory / INDEX
        try:
            with path.open("rb") as file:
                index = _IndexUnpickler(file).load()
            if not isinstance(index, Metadata):
                raise pickle.UnpicklingError(f"it is a {type(index).__name__}")
            for name, entry in index.state_dict_metadata.items():
                if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata):
                    raise pickle.UnpicklingError(f"{name!r} is not a tensor")
            for info in index.storage_data.values():
                if info.relative_path not in self._files or info.transform_descriptors:
                    raise pickle.UnpicklingError(f"it refers to {info.relative_path!r}")
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from None
        except Exception as error:  # a damaged pickle can raise anything
            raise CheckpointError(f"{path}: damaged or malicious: {str(error) or type(error).__name__}") from None
        return index

    def compare(self, wanted: Mapping[str, Tensor]) -> None:
        """Check that the checkpoint holds the tensors `wanted` and no others of the objects that they belong to.

        Raises:
            ConfigError: lists every tensor that is missing, unexpected, or of another shape or dtype.
        """
        parts = {name.partition(".")[0] for name in wanted}
        saved = {
            name: (entry.size, entry.properties.dtype)
            for name, entry in self.read_metadata().state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and name.partition(".")[0] in parts
        }
        problems = [f"{name}: not in the checkpoint" for name in wanted if name not in saved]
        problems += [f"{name}: only in the checkpoint" for name in saved if name not in wanted]
        problems += [
            f"{name}: {list(saved[name][0])} {saved[name][1]} in the checkpoint, now {list(t.shape)} {t.dtype}"
            for name, t in wanted.items()
            if name in saved and saved[name] != (t.shape, t.dtype)
        ]
        if problems:
            raise ConfigError(f"{self._directory}: the tensors differ from the model's:", *problems)

    def load(self, wanted: Mapping[str, Tensor], **kwargs: Any) -> None:
        """Read the tensors `wanted` in place; `kwargs` are passed to `dcp.load`.

        Raises:
            CheckpointError: the files hold something other than the tensors in the index.
        """
        try:
            dcp.load(dict(wanted), storage_reader=self, **kwargs)
        except dcp.api.CheckpointException as error:
            raise CheckpointError(f"{self._directory}: cannot be read: {first_failure(error)}") from None


def first_failure(error: dcp.api.CheckpointException) -> str:
    """Return the error of the lowest rank that failed, in one line."""
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
