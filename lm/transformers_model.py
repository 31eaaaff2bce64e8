"""Models of transformers, behind the interface of model.py's `Transformer`.

The modeling code is that of transformers: a class is built from its config and called, never
changed, but for two functions that let packed documents see each other, in place of which it calls
`lm.delta_rule`. Attention is model.py's where the class takes it (lm/transformers_attention.py).
What this package promises of a model, e.g. that packed samples do not see each other, is asked of
each class by an examination (lm/hf/examine.py), whose answers, `Examined`, decide how it is called
here.

Reading order: `TransformersModel.forward`, then `build_network`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import logging
import math
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from lm import transformers_attention, transformers_private
from lm.attention import SequencePart, find_document_starts, find_key_bounds, make_mask
from lm.errors import ConfigError
from lm.model_config import MAX_LAYERS, MAX_SIZE
from lm.transformers_config import TransformersConfig, set_random_rates, without_numbers
from lm.transformers_linear import DECAYS, use_our_operators
from model import (
    IGNORE_INDEX,
    ChunkedLoss,
    score_logits,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

NETWORK = "network"
"""How the names of all parameters start."""


class TransformersCache:
    """What a model keeps of the tokens processed so far, for generation."""

    def __init__(self, layers: Any) -> None:
        self.length = 0
        self.layers = layers
        """transformers' cache; None = the class has none that is right: all tokens are read again
        at each step"""
        self.tokens: Tensor | None = None
        """`(B, length)`, of which a model without a cache reads all again"""


class TransformersModel(nn.Module):
    """A causal language model of transformers.

    Args:
        dropout: False = without dropout and other random changes in training.
    """

    router_bias: None = None
    """see `Transformer`; experts of a class have their own"""

    def __init__(self, config: TransformersConfig, *, dropout: bool = True) -> None:
        super().__init__()
        self.config = config
        values = copy.deepcopy(config.transformers_config)
        if not dropout:
            set_random_rates(values, 0.0)
        self.network = build_network(read_config(values), attention=config.examined.attention)
        self.network.config.use_cache = False  # recomputed layers would extend it again
        self.blocks = find_blocks(self.network)
        self.loss = ChunkedLoss()
        self._accepted = inspect.signature(self.network.forward).parameters.keys()
        self._ties = _find_ties(self.network)
        if config.examined.numbers_documents:
            for module in self.network.modules():
                use_our_operators(type(module).__module__)
        for name, parameter in self.network.named_parameters():
            if without_numbers(name) in config.examined.untrained:
                parameter.requires_grad_(False)
        if config.examined.hidden_states:
            # FSDP gathers the matrix for a call of its module, in which the loss is computed, too.
            self.head.forward = self._apply_head

    @property
    def embedding(self) -> nn.Module:
        """The token embeddings."""
        return self.network.get_input_embeddings()

    @property
    def head(self) -> nn.Module:
        """The output matrix, or if the class has none, the class."""
        output = self.network.get_output_embeddings()
        if output is None:
            return self.network
        return output

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: TransformersCache | None = None,
        queries: Tensor | None = None,
        part: SequencePart | None = None,
    ) -> Tensor:
        """Return the loss, the scores of targets, the next token's logits, or all logits.

        Args and Returns: see `Transformer.forward`.

        Raises:
            ValueError: the tokens, with those cached, are longer than `max_seq_len`.
        """
        end = tokens.shape[1]
        if cache is not None:
            end += cache.length
        if end > self.config.max_seq_len:
            raise ValueError(f"max_seq_len: {end} tokens exceed {self.config.max_seq_len}")
        if cache is not None:
            return self._next_logits(tokens, cache)
        options = self._options_for(tokens, document_ids, part)
        if targets is not None and self.config.examined.hidden_states:
            base = self.network.base_model(input_ids=tokens, **options)
            x = base.last_hidden_state  # B T D
            return self.head(x, targets, queries)
        logits = self.network(input_ids=tokens, **options).logits
        if targets is None:
            return logits
        if queries is not None:
            return score_logits(logits.flatten(0, 1)[queries], targets)
        flat = logits.flatten(0, 1).float()
        return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")

    def _options_for(
        self, tokens: Tensor, document_ids: Tensor | None, part: SequencePart | None
    ) -> dict[str, Any]:
        """Return the arguments of the network without a cache, see `forward`."""
        options: dict[str, Any] = {}
        packed_by = self.config.examined.packed_by
        numbers_documents = self.config.examined.numbers_documents
        if document_ids is None:
            if numbers_documents:  # one document per sequence, also by our operators
                options["seq_idx"] = torch.zeros_like(tokens)
            return options
        indices = torch.arange(document_ids.shape[1], device=tokens.device)
        document_starts = find_document_starts(document_ids, indices)
        position_ids = indices - document_starts
        if "position_ids" in self._accepted:
            options["position_ids"] = position_ids
        if packed_by != "position_ids":
            options["attention_mask"] = self._make_masks(position_ids)
        if numbers_documents:
            options["seq_idx"] = document_starts
        if packed_by == "cu_seq_lens" and part is None:  # lengths are those of complete documents
            options |= _find_lengths(position_ids)
        if part is not None:
            options["position_ids"] = part.take(position_ids)
            masks = self._make_masks(position_ids)
            options["attention_mask"] = _masks_of(part, masks, position_ids)
            options["part"] = part
        return options

    def _make_masks(self, position_ids: Tensor) -> Any:
        """Return the masks of packed documents, as transformers makes them: of each kind of layer.

        Some classes make theirs without positions, but all use those that they are called with.
        """
        from transformers.masking_utils import create_masks_for_generate

        make = getattr(self.network, "create_masks_for_generate", create_masks_for_generate)
        shape = torch.empty(*position_ids.shape, 0, device=position_ids.device)
        return make(
            config=self.network.config,
            inputs_embeds=shape,
            attention_mask=None,
            past_key_values=None,
            position_ids=position_ids,
        )

    def _apply_head(
        self, x: Tensor, targets: Tensor | None = None, queries: Tensor | None = None
    ) -> Tensor:
        """Replace the head's `forward`: return logits, the loss or scores of targets."""
        head = cast(nn.Linear, self.head)
        x = x.to(head.weight.dtype)  # of a residual stream in float32
        if targets is None:
            return F.linear(x, head.weight, head.bias)
        if queries is not None:
            x = x.flatten(0, 1)[queries]
            return self.loss.score(x, head.weight, targets, self.training)
        return self.loss.sum_losses(x.flatten(0, 1), head.weight, targets.flatten())

    def new_cache(self, capacity: int) -> TransformersCache:
        """Return an empty cache. It grows, whatever its `capacity` will be."""
        del capacity
        if not self.config.examined.cache:
            return TransformersCache(None)
        from transformers import DynamicCache

        return TransformersCache(DynamicCache(config=self.network.config))

    def _next_logits(self, tokens: Tensor, cache: TransformersCache) -> Tensor:
        """Return the logits after the last token, `(B, V)`, and extend `cache`."""
        cache.length += tokens.shape[1]
        options: dict[str, Any] = {"past_key_values": cache.layers, "use_cache": True}
        if cache.layers is None:
            if cache.tokens is not None:
                tokens = torch.cat([cache.tokens, tokens], dim=1)
            cache.tokens = tokens
            options = self._options_for(tokens, None, None)
        if "logits_to_keep" in self._accepted:
            options["logits_to_keep"] = 1
        return self.network(input_ids=tokens, **options).logits[:, -1]

    def fsdp_units(self) -> list[nn.Module]:
        """Return the modules to shard separately, in forward order; the root holds the rest.

        Parameters that several of them share belong to the root.
        """
        in_blocks = {module for block in self.blocks for module in block.modules()}
        outside = [module for module in self.network.modules() if module not in in_blocks]
        embeddings = [module for module in outside if isinstance(module, nn.Embedding)]
        candidates = [*embeddings, *self.blocks]
        if self.head is not self.network and self.head not in in_blocks:
            candidates.append(self.head)
        n_owners = Counter(p for module in candidates for p in module.parameters())

        def shares_nothing(module: nn.Module) -> bool:
            return all(n_owners[parameter] == 1 for parameter in module.parameters())

        return [module for module in candidates if shares_nothing(module)]

    def kept_in_float32(self, dtype: torch.dtype | None) -> set[nn.Parameter]:
        """Return the parameters that are computed with in float32, whatever `dtype` is."""
        if dtype is None:
            return set()
        also: tuple[str, ...] = ()
        if self.config.examined.numbers_documents:
            also = DECAYS
        return transformers_private.find_kept_in_float32(self.network, dtype, also)

    def init_rule(self, _name: str, _width_ratio: float, _depth_ratio: float) -> None:
        """Return None: the weights of `init_from` or of a checkpoint fill all parameters."""

    def to_empty(
        self, *, device: torch.device | str | int | None, recurse: bool = True
    ) -> TransformersModel:
        """Allocate the parameters, see `nn.Module`. Buffers keep their values, tied weights one.

        Buffers that FSDP has moved to a GPU stay there: it offloads parameters only.
        """
        buffers: dict[_Owner, Tensor] = {}
        for module in self.modules():
            for name, buffer in module.named_buffers(recurse=False):
                buffers[_Owner(module, name)] = buffer
        super().to_empty(device=device, recurse=recurse)
        for owner, buffer in buffers.items():
            setattr(owner.module, owner.name, buffer.to(device) if buffer.is_cpu else buffer)
        for target, source in self._ties:
            setattr(target.module, target.name, getattr(source.module, source.name))
        return self


