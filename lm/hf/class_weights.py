"""Weights of a class of transformers, loaded by its `from_pretrained` and sent to all ranks.

Tensors in files can have other names and layouts than the parameters of the class: a matrix of each
expert instead of one of all, fused projections, prefixes of a model that contains the language
model. `from_pretrained` is called twice: at the start with tensors on the meta device, which shows
whether each parameter is filled once; then, on one rank, with those of the files, mapped into
memory. Their values, or the bytes of those that stay in MXFP4, get to the shards of all ranks a few
rows at a time.

Code that is next to the weights is not executed.
"""

from __future__ import annotations

import copy
import io
import logging
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lm.checkpoint.headers import full_shape
from lm.checkpoint.manifest import CheckpointError
from lm.checkpoint.tensor_files import require_finite, torch_dtype
from lm.data.tokenizer.files import MODEL_CONFIG
from lm.errors import ConfigError, RunError, error_prefix, limit_problems
from lm.hf.files import (
    READ_DTYPES,
    find_slices,
    follow_links,
    list_weight_files,
    read_object,
)
from lm.hf.quantization import (
    BLOCKS,
    DEQUANTIZED,
    LARGEST_EXPONENT,
    SCALES,
    as_dequantized,
    dequantizing,
    quantization_of,
    without_quantization,
)
from lm.hf.saved_model import build_saved_model, find_names
from lm.runtime.world import World
from lm.shards import local_rows
from lm.training import four_bits
from lm.training.experts import find_in_mxfp4
from lm.training.four_bits import MXFP4
from lm.transformers_model import (
    build_network,
    language_model_of,
    one_line,
    one_line_errors,
    read_config,
)
from lm.transformers_private import as_saved

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

SENT_BYTES = 16 << 20
"""of a tensor, at a time"""


