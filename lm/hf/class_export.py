"""Directories of Hugging Face, written by `save_pretrained`.

What is not a weight of the directory that a model was read from is copied byte for byte, so that
what loads it loads the result. The weights keep their names and layouts. Before the new directory
appears, `from_pretrained` reads it, and its values are compared with those to be written.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lm.data.tokenizer.files import MODEL_CONFIG
from lm.errors import ConfigError, RunError
from lm.fileio import sync
from lm.hf.class_weights import ClassWeights, open_weights, quiet_transformers
from lm.hf.files import WEIGHT_SUFFIXES, read_object, to_json
from lm.storage.folder import drafted, writing
from lm.transformers_model import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILE_SIZE = "5GB"
"""of weights, at most"""


@torch.no_grad()
def export_directory(
    opened: ClassWeights,
    get_tensor: Callable[[str], Tensor],
    out: Path,
    dtype: str | None = None,
    files: Mapping[str, bytes | None] | None = None,
    stop_ids: int | list[int] | None = None,
) -> int:
    """Write the directory of `opened` to `out`, with other weights of its language model.

    Args:
        get_tensor: returns a complete parameter or buffer of the network by its name.
        dtype: of these weights, one of `WEIGHT_DTYPES`, except for those that transformers keeps
            in float32; None = of each tensor that of the source.
        files: see `write_directory`.
        stop_ids: `eos_token_id` of config.json; None = that of the directory.

    Returns and Raises: see `write_directory`; also
        ConfigError: transformers cannot write a layout that it reads.
    """
    opened.require_savable()
    if opened.quantization is not None:
        dtype = dtype or "bfloat16"
    contents: dict[str, bytes | None] = {}
    config = read_object(opened.directory / MODEL_CONFIG)
    changed = _change_config(config, dtype, stop_ids)
    if changed != config:
        contents[MODEL_CONFIG] = to_json(changed)
    state: dict[str, Tensor] = {}
    if opened.other_parts:
        state = opened.load_saved()

    def get_saved(place: str) -> Tensor:
        return get_tensor(opened.tied_to[opened.names[place]])

    dtypes = opened.dtypes(None if dtype is None else getattr(torch, dtype))
    state |= collect(opened.saved, opened.names, get_saved, dtypes)
    return write_directory(opened.saved, state, out, contents | dict(files or {}), opened.directory)


# ---- weights


def collect(
    model: PreTrainedModel,
    names: Iterable[str],
    get_tensor: Callable[[str], Tensor],
    dtypes: Mapping[str, torch.dtype],
) -> dict[str, Tensor]:
    """Return tensors of `model` by their names, in `dtypes`; tied ones are one.

    Raises:
        RunError: one exceeds the range of its dtype.
    """
    places = model.state_dict(keep_vars=True)
    converted: dict[int, Tensor] = {}
    """by the tensor of `model`"""
    state: dict[str, Tensor] = {}
    for name in names:
        key = id(places[name])
        if key not in converted:
            converted[key] = _convert(name, get_tensor(name), dtypes[name])
        state[name] = converted[key]
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


def write_directory(
    model: PreTrainedModel,
    state: Mapping[str, Tensor],
    out: Path,
    files: Mapping[str, bytes | None],
    source: Path | None = None,
) -> int:
    """Write `state`, all tensors of `model`, and `files` to the new directory `out`.

    Args:
        files: contents by name, in place of what `source` has; None = it is left out.
        source: a directory whose other files are copied, but hidden ones and weights.

    Returns:
        Bytes of weights.

    Raises:
        ConfigError: `out` exists, or transformers would not read what it writes.
        RunError: `out` cannot be written.
    """
    in_memory = {tensor.data_ptr(): tensor.nbytes for tensor in state.values()}  # ties once
    n_bytes = sum(in_memory.values())
    with writing(out), drafted(out, n_bytes) as draft:
        _save(model, state, draft)
        if source is not None:
            _copy_others(source, draft)
        write_files(draft, files)
        _compare(state, draft)
    return n_bytes


def _save(model: PreTrainedModel, state: Mapping[str, Tensor], draft: Path) -> None:
    """Write the files of weights to `draft`, and no others."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig()  # that of the model may be refused
    try:
        with quiet_transformers(io.StringIO()):
            model.save_pretrained(draft, state_dict=dict(state), max_shard_size=FILE_SIZE)
    except OSError:  # `writing` says it
        raise
    except Exception as error:  # of safetensors, if the disk is full, or of any type
        raise RunError(f"{draft}: cannot be written: {one_line(error)}") from None
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


def write_files(draft: Path, files: Mapping[str, bytes | None]) -> None:
    """Write contents to `draft` by name, in place of what is there; None = nothing."""
    for name, content in files.items():
        path = draft / name
        path.unlink(missing_ok=True)
        if content is not None:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)


def _copy_others(source: Path, draft: Path) -> None:
    """Copy the files of `source`, except for hidden ones and weights."""
    for path in source.rglob("*"):
        name = path.relative_to(source)
        is_hidden = any(part.startswith(".") for part in name.parts)
        if path.is_file() and not is_hidden and not path.name.endswith(WEIGHT_SUFFIXES):
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, draft / name)


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
