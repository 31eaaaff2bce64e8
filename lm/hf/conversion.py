"""Weights of a class of transformers, read and written by transformers' own conversions.

Tensors in files can have other names and layouts than the parameters of the class: a matrix of each
expert instead of one of all, fused projections, prefixes of a model that contains the language
model. transformers has the operations that lead from one to the other, and their reverse. They are
private there (`transformers.core_model_loading`); what uses them is in this file.

Code that is next to the weights is not executed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from lm.checkpoint.tensor_files import READ_BYTES, Source, read_into
from lm.data.tokenizer.files import MODEL_CONFIG
from lm.errors import ConfigError, error_prefix, limit_problems
from lm.hf.files import READ_DTYPES, describe_unused, find_slices, read_object
from lm.hf.quantized import DEQUANTIZED, Quantized, Stored, find_tensors, quantization_of
from lm.hf.saved_model import build_saved_model, find_names
from lm.shards import local_rows
from lm.training import nf4
from lm.transformers_model import (
    build_network,
    language_model_of,
    one_line_errors,
    read_config,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.core_model_loading import Concatenate, ConversionOps, WeightConverter

_CONSTANTS = re.compile(r".*\.(attn\.(masked_)?bias|rotary_emb\.inv_freq)|(.*\.)?position_ids")
"""Buffers that older versions of transformers save: causal masks, frequencies, positions."""
CONVERTED_BYTES = 16 << 20
"""Of stacked tensors, converted at a time; operations copy them several times."""


# ---- the structure


def _is_tied(model: PreTrainedModel) -> bool:
    """Return whether the head of `model` is its embedding."""
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    return getattr(head, "weight", 0) is getattr(embedding, "weight", 1)


# ---- the conversion


@dataclass(frozen=True)
class Group:
    """Tensors in files that become one or more of a network together, by transformers."""

    sources: dict[str, list[str]]
    """names in the files by pattern; several of one pattern, e.g. of experts, in their order"""
    targets: dict[str, str]
    """names in the network by pattern"""
    converter: WeightConverter | None
    """None = the only source is the target"""
    first_place: str
    """name of the first target in `saved`"""
    saved: PreTrainedModel
    """the model that was saved, on the meta device, of which operations read shapes"""
    shapes: Mapping[str, torch.Size]
    """of the (first) source of each pattern"""

    @property
    def source_names(self) -> list[str]:
        return list(itertools.chain.from_iterable(self.sources.values()))

    @property
    def is_stacked(self) -> bool:
        """Whether row i of the only target is made of source i of each pattern."""
        if self.converter is None or len(self.targets) > 1:
            return False
        from transformers.core_model_loading import MergeModulelist

        merge, *others = self.converter.operations
        is_merge = isinstance(merge, MergeModulelist) and merge.dim == 0
        n_rows = {len(names) for names in self.sources.values()}
        return is_merge and len(n_rows) == 1 and all(map(_keeps_rows, others))

    def convert(self, sources: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
        """Return the targets by name in the network, of sources by pattern."""
        if self.converter is None:
            (source,) = itertools.chain.from_iterable(sources.values())
            return dict.fromkeys(self.targets.values(), source)
        converted = self.apply(self.converter, sources)
        return {name: converted[pattern] for pattern, name in self.targets.items()}

    def revert(self, targets: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
        """Return the sources by pattern, of targets by name in the network.

        Of a stacked group, `targets` may be consecutive rows.
        """
        if self.converter is None:
            return {pattern: list(targets.values()) for pattern in self.sources}
        if self._is_concatenation:
            (whole,) = targets.values()
            return self._split(whole)
        reverse = cast("WeightConverter", self.converter.reverse_transform())
        inputs: dict[str, list[Tensor]] = {}
        patterns = zip(self.converter.target_patterns, reverse.source_patterns, strict=True)
        for pattern, reverse_pattern in patterns:
            inputs[reverse_pattern] = [
                targets[name]
                for found, name in self.targets.items()
                if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), found)
            ]
        reverted = self.apply(reverse, inputs)
        sources: dict[str, list[Tensor]] = {}
        patterns = zip(self.converter.source_patterns, reverse.target_patterns, strict=True)
        for pattern, reverse_pattern in patterns:
            keys = [reverse_pattern]
            if "*" in reverse_pattern:
                keys = [reverse_pattern.replace("*", str(i)) for i in range(len(reverted))]
            found = [reverted[key] for key in keys if key in reverted]
            if found:
                sources[pattern] = found
        return sources

    @property
    def _is_concatenation(self) -> bool:
        """Whether the only target is one source of each pattern after another."""
        if self.converter is None or len(self.source_names) > len(self.sources):
            return False
        from transformers.core_model_loading import Concatenate

        operation, *others = self.converter.operations
        return isinstance(operation, Concatenate) and not others

    def _split(self, whole: Tensor) -> dict[str, list[Tensor]]:
        """Return the concatenated sources by pattern, each of its size in the files.

        transformers would make parts of equal size.
        """
        assert self.converter is not None
        dim = cast("Concatenate", self.converter.operations[0]).dim
        patterns = [each for each in self.converter.source_patterns if each in self.sources]
        parts = whole.split([self.shapes[pattern][dim] for pattern in patterns], dim)
        return {pattern: [part.contiguous()] for pattern, part in zip(patterns, parts, strict=True)}

    def apply(
        self, converter: WeightConverter, tensors: Mapping[str, Sequence[Tensor]]
    ) -> dict[str, Tensor]:
        """Return what the operations of `converter` make of `tensors`, both by its patterns."""
        values: dict[str, Any] = {pattern: list(found) for pattern, found in tensors.items()}
        for operation in converter.operations:
            values = operation.convert(
                values,
                source_patterns=converter.source_patterns,
                target_patterns=converter.target_patterns,
                full_layer_name=self.first_place,
                model=self.saved,
                config=self.saved.config,
                missing_keys=None,
            )
        results: dict[str, Tensor] = {}
        for pattern, value in values.items():
            if isinstance(value, list):
                (value,) = value
            results[pattern] = value
        return results


def _keeps_rows(operation: ConversionOps) -> bool:
    """Return whether an operation on stacked tensors is the same on each of them."""
    from transformers.core_model_loading import Concatenate, Interleave, Transpose

    if isinstance(operation, Transpose):
        return min(operation.dim0, operation.dim1) > 0 and not operation.check_dims
    return isinstance(operation, Concatenate | Interleave) and operation.dim > 0


@dataclass(frozen=True)
class Conversion:
    """Weights in files, and how they become those of a network."""

    directory: Path
    config: PreTrainedConfig
    """of the model that was saved"""
    text_config: PreTrainedConfig
    """of the network, see `build_network`"""
    stored: Mapping[str, Stored]
    """all tensors in the files, by name"""
    groups: Sequence[Group]
    """fill each parameter and persistent buffer of the network once"""
    copies: Sequence[Group]
    """have what the network ties to a target of `groups`, under its name"""
    other_parts: Sequence[str]
    """names of tensors of other parts of the model that was saved, e.g. of an image encoder"""
    unused: Sequence[str]
    """names of tensors of no part of it, which transformers does not read either"""

    @torch.no_grad()
    def read(self, network: nn.Module) -> None:
        """Fill this rank's shards of all parameters and persistent buffers of `network`.

        Args:
            network: has the names of `build_network`, and any dtypes and devices.

        Raises:
            ConfigError: a weight differs from the one that it is tied to.
            CheckpointError: a file is damaged, or holds inf or NaN.
        """
        tensors: dict[str, Tensor] = dict(network.named_buffers())
        tensors |= dict(network.named_parameters())
        for group in self.groups:
            self._read_group(group, {name: tensors[name] for name in group.targets.values()})
        for group in self.copies:
            copies = {name: torch.empty_like(tensors[name]) for name in group.targets.values()}
            self._read_group(group, copies)
            for name, stored in copies.items():
                if not _is_equal(tensors[name], stored):
                    problem = f"{MODEL_CONFIG} ties {group.source_names[0]} to {name}"
                    remedy = f"set tie_word_embeddings: false in {MODEL_CONFIG} to use it"
                    raise ConfigError(
                        f"{self.directory}: {problem}, but the files have a different one; {remedy}"
                    )

    def require_reversible(self) -> None:
        """Check on the meta device that `Group.revert` gives the names and shapes in the files.

        Raises:
            ConfigError: it does not, for a layout that transformers reads only.
        """
        with torch.device("meta"):
            tensors = build_network(self.text_config).state_dict()
        problems: list[str] = []
        for group in (*self.groups, *self.copies):
            try:
                reverted = group.revert({name: tensors[name] for name in group.targets.values()})
            except Exception as error:  # of any type
                problems.append(f"{group.source_names[0]}: {str(error)[:200]}")
                continue
            shapes = {key: [tuple(tensor.shape) for tensor in reverted[key]] for key in reverted}
            stored = {
                pattern: [self.stored[name].shape for name in names]
                for pattern, names in group.sources.items()
            }
            if shapes != stored:
                problems.append(f"{group.source_names[0]}: has another shape after it")
        if problems:
            problem = f"{self.directory}: transformers cannot write what it reads in this layout:"
            raise ConfigError(problem, *limit_problems(problems))

    @property
    def is_quantized(self) -> bool:
        return any(isinstance(stored, Quantized) for stored in self.stored.values())

    def notes(self) -> list[str]:
        """Return a line on each thing in the files that is not read as it is."""
        notes: list[str] = []
        if self.is_quantized:
            notes.append(DEQUANTIZED)
        if self.other_parts:
            others = f"{len(self.other_parts)} tensors of its other parts"
            modules = ", ".join(limit_problems(self._find_other_modules()))
            notes.append(f"{others} are not trained, and are exported: {modules}")
        if self.unused:
            notes.append(describe_unused(self.unused))
        return notes

    def _find_other_modules(self) -> list[str]:
        """Return the paths of the largest modules that hold `other_parts` alone."""
        of_network: set[str] = set()
        for group in (*self.groups, *self.copies):
            for name in group.source_names:
                of_network.update(_paths_to(name))
        modules: set[str] = set()
        for name in self.other_parts:
            paths = [path for path in _paths_to(name) if path not in of_network]
            modules.add(paths[0] if paths else name)
        return sorted(modules)

    def stored_dtype(self, group: Group, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the sources of `group` in a model that is saved in `dtype`.

        It is float32 for what transformers keeps in it.
        """
        kept = group.saved._get_dtype_plan(dtype)
        patterns = [pattern.replace("*", ".*") for pattern in kept]
        if any(re.search(pattern, group.first_place) for pattern in patterns):
            return torch.float32
        return dtype

    def _read_group(self, group: Group, targets: Mapping[str, Tensor]) -> None:
        """Fill this rank's rows of `targets`, by name in the network."""
        if group.converter is None:
            (target,) = targets.values()
            stored = self.stored[group.source_names[0]]
            if isinstance(stored, Quantized):
                _fill_in_blocks(target, stored.read)
            else:
                read_weight(target, Source(stored.slices))
        elif group.is_stacked:
            (target,) = targets.values()

            def convert(start: int, stop: int) -> Tensor:
                (rows,) = group.convert(self._read_sources(group, slice(start, stop))).values()
                return rows

            _fill_in_blocks(target, convert)
        else:
            converted = group.convert(self._read_sources(group, slice(None)))
            for name, target in targets.items():
                local, start = local_rows(target)
                _fill(local, converted.pop(name)[start : start + len(local)])

    def _read_sources(self, group: Group, which: slice) -> dict[str, list[Tensor]]:
        """Read sources by pattern, of each pattern those at `which`."""
        sources: dict[str, list[Tensor]] = {}
        for pattern, names in group.sources.items():
            sources[pattern] = [self.stored[name].read_all() for name in names[which]]
        return sources