def _find_lengths(position_ids: Tensor) -> dict[str, Any]:
    """Return where documents start in all rows together, as flash attention is called with."""
    from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

    (starts, _), (longest, _) = prepare_fa_kwargs_from_position_ids(position_ids)
    n_tokens = int(longest)
    return {
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": n_tokens,
        "max_length_k": n_tokens,
    }


def _masks_of(part: SequencePart, masks: Any, position_ids: Tensor) -> Any:
    """Return the masks of a part of sequences, from those of complete ones, of each kind of layer.

    Args:
        masks: a mask of attention that is left out hides nothing but later keys.
        position_ids: of complete sequences.
    """
    if isinstance(masks, dict):
        return {
            kind: None if kind in _WITHOUT_MASKS else _masks_of(part, mask, position_ids)
            for kind, mask in masks.items()
        }
    if masks is None:
        bounds = find_key_bounds(torch.zeros_like(position_ids), None)
        masks = make_mask(bounds, position_ids.shape[1])
    return part.mask_of(masks)


_WITHOUT_MASKS = ("linear_attention", "conv")
"""Kinds of layers that multiply tokens by a mask of padding, of which a packed row has none."""

# ---- classes of transformers


def read_config(values: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the config of transformers with the `values` of a config.json.

    Raises:
        ConfigError: transformers is missing, does not know the model, or refuses a value; or a size
            is one that no model has, for which transformers would take all memory.
    """
    transformers = _import_transformers()
    classes = transformers.CONFIG_MAPPING
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in classes:
        raise ConfigError(f"model_type: {_explain_unknown(values)}")
    _refuse_huge(values)
    with quiet(), one_line_errors(str(model_type)):
        decoded = transformers_private.decode_special_floats(copy.deepcopy(dict(values)))
        return classes[model_type].from_dict(decoded)


def _refuse_huge(values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict):
            _refuse_huge(value)
            continue
        limit = math.inf
        if key.endswith(_SIZES):
            limit = MAX_SIZE
        elif key.endswith(_LAYERS):
            limit = MAX_LAYERS
        if isinstance(value, int) and value > limit:
            raise ConfigError(f"{key}: {value} is more than {limit}")


_SIZES = ("size", "dim", "heads", "head", "experts", "embd", "d_model", "inner", "rank")
_LAYERS = ("layers", "layer", "blocks", "depth")
"""ends of keys"""


def text_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the complete values of the language model in a config.json with `values`.

    Raises:
        ConfigError: see `read_config` and `language_model_of`.
    """
    config = language_model_of(read_config(values))
    complete = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in complete.items() if key not in _NOT_OF_THE_MODEL}


