"""PyTorch's distributed checkpoint reader for folders that are not trusted."""

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

from lm.checkpoint.manifest import (
    INDEX,
    CheckpointError,
    Manifest,
)
from lm.errors import ConfigError


def _member(kind: Any, name: Any) -> Any:
    """What pickles of Python 3.11.0 to 3.11.3 want `getattr` for: a member of an enumeration, and nothing else."""
    if not (isinstance(kind, EnumType) and isinstance(name, str) and name in kind.__members__):
        raise pickle.UnpicklingError(f"it asks for {name!r} of {kind!r}")
    return kind.__members__[name]


class _IndexUnpickler(pickle._Unpickler):
    """Reads DCP's index and refuses to make anything else: a pickle can otherwise run code.

    It is the one written in Python, because of `load_build`: the other cannot be kept from setting attributes
    of the classes themselves, e.g. replacing a method of `Path` for the rest of the process.
    """

    ALLOWED: ClassVar = {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *(("torch", dtype) for dtype in ("float32", "float16", "bfloat16", "float64", "int64", "int32")),
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        *(("pathlib", name) for name in ("PosixPath", "PurePosixPath", "Path")),
        *(("pathlib._local", name) for name in ("PosixPath", "PurePosixPath", "Path")),  # Python 3.13
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
    """PyTorch's reader for a folder that need not be trusted.

    Raises:
        CheckpointError: the index holds anything but tensors in the files that the manifest lists.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder)
        self._folder = folder
        self._files = manifest.files.keys()

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        path = self._folder / INDEX
        try:
            with path.open("rb") as file:
                index = _IndexUnpickler(file).load()
            if not isinstance(index, Metadata):
                raise pickle.UnpicklingError(f"it is a {type(index).__name__}")
            for name, entry in index.state_dict_metadata.items():
                if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata):
                    raise pickle.UnpicklingError(f"{name!r} is no tensor")
            for place in index.storage_data.values():
                if place.relative_path not in self._files or place.transform_descriptors:
                    raise pickle.UnpicklingError(f"it leads to {place.relative_path!r}")
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from None
        except Exception as error:  # a damaged pickle can raise anything
            raise CheckpointError(f"{path}: damaged or hostile: {str(error) or type(error).__name__}") from None
        return index

    def compare(self, wanted: Mapping[str, Tensor]) -> None:
        """Look whether the folder holds the tensors `wanted` and, of the parts they name, no others.

        Raises:
            ConfigError: with every tensor that is missing, one too many, or of another shape or dtype.
        """
        parts = {name.partition(".")[0] for name in wanted}
        there = {
            name: (entry.size, entry.properties.dtype)
            for name, entry in self.read_metadata().state_dict_metadata.items()
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
            raise ConfigError(f"{self._folder}: its tensors are not this run's:", *problems)

    def load(self, wanted: Mapping[str, Tensor], **how: Any) -> None:
        """Read the tensors `wanted`, in place; `how` are dcp.load's own arguments.

        Raises:
            CheckpointError: something in the files is no tensor, or not the one that the index promises.
        """
        try:
            dcp.load(dict(wanted), storage_reader=self, **how)
        except dcp.api.CheckpointException as error:
            raise CheckpointError(f"{self._folder}: cannot be read: {first_failure(error)}") from None


def first_failure(error: dcp.api.CheckpointException) -> str:
    """The lowest rank and what it met, in one line; DCP's own exception, no Exception, is too long for a person."""
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
