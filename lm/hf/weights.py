"""A folder of Hugging Face's: found or downloaded, and its safetensors read and written piece by piece.

Nothing pickled is ever read: weights in `.bin` files are refused.
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
"""Of float32 values converted at a time."""
SHARD_BYTES = 5 * 10**9
"""Of an exported file, as transformers does it."""


_BUFFERS = re.compile(r".*(\.attn\.(masked_)?bias|rotary_emb\.inv_freq)")
"""Constants that older versions of transformers saved beside the weights: causal masks and rotary frequencies."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@oserror_as_config_error
def find_source(source: str, revision: str | None = None) -> Path:
    """The folder that `source` names, downloaded first where it is a name on the hub.

    Raises:
        ConfigError: there is none, or it may not be downloaded; says what to do.
    """
    if Path(source).is_dir():
        return Path(source)
    nothing = ConfigError(f"{source}: no such folder, and no name on the Hugging Face hub (OWNER/MODEL)")
    if not _HUB_NAME.fullmatch(source):
        raise nothing
    import huggingface_hub
    from huggingface_hub import errors

    elsewhere = (
        "import on a machine with network and give its OUT to the run, or copy the folder that"
        f" `hf download {source}` fills and import that"
    )
    try:
        return Path(huggingface_hub.snapshot_download(source, revision=revision, allow_patterns=list(DOWNLOADED)))
    except errors.GatedRepoError:
        raise ConfigError(
            f"{source}: gated: ask for access at https://huggingface.co/{source}, then `hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(f"--revision: {source} has no revision {revision!r}; leave it out for the newest") from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{source}: no such folder, and nothing on the hub that you may see; for a private one: `hf auth login`"
            " or set HF_TOKEN"
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        offline = "HF_HUB_OFFLINE is set" if huggingface_hub.constants.HF_HUB_OFFLINE else str(error).splitlines()[0]
        raise ConfigError(f"{source}: not in the cache, and not downloaded: {offline}; {elsewhere}") from None
    except errors.HFValidationError:
        raise nothing from None
    except (errors.HfHubHTTPError, OSError) as error:
        raise ConfigError(f"{source}: not downloaded: {str(error).splitlines()[0]}; the same command goes on") from None


class Stored(NamedTuple):
    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]


class Weights:
    """The tensors of a folder of safetensors, by the names that they have in a whole model.

    Raises:
        ConfigError: there are none, or not all; or a pickle is there in their stead.
        RunError: a file is damaged.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self.tensors: dict[str, Stored] = {}
        for path in _weight_files(folder):
            try:
                with safe_open(path, "pt") as file:
                    for name in file.keys():  # noqa: SIM118 - no dict
                        there = file.get_slice(name)
                        full = name if name.startswith((prefix, "lm_head.")) else prefix + name
                        self.tensors[full] = Stored(path, name, there.get_dtype(), tuple(there.get_shape()))
            except FileNotFoundError:
                raise ConfigError(f"{path}: missing; download the folder again, or give the whole of it") from None
            except OSError as error:
                raise ConfigError(f"{path}: cannot be read: {error}") from None
            except SafetensorError as error:
                raise RunError(f"{path}: damaged: {error}; download it again") from None

    def compare(self, where: Path, wanted: Mapping[str, tuple[int, ...]]) -> None:
        """Look whether the tensors are those `wanted`, by name and shape, and can be read.

        Raises:
            ConfigError: listing every difference.
        """
        oserror_as_config_error = {code for code, _ in DTYPES.values()}
        problems = [f"{name}: missing" for name in wanted if name not in self.tensors]
        for name, there in self.tensors.items():
            if name not in wanted:
                if not _BUFFERS.fullmatch(name):
                    problems.append(f"{name}: config.json knows no such tensor")
            elif there.shape != wanted[name]:
                problems.append(f"{name}: {list(there.shape)} in the file, {list(wanted[name])} by config.json")
            elif there.dtype not in oserror_as_config_error:
                problems.append(f"{name}: {there.dtype} is no weight but a quantised one; give the model unquantised")
        if problems:
            rest = [f"... and {len(problems) - 20} more"] if len(problems) > 20 else []
            raise ConfigError(f"{where}: its tensors are not those that its config.json needs:", *problems[:20], *rest)

    def rows(self, part: TensorSlice, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of what `part` is to our tensor, read and no more of the file."""
        there = self.tensors[part.name]
        with safe_open(there.path, "pt") as file:  # anew each time: what is mapped counts as memory
            tensor = file.get_slice(there.name)
            return tensor[:, start:stop].T if part.transposed else tensor[start:stop]


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_JSON
    if index.is_file():
        position_ids = read_json(index).get("weight_map")
        names = sorted(set(map(str, position_ids.values()))) if isinstance(position_ids, dict) else []
        if not names or any(name != Path(name).name or name in ("", "..") for name in names):
            raise ConfigError(f"{index}: weight_map names no files of this folder")
        return [folder / name for name in names]
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    pickled = next(folder.glob("*.bin"), None) or next(folder.glob("*.pth"), None)
    found = f"{pickled.name} is a pickle, which can run code and is never read" if pickled else "none is there"
    raise ConfigError(
        f"{folder}: needs {WEIGHTS} or {INDEX_JSON}; {found}. To convert: load it with transformers and"
        " save_pretrained(FOLDER, safe_serialization=True)"
    )


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; a model's folder has one") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: is no JSON object")
    return content


# ---- writing ----------------------------------------------------------------------------------------------


class Slot(NamedTuple):
    """Where an exported tensor's values go."""

    file: BinaryIO
    offset: int


@contextmanager
def _on_disk(path: Path) -> Iterator[BinaryIO]:
    with path.open("wb") as file:
        yield file
        sync(file)


def begin_files(draft: Path, parts: Sequence[TensorSlice], dtype: str, files: ExitStack) -> dict[str, Slot]:
    """Open the files that will hold `parts`, write their headers and index, and say where each tensor goes.

    A safetensors file is the length of its header (8 bytes, little endian), the header (JSON), and the values. When
    `files` closes without an error, all is on disk.
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
        text += b" " * (-len(text) % 8)  # values are aligned
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
    """Write what `chunk`, rows of ours from `first` on, has of `part`; returns the bytes written."""
    start, stop = max(first, part.start), min(first + len(chunk), part.stop)
    if start >= stop:
        return 0
    rows = chunk[start - first : stop - first]
    written = 0
    slot.file.seek(slot.offset + (start - part.start) * chunk[0].numel() * dtype.itemsize)
    for slab in (rows.T if part.transposed else rows).split(max(1, SLAB_BYTES // (4 * chunk[0].numel()))):
        values = slab.to(dtype).contiguous()
        if dtype == torch.float16 and not values.isfinite().all():
            raise RunError(f"{part.name}: has values above 65504, float16's largest; use --dtype bfloat16")
        written += slot.file.write(values.view(torch.uint8).numpy().data)
    return written
