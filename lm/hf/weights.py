"""Download, and chunked reading and writing, of Hugging Face model directories.

Only safetensors files are read: weights in pickles (`.bin`) are refused.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lm.data import tokenizer
from lm.errors import ConfigError, RunError, oserror_as_config_error
from lm.fileio import sync
from lm.hf.families import TensorSlice

INDEX_JSON = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
DOWNLOADED = ("config.json", "model*.safetensors", INDEX_JSON, *tokenizer.FILES)
DTYPES = {"float32": ("F32", torch.float32), "bfloat16": ("BF16", torch.bfloat16), "float16": ("F16", torch.float16)}
SLAB_BYTES = 64 << 20
"""Float32 values that are converted at once."""
SHARD_BYTES = 5 * 10**9
"""Maximum size of an exported file; transformers' default."""


_BUFFERS = re.compile(r".*(\.attn\.(masked_)?bias|rotary_emb\.inv_freq)")
"""Constants that older versions of transformers save with the weights: causal masks and rotary frequencies."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@oserror_as_config_error
def find_source(source: str, revision: str | None = None) -> Path:
    """Return the directory `source`, or download the model with that name on the Hub.

    Raises:
        ConfigError: it does not exist, or cannot be downloaded.
    """
    if Path(source).is_dir():
        return Path(source)
    nothing = ConfigError(f"{source}: not a directory, and not a name on the Hugging Face Hub (OWNER/MODEL)")
    if not _HUB_NAME.fullmatch(source):
        raise nothing
    import huggingface_hub
    from huggingface_hub import errors

    elsewhere = (
        "import on a machine with network access and pass its OUT to the run, or copy the directory that"
        f" `hf download {source}` prints and import it"
    )
    try:
        return Path(huggingface_hub.snapshot_download(source, revision=revision, allow_patterns=list(DOWNLOADED)))
    except errors.GatedRepoError:
        raise ConfigError(
            f"{source}: gated: request access at https://huggingface.co/{source}, then `hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(
            f"--revision: {source} has no revision {revision!r}; omit it for the default branch"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{source}: not a directory, and not found on the Hub; if it is private, run `hf auth login`"
            " or set HF_TOKEN"
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        offline = "HF_HUB_OFFLINE is set" if huggingface_hub.constants.HF_HUB_OFFLINE else str(error).splitlines()[0]
        raise ConfigError(f"{source}: not in the cache, and cannot be downloaded: {offline}; {elsewhere}") from None
    except errors.HFValidationError:
        raise nothing from None
    except (errors.HfHubHTTPError, OSError) as error:
        raise ConfigError(
            f"{source}: download failed: {str(error).splitlines()[0]}; rerun the same command to resume it"
        ) from None


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]


class Weights:
    """The tensors in a directory of safetensors files, by their names in the full model.

    Raises:
        ConfigError: a file is missing, or the weights are pickled.
        RunError: a file is damaged.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        for path in _weight_files(folder):
            try:
                with safe_open(path, "pt") as file:
                    for name in file.keys():  # noqa: SIM118 - not a dict
                        stored = file.get_slice(name)
                        full = name if name.startswith((prefix, "lm_head.")) else prefix + name
                        self.tensors[full] = StoredTensor(path, name, stored.get_dtype(), tuple(stored.get_shape()))
            except FileNotFoundError:
                raise ConfigError(f"{path}: missing; download the directory again") from None
            except OSError as error:
                raise ConfigError(f"{path}: cannot be read: {error}") from None
            except SafetensorError as error:
                raise RunError(f"{path}: damaged: {error}; download it again") from None

    def compare(self, where: Path, wanted: Mapping[str, tuple[int, ...]]) -> None:
        """Check that the tensors have the names and shapes `wanted` and a supported dtype.

        Raises:
            ConfigError: lists every difference.
        """
        supported = {code for code, _ in DTYPES.values()}
        problems = [f"{name}: missing" for name in wanted if name not in self.tensors]
        for name, stored in self.tensors.items():
            if name not in wanted:
                if not _BUFFERS.fullmatch(name):
                    problems.append(f"{name}: unexpected tensor")
            elif stored.shape != wanted[name]:
                problems.append(f"{name}: {list(stored.shape)} in the file, {list(wanted[name])} in config.json")
            elif stored.dtype not in supported:
                problems.append(f"{name}: {stored.dtype} is a quantized dtype; use the model without quantization")
        if problems:
            rest = [f"... and {len(problems) - 20} more"] if len(problems) > 20 else []
            raise ConfigError(f"{where}: the tensors do not match config.json:", *problems[:20], *rest)

    def rows(self, part: TensorSlice, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` of `part` in our orientation, reading only those."""
        stored = self.tensors[part.name]
        with safe_open(stored.path, "pt") as file:  # opened each time, as mapped pages count as memory
            tensor = file.get_slice(stored.name)
            return tensor[:, start:stop].T if part.transposed else tensor[start:stop]


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_JSON
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        names = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
        if not names or any(name != Path(name).name or name in ("", "..") for name in names):
            raise ConfigError(f"{index}: weight_map must contain file names in this directory")
        return [folder / name for name in names]
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    pickled = next(folder.glob("*.bin"), None) or next(folder.glob("*.pth"), None)
    found = f"{pickled.name} is a pickle, which can execute code, and is not read" if pickled else "neither exists"
    raise ConfigError(
        f"{folder}: needs {WEIGHTS} or {INDEX_JSON}; {found}. To convert, load it with transformers and"
        " save_pretrained(DIRECTORY, safe_serialization=True)"
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, or raise ConfigError."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; a model directory needs one") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: invalid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return content


# ---- writing ----------------------------------------------------------------------------------------------


class Slot(NamedTuple):
    """File and offset of an exported tensor's values."""

    file: BinaryIO
    offset: int


@contextmanager
def _on_disk(path: Path) -> Iterator[BinaryIO]:
    with path.open("wb") as file:
        yield file
        sync(file)


def open_files(draft: Path, parts: Sequence[TensorSlice], dtype: str, files: ExitStack) -> dict[str, Slot]:
    """Create the safetensors files for `parts` with their headers and index, and return each tensor's slot.

    A safetensors file consists of the length of its header (8 bytes, little endian), the header (JSON), and the
    values. The files are on disk when `files` is closed.
    """
    code, torch_dtype = DTYPES[dtype]
    groups: list[list[TensorSlice]] = [[]]
    filled = 0
    for part in parts:
        size = torch_dtype.itemsize * torch.Size(part.shape).numel()
        if groups[-1] and filled + size > SHARD_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(part)
        filled += size
    slots = {}
    weight_map = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05}-of-{len(groups):05}.safetensors" if len(groups) > 1 else WEIGHTS
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for part in group:
            start, end = end, end + torch_dtype.itemsize * torch.Size(part.shape).numel()
            header[part.name] = {"dtype": code, "shape": part.shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # aligns the values
        file = files.enter_context(_on_disk(draft / name))
        file.write(struct.pack("<Q", len(text)) + text)
        slots |= {part.name: Slot(file, 8 + len(text) + header[part.name]["data_offsets"][0]) for part in group}
        weight_map |= dict.fromkeys((part.name for part in group), name)
    if len(groups) > 1:
        total = sum(torch_dtype.itemsize * torch.Size(part.shape).numel() for part in parts)
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (draft / INDEX_JSON).write_text(json.dumps(content, indent=2) + "\n")
    return slots


def write_rows(slot: Slot, part: TensorSlice, first: int, chunk: Tensor, dtype: torch.dtype) -> int:
    """Write the rows of `part` in `chunk`, which starts at row `first`, and return the number of bytes."""
    start, stop = max(first, part.start), min(first + len(chunk), part.stop)
    if start >= stop:
        return 0
    rows = chunk[start - first : stop - first]
    written = 0
    slot.file.seek(slot.offset + (start - part.start) * chunk[0].numel() * dtype.itemsize)
    for slab in (rows.T if part.transposed else rows).split(max(1, SLAB_BYTES // (4 * chunk[0].numel()))):
        values = slab.to(dtype).contiguous()
        if dtype == torch.float16 and not values.isfinite().all():
            raise RunError(f"{part.name}: has values above 65504, the maximum of float16; use --dtype bfloat16")
        written += slot.file.write(values.view(torch.uint8).numpy().data)
    return written