def language_model_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the language model that a model is, or contains next to e.g. vision.

    Raises:
        ConfigError: there is none without an encoder.
    """
    outer = f"model_type: {config.model_type!r}"
    if config.is_encoder_decoder:
        raise ConfigError(
            f"{outer}: encodes its input by another network; use a decoder-only model"
        )
    with one_line_errors(outer):
        text = copy.deepcopy(config.get_text_config(decoder=True))
        if text.model_type != config.model_type:
            text.tie_word_embeddings = getattr(config, "tie_word_embeddings", False)
    if type(text) not in _import_transformers().MODEL_FOR_CAUSAL_LM_MAPPING:
        problem = f"transformers has no causal language model for {text.model_type}"
        raise ConfigError(f"model_type: {problem}")
    return text


_NOT_OF_THE_MODEL = (
    "_name_or_path",
    "_attn_implementation",
    "_experts_implementation",
    "architectures",
    "attn_implementation",
    "dtype",
    "quantization_config",
    "transformers_version",
    "use_cache",
)
"""Keys of config.json that change nothing of what a model computes."""


def _import_transformers() -> Any:
    # Which transformers would call for its functions, and RWKV download kernels with.
    sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]  # as if it were not installed
    with quiet():  # torchao, which it imports, logs what a CPU does not have
        import transformers
    return transformers


def _explain_unknown(values: Mapping[str, Any]) -> str:
    """Return why transformers does not know the model of a config.json."""
    installed = _import_transformers().__version__
    problem = f"{values.get('model_type')!r} is unknown to transformers {installed}"
    if "auto_map" in values:
        problem += "; its own code (trust_remote_code) is never run"
    made_with = values.get("transformers_version")
    if isinstance(made_with, str) and made_with[:20] != installed:
        problem += f"; config.json was written by transformers {made_with[:20]}"
    return problem


@contextmanager
def one_line_errors(prefix: str) -> Iterator[None]:
    """Raise a ConfigError for what transformers refuses, by exceptions of any type."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{prefix}: transformers refuses it: {one_line(error)}") from None


