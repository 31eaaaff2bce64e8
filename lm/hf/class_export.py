"""A directory of Hugging Face written again by `save_pretrained`, with other weights.

What is not a weight is copied byte for byte, so that what loads the source loads the result. The
weights keep their names and layouts. Before the directory appears, `from_pretrained` reads it, and
its values are compared with those that were to be written.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lm.checkpoint.tensor_files import WRITE_BYTES
from lm.data.tokenizer.files import MODEL_CONFIG
from lm.errors import ConfigError, RunError
from lm.fileio import open_regular, sync
from lm.hf.class_weights import ClassWeights, open_weights, quiet_transformers
from lm.hf.files import (
    SAFETENSORS_INDEX,
    WEIGHT_SUFFIXES,
    follow_links,
    list_weight_files,
    read_object,
    to_json,
)
from lm.storage.folder import drafted, writing
from lm.transformers_model import one_line

FILE_SIZE = "5GB"
"""of weights, at most"""


@dataclass(frozen=True)
class Exported:
    """What an export wrote."""

    n_bytes: int
    """of weights, with those of other parts"""
    left_out: Sequence[Path]
    """files that hold the weights of the source in other formats"""


@torch.no_grad()
def export_directory(
    opened: ClassWeights,
    get_tensor: Callable[[str], Tensor],
    out: Path,
    dtype: str | None = None,
    files: Mapping[str, bytes | None] | None = None,
    stop_ids: int | list[int] | None = None,
) -> Exported:
    """Write the directory of `opened` to `out`, with other weights of its language model.

    Args:
        get_tensor: returns a complete parameter or buffer of the network by its name.
        dtype: of these weights, one of `WEIGHT_DTYPES`, except for those that transformers keeps
            in float32; None = of each tensor that of the source.
        files: contents by name, in place of what the directory has; None = it is left out.
        stop_ids: `eos_token_id` of config.json; None = that of the directory.

    Raises:
        ConfigError: `out` exists, or transformers cannot write a layout that it reads.
        RunError: `out` cannot be written, or a weight exceeds the range of its dtype.
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out}: already exists and is not overwritten; use another directory")
    opened.require_savable()
    if opened.quantization is not None:
        dtype = dtype or "bfloat16"
    contents: dict[str, bytes | None] = {}
    config = read_object(opened.directory / MODEL_CONFIG)
    changed = _change_config(config, dtype, stop_ids)
    if changed != config:
        contents[MODEL_CONFIG] = to_json(changed)
    contents |= files or {}
    others = _list_others(opened.directory)
    state = _collect(opened, get_tensor, dtype)
    n_bytes = sum(tensor.nbytes for tensor in state.values())
    with writing(out), drafted(out, n_bytes + others.n_bytes) as draft:
        _save(opened, state, draft)
        others.copy(opened.directory, draft, contents)
        for name, content in contents.items():
            if content is not None:
                (draft / name).write_bytes(content)
        _compare(state, draft)
    return Exported(n_bytes, others.left_out)


# ---- weights


def _collect(
    opened: ClassWeights, get_tensor: Callable[[str], Tensor], dtype: str | None
) -> dict[str, Tensor]:
    """Return all tensors of the model that was saved, with other ones of its language model."""
    state: dict[str, Tensor] = {}
    if opened.other_parts:
        state = opened.load_saved()
    dtypes = opened.dtypes(None if dtype is None else getattr(torch, dtype))
    places = opened.saved.state_dict(keep_vars=True)
    written: dict[int, Tensor] = {}
    """by the tensor of `saved`, which is one for weights that are tied"""
    for place, name in opened.names.items():
        key = id(places[place])
        if key not in written:
            written[key] = _convert(place, get_tensor(opened.tied_to[name]), dtypes[place])
        state[place] = written[key]
    return state


def _convert(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    converted = tensor.to(dtype)
    if not converted.is_floating_point() or converted.isfinite().all():
        return converted
    problem = f"has values above {torch.finfo(dtype).max:g}, the maximum of its dtype"
    problem = f"{problem}; use --dtype bfloat16"
    if not tensor.isfinite().all():
        problem = "contains inf or NaN"
    raise RunError(f"{name}: {problem}")


def _save(opened: ClassWeights, state: Mapping[str, Tensor], draft: Path) -> None:
    """Write the files of weights to `draft`, and no others."""
    from transformers import GenerationConfig

    opened.saved.generation_config = GenerationConfig()  # that of the model may be refused
    try:
        with quiet_transformers():
            opened.saved.save_pretrained(draft, state_dict=dict(state), max_shard_size=FILE_SIZE)
    except OSError:  # `writing` says it
        raise
    except Exception as error:  # of safetensors, if the disk is full, or of any type
        raise RunError(f"{draft}: transformers cannot write it: {one_line(error)}") from None
    mode = (draft / MODEL_CONFIG).stat().st_mode  # the umask's; files of safetensors have 0600
    for path in draft.iterdir():
        if path.name.endswith(WEIGHT_SUFFIXES):
            path.chmod(mode)
            with path.open("ab") as file:
                sync(file)
        else:
            path.unlink()


def _compare(state: Mapping[str, Tensor], draft: Path) -> None:
    """Raise ConfigError if the directory `draft` is not read as the tensors `state`."""
    read = open_weights(draft).load_saved()
    for name, tensor in state.items():
        if not read[name].to(tensor.dtype).equal(tensor):  # which may be read in float32
            raise ConfigError(f"{name}: transformers would not read it as it writes it")


# ---- other files


@dataclass(frozen=True)
class _Others:
    """Files of a directory other than its weights."""

    copied: Sequence[Path]
    left_out: Sequence[Path]
    """which have the weights of the source in other formats"""

    @property
    def n_bytes(self) -> int:
        return sum(follow_links(path).stat().st_size for path in self.copied)

    def copy(self, directory: Path, draft: Path, replaced: Collection[str]) -> None:
        """Copy the files that are not `replaced`."""
        for path in self.copied:
            name = path.relative_to(directory)
            if str(name) in replaced:
                continue
            copy = draft / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            with (
                open(follow_links(path), "rb", opener=open_regular) as file,
                copy.open("xb") as copied,
            ):
                shutil.copyfileobj(file, copied, WRITE_BYTES)


def _list_others(directory: Path) -> _Others:
    """Return the files of `directory`, except for hidden ones and those of its weights."""
    weights = {*list_weight_files(directory), directory / SAFETENSORS_INDEX}
    copied: list[Path] = []
    left_out: list[Path] = []
    for path in sorted(directory.rglob("*")):
        is_hidden = any(part.startswith(".") for part in path.relative_to(directory).parts)
        if is_hidden or path in weights or not path.is_file():
            continue
        if path.name.endswith(WEIGHT_SUFFIXES):
            left_out.append(path)
        else:
            copied.append(path)
    return _Others(copied, left_out)


def _change_config(
    config: Mapping[str, Any], dtype: str | None, stop_ids: int | list[int] | None
) -> dict[str, Any]:
    """Return a config.json with another dtype and `eos_token_id`, if they are not None."""
    changed = dict(config)
    if isinstance(config.get("text_config"), dict):
        changed["text_config"] = _change_config(config["text_config"], dtype, stop_ids)
    if dtype is not None:
        changed.pop("quantization_config", None)
        changed |= dict.fromkeys({"dtype", "torch_dtype"} & config.keys(), dtype)
    if stop_ids is not None and config.get("eos_token_id") is not None:
        changed["eos_token_id"] = stop_ids
    return changed