@dataclass(frozen=True)
class ClassWeights:
    """Weights in files, and the model of transformers that they are of."""

    directory: Path
    config: PreTrainedConfig
    """of the model that was saved"""
    quantization: Mapping[str, Any] | None
    stored: Mapping[str, Tensor]
    """tensors on the meta device as those of the files, dequantized, by their names there"""
    saved: PreTrainedModel
    """the model that was saved, on the meta device"""
    names: Mapping[str, str]
    """in the network, of its tensors, by name in `saved`"""
    tied_to: Mapping[str, str]
    """the first name of each tensor of the network, by each of its names"""
    dtype: torch.dtype
    """in which `saved` holds the values of the files, with what the class keeps in float32"""
    unused: Sequence[str]
    """names of tensors in the files that `from_pretrained` does not read"""

    @property
    def other_parts(self) -> list[str]:
        """Names in `saved` of tensors of its other parts, e.g. of an image encoder."""
        return [name for name in self.saved.state_dict() if name not in self.names]

    @torch.no_grad()
    def load_saved(self, in_mxfp4: Collection[str] = ()) -> dict[str, Tensor]:
        """Return all tensors of the model that was saved, by name there, in memory once.

        Those that are not converted are pages of the files.

        Args:
            in_mxfp4: names there of tensors that are not dequantized: those of the files are
                returned, too.

        Raises:
            ConfigError: one of these is not in MXFP4.
            RunError: a file cannot be read.
        """
        from safetensors import SafetensorError  # benchmarks.gpu runs without
        from safetensors.torch import load_file

        tensors: dict[str, Tensor] = {}
        for path in list_weight_files(self.directory):
            try:
                tensors |= load_file(follow_links(path))
            except (OSError, SafetensorError) as error:  # since its header was read
                raise RunError(f"{path}: cannot be read: {error}") from None
        packed: dict[str, Tensor] = {}
        for name in in_mxfp4:
            if name + BLOCKS not in tensors:
                problem = f"base_dtype: mxfp4: {self.directory}: {name} is not in MXFP4"
                raise ConfigError(f"{problem}; use base_dtype: nf4, or remove base_dtype")
            for part in (BLOCKS, SCALES):
                packed[name + part] = tensors.pop(name + part)
            # One value in memory for all.
            tensors[name] = torch.zeros((), dtype=self.dtype).expand(self.stored[name].shape)
        config = copy.deepcopy(self.config)
        dequantize = None
        if self.quantization is not None:
            config.quantization_config = dict(self.quantization)
            dequantize = dequantizing(self.quantization)
        used = {name: tensor for name, tensor in tensors.items() if name not in self.unused}
        with error_prefix(str(self.directory)):
            loaded = load_class(
                type(self.saved), config, used, self.dtype, quantization_config=dequantize
            )
        return loaded.model.state_dict() | packed

    @torch.no_grad()
    def load(self, in_mxfp4: Collection[str] = ()) -> dict[str, Tensor]:
        """Return all tensors of the network by name, complete, in the dtype of the files.

        Args:
            in_mxfp4: names of tensors that are returned as in the files.

        Raises:
            ConfigError, RunError: see `load_saved`; or a weight differs from the one that it is
                tied to.
            CheckpointError: one is inf or NaN.
        """
        saved = self.load_saved([place for place in self.names if self.names[place] in in_mxfp4])
        tensors: dict[str, Tensor] = {}
        for place, name in self.names.items():
            if name not in in_mxfp4:
                tensors[name] = saved[place]
                continue
            tensors[name + BLOCKS] = saved[place + BLOCKS].flatten(2)
            tensors[name + SCALES] = saved[place + SCALES]
            if (saved[place + SCALES] > LARGEST_EXPONENT).any():
                raise CheckpointError(f"{self.directory / place}: contains inf or NaN")
        for name, tensor in tensors.items():
            require_finite(tensor, self.directory / name)
            first_name = self.tied_to.get(name, name)
            if first_name != name and not tensor.equal(tensors[first_name]):
                problem = f"{MODEL_CONFIG} ties {name} to {first_name}"
                remedy = f"set tie_word_embeddings: false in {MODEL_CONFIG} to use it"
                raise ConfigError(
                    f"{self.directory}: {problem}, but the files have a different one; {remedy}"
                )
        return tensors

    @torch.no_grad()
    def read(self, network: nn.Module, world: World | None = None) -> None:
        """Fill this rank's shards of all parameters and persistent buffers of `network`.

        Args:
            network: has the names of `build_network`, and any dtypes and devices.
            world: all ranks, of which the first one loads; None = this process alone.

        Raises:
            ConfigError, CheckpointError, RunError: see `load`.
        """
        targets: dict[str, Tensor] = dict(network.named_buffers())
        targets |= dict(network.named_parameters())
        in_mxfp4 = find_in_mxfp4(network)
        if world is None:
            values = self.load(in_mxfp4)
        else:
            values = world.run_in_thread_on_rank0(self.load, in_mxfp4) or {}
        dtypes = {name: tensor.dtype for name, tensor in values.items()}
        if world is not None:
            dtypes = world.all_gather_object(dtypes)[0]
        for name, dtype in dtypes.items():
            if name in targets:  # else it is tied to another one
                _fill(targets[name], values.get(name), dtype, world, slice(None))
        for name in sorted(in_mxfp4):
            n_pairs = MXFP4.inner_width(targets[name].shape[-1]) // 2
            for part, columns in ((BLOCKS, slice(n_pairs)), (SCALES, slice(n_pairs, None))):
                _fill(targets[name], values.get(name + part), torch.uint8, world, columns)

    def dtypes(self, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
        """Return the dtype of each tensor of `saved` in files of `dtype`, by name in `saved`.

        It is float32 for what transformers keeps in it.

        Args:
            dtype: None = of each tensor that of the files, or if it has another name there, the one
                that it is loaded in.
        """
        if dtype is None:
            tensors = {**self.saved.state_dict(), **self.stored}
        else:
            used = {name: self.stored[name] for name in self.stored if name not in self.unused}
            loaded = load_class(type(self.saved), self.config, used, dtype, device_map="meta")
            tensors = loaded.model.state_dict()
        return {name: tensor.dtype for name, tensor in tensors.items()}

    def require_savable(self) -> None:
        """Check on the meta device that the layout of the files can be written again.

        Raises:
            ConfigError: transformers cannot reverse what it does when it reads them.
        """
        problems: list[str] = []
        try:
            reverted = as_saved(self.saved, _without_ties(self.saved, self.stored))
        except Exception as error:  # of any type
            raise ConfigError(f"{self.directory}: {_UNWRITABLE}: {one_line(error)}") from None
        for name, tensor in reverted.items():
            stored = self.stored.get(name)
            if stored is not None and stored.shape != tensor.shape:
                shapes = f"{list(stored.shape)} in the files, {list(tensor.shape)} if written again"
                problems.append(f"{name}: {shapes}")
        if problems:
            raise ConfigError(f"{self.directory}: {_UNWRITABLE}:", *limit_problems(problems))

    def notes(self, network: nn.Module) -> list[str]:
        """Return a line on each thing in the files that `network` does not have as it is."""
        notes: list[str] = []
        if self.quantization is not None and not find_in_mxfp4(network):
            notes.append(DEQUANTIZED)
        if self.other_parts:
            others = f"{len(self.other_parts)} tensors of its other parts"
            modules = {".".join(name.split(".")[:2]) for name in self.other_parts}
            shown = ", ".join(limit_problems(sorted(modules)))
            notes.append(f"{others} are not trained, and are exported: {shown}")
        if self.unused:
            shown = ", ".join(limit_problems(self.unused))
            problem = "not tensors of the model: not used, as in transformers, and not exported"
            notes.append(f"{problem}: {shown}")
        return notes


_UNWRITABLE = "transformers cannot write what it reads in this layout"


def _fill(
    target: Tensor, value: Tensor | None, dtype: torch.dtype, world: World | None, columns: slice
) -> None:
    """Fill this rank's rows of `target`, a few rows at a time; they may be bytes of NF4.

    Args:
        value: the complete tensor; None on all ranks but the first.
        dtype: of `value`.
        columns: those of `target` that are filled.
    """
    local, start = local_rows(target)
    n_rows = 1
    if target.dim() > 0:
        n_rows = len(target)
        local = local[..., columns]
    shape = local.shape[1:]
    if target.dtype == torch.uint8:
        dtype = torch.uint8
    local = local.view(-1, *shape)
    row_bytes = max(1, shape.numel() * dtype.itemsize)
    n_sent = max(1, SENT_BYTES // row_bytes)
    for first in range(0, n_rows, n_sent):
        stop = min(n_rows, first + n_sent)
        rows = torch.empty(stop - first, *shape, dtype=dtype, device=local.device)
        if value is not None:
            of_value = value.view(n_rows, *value.shape[1:])[first:stop].to(local.device)
            if dtype != value.dtype:
                of_value = four_bits.quantize_nf4(of_value)
            rows.copy_(of_value)
        if world is not None:
            world.broadcast(rows)
        begin = max(first, start)
        end = min(stop, start + len(local))
        if begin < end:
            local[begin - start : end - start] = rows[begin - first : end - first]


# ---- opening


def open_weights(directory: Path) -> ClassWeights:
    """Find out how the tensors in `directory` become those of a network, reading none.

    Raises:
        ConfigError: see `read_config` and `language_model_of`; or the tensors do not fill the
            network exactly once; lists them.
        RunError: a file is damaged.
    """
    path = directory / MODEL_CONFIG
    raw = read_object(path)
    with error_prefix(str(path)):
        quantization = quantization_of(raw)
        config = read_config(without_quantization(raw))
        text_config = language_model_of(config)
    tensors = _list_tensors(directory)
    with error_prefix(str(directory)):
        stored = as_dequantized(tensors, quantization)
    with error_prefix(str(path)), torch.device("meta"):
        network = build_network(text_config)
        saved_class = type(build_saved_model(config, network))
    filled = _fill_on_meta(directory, saved_class, config, stored)
    with error_prefix(str(path)):
        names = find_names(filled.saved, network)
    layers = _find_layers(names)
    problems = list(filled.problems)
    # In a layer of the network, they would change what that computes.
    in_layers = [name for name in filled.unexpected if layers.intersection(_paths_to(name))]
    problems += [f"{name}: unexpected tensor" for name in in_layers]
    elsewhere = network.state_dict().keys() - names.values()
    problems += [f"{name}: missing in {saved_class.__name__}" for name in sorted(elsewhere)]
    if problems:
        problem = f"{directory}: the tensors do not match {MODEL_CONFIG}:"
        raise ConfigError(problem, *limit_problems(problems))
    return ClassWeights(
        directory,
        config,
        quantization,
        stored,
        filled.saved,
        names,
        _find_tied(network),
        filled.dtype,
        filled.unused,
    )


def check_layers(directory: Path) -> None:
    """Refuse a config.json of more layers than there are tensors: each layer would be built.

    Raises:
        ConfigError: see `read_config`.
        RunError: a file is damaged.
    """
    if not any(directory.glob("*.safetensors")):
        return  # `open_weights` says what is missing
    path = directory / MODEL_CONFIG
    with error_prefix(str(path)):
        config = read_config(without_quantization(read_object(path)))
    n_tensors = len(find_slices(directory))
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        n_layers = getattr(part, "num_hidden_layers", None)
        if isinstance(n_layers, int) and n_layers > n_tensors:
            problem = f"{n_layers:,} layers, but {n_tensors:,} tensors in the files"
            raise ConfigError(f"{path}: num_hidden_layers: {problem}")


def _list_tensors(directory: Path) -> dict[str, Tensor]:
    """Return tensors as those in the files of `directory`, on the meta device."""
    tensors: dict[str, Tensor] = {}
    for name, slices in find_slices(directory).items():
        shape = full_shape(slices)
        if shape is None or len(slices) > 1:
            raise ConfigError(f"{directory}: {name}: in several files")
        tensors[name] = torch.empty(shape, dtype=torch_dtype(slices[0]), device="meta")
    return tensors


def _find_tied(network: nn.Module) -> dict[str, str]:
    """Return for each tensor of `network` the name of the first that it is tied to, or its own."""
    first_names: dict[int, str] = {}
    tied_to: dict[str, str] = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        tied_to[name] = first_names.setdefault(id(tensor), name)
    return tied_to


@dataclass(frozen=True)
class _Filled:
    """What `from_pretrained` makes of tensors on the meta device."""

    saved: PreTrainedModel
    problems: Sequence[str]
    unexpected: Sequence[str]
    """names that a tensor would have in `saved`, which does not have it"""
    dtype: torch.dtype
    unused: Sequence[str]
    """names in the files"""


def _fill_on_meta(
    directory: Path,
    saved_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    stored: Mapping[str, Tensor],
) -> _Filled:
    """Load `stored` and find out whether each tensor of the model is filled once."""
    dtype = _most_common_dtype(stored)
    with error_prefix(str(directory / MODEL_CONFIG)):
        loaded = load_class(saved_class, config, stored, dtype, device_map="meta")
        if not _holds(loaded.model, dtype, stored):
            dtype = torch.float32
            loaded = load_class(saved_class, config, stored, dtype, device_map="meta")
    problems = list(loaded.problems)
    state = _without_ties(loaded.model, stored)
    try:
        reverted = as_saved(loaded.model, state)
    except Exception:  # of any type; `require_savable` says it
        reverted = {}
    unused = [name for name in stored if name not in reverted]
    others = [name for name in reverted if name not in stored]
    if others or not reverted:
        # The files have other names than transformers would write, e.g. without a prefix.
        if not problems and _count(stored) != _count(state):
            problems += [f"{name}: missing" for name in others]
            problems += [f"{name}: unexpected tensor" for name in unused]
        unused = []
    elif unused:
        problems += _find_doubled(loaded, {name: stored[name] for name in unused}, config)
    places = loaded.model.state_dict()
    for name, tensor in stored.items():
        dtype_name = str(tensor.dtype).removeprefix("torch.")
        is_of_place = name in places and places[name].dtype == tensor.dtype
        if name not in unused and dtype_name not in READ_DTYPES and not is_of_place:
            problem = f"{dtype_name} is a quantized dtype; use the model without quantization"
            problems.append(f"{name}: {problem}")
    return _Filled(loaded.model, problems, loaded.unexpected, dtype, unused)


def _most_common_dtype(stored: Mapping[str, Tensor]) -> torch.dtype:
    """Return the dtype of most values, of those in which models are loaded."""
    n_values = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), 0)
    for tensor in stored.values():
        if tensor.dtype in n_values:
            n_values[tensor.dtype] += tensor.numel()
    return max(n_values, key=lambda dtype: n_values[dtype])