def one_line(error: Exception) -> str:
    """Return what an exception of transformers says, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


@contextmanager
def quiet(level: int = logging.WARNING) -> Iterator[None]:
    """Let nothing be logged up to `level`, and warn of nothing."""
    before = logging.root.manager.disable
    logging.disable(level)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


def build_network(
    config: PreTrainedConfig, *, attention: str = "class", on_meta: bool = True
) -> PreTrainedModel:
    """Return the causal language model of `config`.

    Args:
        attention: what computes it, see `Examined`.
        on_meta: have its parameters on the meta device. Its buffers have values in any case, e.g.
            rotary frequencies, as its class computes them.

    Raises:
        ConfigError: transformers refuses the config, or the class `attention`.
    """
    place = parameters_on_meta() if on_meta else nullcontext()
    auto = _import_transformers().AutoModelForCausalLM
    options: dict[str, Any] = {"dtype": torch.float32}
    if attention == "documents":
        transformers_attention.register()
        options["attn_implementation"] = transformers_attention.NAME
    elif attention != "class":
        options["attn_implementation"] = attention
    with place, torch.device("cpu"), quiet(), one_line_errors(config.model_type):
        network = auto.from_config(copy.deepcopy(config), **options)
    computed_by = transformers_private.attention_of(network)
    if attention not in ("class", "documents", computed_by):
        raise ConfigError(f"{config.model_type}: {computed_by} computes its attention instead")
    for module in network.modules():
        _use_own_code(type(module).__module__)
    return network


@functools.cache
def _use_own_code(modeling_file: str) -> None:
    """Let a module of transformers call its own functions, not those of other packages.

    It would call what is installed instead, such as flash-linear-attention, most of which needs a
    GPU: the examination, which is made on a CPU, would fail or say nothing of what a run computes.
    """
    module = sys.modules[modeling_file]
    for name, function in list(vars(module).items()):
        if _calls_packages(function):
            setattr(module, name, function.__wrapped__)


def _calls_packages(function: Any) -> bool:
    """Return whether transformers has decorated one of its functions to call other packages."""
    is_decorated = inspect.isfunction(function) and hasattr(function, "__wrapped__")
    return is_decorated and function.__code__.co_filename.endswith("hub_kernels.py")


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Move each parameter to the meta device when its module gets it."""

    def move(_module: nn.Module, _name: str, parameter: nn.Parameter) -> Any:
        if parameter.is_meta:
            return parameter
        on_meta = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        transformers_private.mark_as_initialized(on_meta)
        return on_meta

    with register_module_parameter_registration_hook(move):
        yield


def find_blocks(network: PreTrainedModel) -> list[nn.Module]:
    """Return the layers of a network in forward order: what transformers never splits.

    Of a class that does not say it, the members of its lists of modules.
    """
    names = transformers_private.names_of_blocks(network)
    lists = [module for module in network.modules() if isinstance(module, nn.ModuleList)]
    members = {member for modules in lists for member in modules}

    def is_block(module: nn.Module) -> bool:
        if names:
            return type(module).__name__ in names
        return module in members

    blocks: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in network.modules():
        if module not in inside and is_block(module) and any(True for _ in module.parameters()):
            blocks.append(module)
            inside.update(module.modules())
    return blocks


class _Owner(NamedTuple):
    """Where a parameter or a buffer is: a module's attribute."""

    module: nn.Module
    name: str


def _find_ties(network: nn.Module) -> list[tuple[_Owner, _Owner]]:
    """Return the places of each parameter that has several: another one, and the first."""
    first: dict[nn.Parameter, _Owner] = {}
    ties: list[tuple[_Owner, _Owner]] = []
    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owner = _Owner(module, name)
            if parameter in first:
                ties.append((owner, first[parameter]))
            else:
                first[parameter] = owner
    return ties