def read_weight(tensor: Tensor, source: Source) -> None:
    """Fill this rank's rows of a parameter; of bytes of NF4, a few rows at a time are dense."""
    if tensor.dtype != torch.uint8:
        read_into(tensor, source)
        return
    local, start = local_rows(tensor)
    inner = nf4.inner_width(tensor.shape[1])
    n_rows = max(1, READ_BYTES // (4 * inner))
    for target in local.split(n_rows):
        rows = torch.empty(len(target), inner, device=local.device)
        read_into(rows, source._replace(start=source.start + start))
        target.copy_(nf4.quantize(rows))
        start += len(target)


def _fill_in_blocks(target: Tensor, read: Callable[[int, int], Tensor]) -> None:
    """Fill this rank's rows of a parameter by what `read` returns of some rows at a time."""
    local, start = local_rows(target)
    for block in split_rows(local, CONVERTED_BYTES):
        if len(block):
            _fill(block, read(start, start + len(block)))
        start += len(block)


def _fill(rows: Tensor, values: Tensor) -> None:
    """Fill rows of a parameter, which may be bytes of NF4."""
    if rows.dtype == torch.uint8:
        values = nf4.quantize(values.to(rows.device))
    rows.copy_(values)


def split_rows(tensor: Tensor, n_bytes: int) -> Sequence[Tensor]:
    """Return consecutive rows of `tensor`, in parts of some `n_bytes`."""
    return tensor.split(max(1, n_bytes // max(1, tensor[:1].nbytes)))


def _is_equal(tensor: Tensor, other: Tensor) -> bool:
    """Return whether this rank's rows of two tensors are equal."""
    return local_rows(tensor)[0].equal(local_rows(other)[0])


# ---- opening


def open_conversion(directory: Path) -> Conversion:
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
        config = read_config(raw)
        own_config = language_model_of(config)
    slices = find_slices(directory)
    with error_prefix(str(directory)):
        stored = find_tensors(slices, quantization)
    _limit_layers(directory, config, len(stored))
    with torch.device("meta"), error_prefix(str(path)):
        network = build_network(own_config)
        saved = build_saved_model(config, network)
        names = find_names(saved, network)
        if _is_tied(network) != _is_tied(saved):
            own_config.tie_word_embeddings = _is_tied(saved)
            network = build_network(own_config)
    matching = _Matching(saved, saved.state_dict(), names, _find_tied(network), stored)
    with error_prefix(str(path)):
        matching.match()
    if matching.problems:
        problem = f"{directory}: the tensors do not match {MODEL_CONFIG}:"
        raise ConfigError(problem, *limit_problems(matching.problems))
    return Conversion(
        directory,
        config,
        own_config,
        stored,
        matching.groups,
        matching.copies,
        matching.other_parts,
        matching.unused,
    )


def _limit_layers(directory: Path, config: PreTrainedConfig, n_tensors: int) -> None:
    """Refuse a config of more layers than there are tensors: each layer would be built."""
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        n_layers = getattr(part, "num_hidden_layers", None)
        if isinstance(n_layers, int) and n_layers > n_tensors:
            problem = f"{n_layers:,} layers, but {n_tensors:,} tensors in the files"
            raise ConfigError(f"{directory / MODEL_CONFIG}: num_hidden_layers: {problem}")


def _find_tied(network: PreTrainedModel) -> dict[str, str]:
    """Return for each tensor of `network` the name of the first that it is tied to, or its own."""
    first_names: dict[int, str] = {}
    tied_to: dict[str, str] = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        tied_to[name] = first_names.setdefault(id(tensor), name)
    return tied_to


class _MisfitError(Exception):
    """Tensors in the files are not those of which a parameter is made."""


@dataclass
class _Matching:
    """The search for what in the files fills each tensor of a network."""

    saved: PreTrainedModel
    """the model that was saved, on the meta device"""
    places: dict[str, Tensor]
    """its tensors"""
    names: Mapping[str, str]
    """in the network, of those that it has, by name in `saved`"""
    tied_to: Mapping[str, str]
    """see `_find_tied`"""
    stored: Mapping[str, Stored]
    groups: list[Group] = field(default_factory=list)
    copies: list[Group] = field(default_factory=list)
    other_parts: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def match(self) -> None:
        """Fill the lists; see `Conversion`."""
        filled_by: dict[str, str] = {}
        """names in the files, by name in the network"""
        found: list[Group] = []
        for group in self._collect():
            source = group.source_names[0]
            if group.first_place not in self.names:
                self.other_parts += group.source_names
                continue
            try:
                sources = self._sources_on_meta(group)
                targets = self._find_targets(group, sources)
            except _MisfitError as error:
                self.problems.append(f"{source}: {error}")
                filled_by[self.names[group.first_place]] = source
                continue
            for name in targets.values():
                if name in filled_by:
                    self.problems.append(f"{source}: becomes {name}, as does {filled_by[name]}")
                filled_by[name] = source
            shapes = {pattern: tensors[0].shape for pattern, tensors in sources.items()}
            found.append(replace(group, targets=targets, shapes=shapes))

        filled: dict[str, str] = {}
        """the first of tied names that is filled, by the first of them"""
        for name, first_name in self.tied_to.items():
            if name in filled_by:
                filled.setdefault(first_name, name)
        for first_name in dict.fromkeys(self.tied_to.values()):
            if first_name not in filled:
                self.problems.append(f"{first_name}: missing")
        for group in found:
            is_copy = any(filled[self.tied_to[name]] != name for name in group.targets.values())
            targets = {pattern: self.tied_to[name] for pattern, name in group.targets.items()}
            groups = self.copies if is_copy else self.groups
            groups.append(replace(group, targets=targets))

    def _collect(self) -> list[Group]:
        """Rename and group the tensors in the files as transformers does when it loads `saved`.

        Returns:
            Groups without targets.
        """
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        with one_line_errors(str(self.saved.config.model_type)):
            mapping = get_model_conversion_mapping(self.saved)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        converter_of: dict[str | None, WeightConverter] = {}
        for converter in converters:
            for pattern in converter.source_patterns:
                converter_of[pattern] = converter
        prefix = self.saved.base_model_prefix
        layers = _find_layers(self.names)
        groups: dict[str, Group] = {}
        for name in sorted(self.stored, key=dot_natural_key):
            place, pattern = rename_source_key(name, renamings, converters, prefix, self.places)
            if place not in self.places and name in self.places:
                place, pattern = rename_source_key(name, [], [], prefix, self.places)
            if place not in self.places:
                self._add_unmatched(name, place, layers)
                continue
            converter = converter_of.get(pattern)
            if place not in groups:
                groups[place] = Group({}, {}, converter, place, self.saved, {})
            elif converter is None or groups[place].converter is not converter:
                other = groups[place].source_names[0]
                self.problems.append(f"{name}: becomes {place}, as does {other}")
                continue
            groups[place].sources.setdefault(pattern or name, []).append(name)
        return list(groups.values())

    def _add_unmatched(self, name: str, place: str, layers: set[str]) -> None:
        """Add the tensor `name`, which would be `place` in `saved`.

        In a layer that the network has, it would change what that computes. Layers that the network
        lacks, e.g. those that predict a second token, change nothing.
        """
        patterns = self.saved._keys_to_ignore_on_load_unexpected or ()
        is_ignored = any(re.search(pattern, place) for pattern in patterns)
        if is_ignored or _CONSTANTS.fullmatch(place):
            self.unused.append(name)
        elif layers.intersection(_paths_to(place)):
            self.problems.append(f"{name}: unexpected tensor")
        elif len(self.names) < len(self.places):
            self.other_parts.append(name)
        else:
            self.unused.append(name)

    def _sources_on_meta(self, group: Group) -> dict[str, list[Tensor]]:
        """Return tensors as the sources of `group`, by pattern, on the meta device."""
        return {
            pattern: [self._on_meta(name) for name in names]
            for pattern, names in group.sources.items()
        }

    def _find_targets(
        self, group: Group, sources: Mapping[str, Sequence[Tensor]]
    ) -> dict[str, str]:
        """Return the names in the network of what `group` becomes, by pattern.

        Raises:
            _MisfitError: the shapes or dtypes do not fit.
        """
        n_values = sum(tensor.numel() for tensors in sources.values() for tensor in tensors)
        converted = self._convert_on_meta(group, sources)
        if n_values != sum(tensor.numel() for tensor in converted.values()):
            raise _MisfitError(f"has more values than what it becomes, {group.first_place}")
        targets: dict[str, str] = {}
        for pattern, tensor in converted.items():
            place = _expand(pattern, group.first_place, converted)
            if place not in self.names:
                raise _MisfitError(f"becomes {place}, too, which is not in the language model")
            _require_fit(tensor, self.places[place])
            targets[pattern] = self.names[place]
        return targets

    def _on_meta(self, name: str) -> Tensor:
        stored = self.stored[name]
        if stored.shape is None:
            raise _MisfitError("in several files")
        return torch.empty(stored.shape, dtype=stored.dtype, device="meta")

    def _convert_on_meta(
        self, group: Group, sources: Mapping[str, Sequence[Tensor]]
    ) -> dict[str, Tensor]:
        """Return what `sources` become by pattern."""
        if group.converter is None:
            (source,) = itertools.chain.from_iterable(sources.values())
            return {group.first_place: source}
        try:
            return group.apply(group.converter, sources)
        except Exception as error:  # of any type, where shapes do not fit together
            others = f"{len(group.source_names) - 1} others, to become {group.first_place}"
            raise _MisfitError(f"does not fit {others}: {str(error)[:200]}") from None


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


def _expand(pattern: str, first_place: str, patterns: Mapping[str, Tensor]) -> str:
    """Return the name of the target of `pattern`, as in transformers' `WeightConverter.convert`."""
    first_place = first_place.replace("*.", "0.")
    for first_pattern in patterns:
        if first_pattern in first_place:
            prefix, _, suffix = first_place.partition(first_pattern)
            return f"{prefix}{pattern}{suffix}"
    return pattern


def _require_fit(tensor: Tensor, expected: Tensor) -> None:
    if tensor.shape != expected.shape:
        shapes = f"{list(tensor.shape)} in the file, {list(expected.shape)} in {MODEL_CONFIG}"
        raise _MisfitError(shapes)
    dtype = str(tensor.dtype).removeprefix("torch.")
    allowed = (str(expected.dtype).removeprefix("torch."),)
    if expected.is_floating_point():
        allowed = READ_DTYPES
    if dtype not in allowed:
        raise _MisfitError(f"{dtype} is a quantized dtype; use the model without quantization")