def _holds(model: PreTrainedModel, dtype: torch.dtype, stored: Mapping[str, Tensor]) -> bool:
    """Return whether the values of `stored` are exact in `model`, which was loaded in `dtype`."""
    places = model.state_dict()
    for name, tensor in stored.items():
        held_in = dtype
        if name in places:
            held_in = places[name].dtype  # e.g. of what the class keeps in float32
        if str(tensor.dtype).removeprefix("torch.") not in READ_DTYPES:
            continue
        if torch.promote_types(tensor.dtype, held_in) != held_in:
            return False
    return True


def _without_ties(model: PreTrainedModel, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return each tensor of `model` under one name, that of `stored` if it has one."""
    names: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        if id(tensor) not in names or name in stored:
            names[id(tensor)] = name
    return {name: tensors[name] for name in names.values()}


def _count(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


def _find_doubled(
    loaded: _Loaded, others: Mapping[str, Tensor], config: PreTrainedConfig
) -> list[str]:
    """Return a problem for each parameter that tensors of `others` would fill again."""
    model_class = type(loaded.model)
    dtype = loaded.model.dtype
    without = load_class(model_class, config, {}, dtype, device_map="meta")
    by_others = load_class(model_class, config, others, dtype, device_map="meta")
    doubled = sorted(set(without.missing) - set(by_others.missing))
    names = ", ".join(limit_problems(sorted(others)))
    return [f"{name}: in the files twice, also as one of {names}" for name in doubled]


# ---- from_pretrained


class _Loaded(NamedTuple):
    """What `from_pretrained` has made of tensors."""

    model: PreTrainedModel
    missing: Sequence[str]
    """names in the model, as are the others"""
    unexpected: Sequence[str]
    problems: Sequence[str]


def load_class(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    **options: Any,
) -> _Loaded:
    """Return the model of `tensors`, by their names in files.

    Args:
        dtype: of its parameters but for those that the class keeps in float32.
        options: of `from_pretrained`.

    Raises:
        ConfigError: transformers cannot make its parameters of them.
    """
    report = io.StringIO()
    try:
        with quiet_transformers(report), one_line_errors(config.model_type):
            loading: Any = model_class.from_pretrained(
                None,
                config=config,
                state_dict=dict(tensors),
                dtype=dtype,
                ignore_mismatched_sizes=True,  # they are listed instead
                output_loading_info=True,
                **options,
            )
            model, info = loading
    except ConfigError:
        misfits = re.findall(r"^(\S+) +\|[^|\n]*CONVERSION", report.getvalue(), re.MULTILINE)
        if not misfits:
            raise
        problem = "the tensors in the files of which it is made do not fit together"
        raise ConfigError(*(f"{name}: {problem}" for name in misfits)) from None
    problems = [f"{name}: missing" for name in sorted(info["missing_keys"])]
    for name, stored, expected in sorted(info["mismatched_keys"]):
        problems.append(f"{name}: {list(stored)} in the file, {list(expected)} in {MODEL_CONFIG}")
    return _Loaded(model, sorted(info["missing_keys"]), sorted(info["unexpected_keys"]), problems)


@contextmanager
def quiet_transformers(report: io.StringIO) -> Iterator[None]:
    """Let what transformers logs of weights go to `report` alone, and show no progress."""
    from transformers.utils import logging as their_logging

    handler = logging.StreamHandler(report)
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    verbosity = their_logging.get_verbosity()
    their_logging.set_verbosity_error()
    shows_progress = their_logging.is_progress_bar_enabled()
    their_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        their_logging.set_verbosity(verbosity)
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
        if shows_progress:
            their_logging.enable_progress_bar()


# ---- names


def _paths_to(name: str) -> list[str]:
    """Return the paths of the modules that hold the tensor `name`, the outermost first."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _find_layers(names: Mapping[str, str]) -> set[str]:
    """Return the paths of modules that hold the tensors `names`, and those of numbered ones."""
    layers: set[str] = set()
    for name in names:
        parts = name.split(".")
        layers.add(".".join(parts[:-1]))
        for end, part in enumerate(parts, 1):
            if part.isdigit():
                layers.add(".".join(parts[:end]))
    return layers - {""}
