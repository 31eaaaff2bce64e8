"""A class of transformers made small: its config with every size cut.

`small_configs` knows the names that sizes have in configs of transformers. What it does not know
stays as it is, so a config that it cuts is one of the same class, with every kind of layer, whose
random model takes a fraction of a second. Some classes need more: two layers of each kind that
share weights, or sizes that depend on each other in ways that their names do not say. For these,
what the class derives from other sizes is left to it, and at last all widths are kept.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from lm.errors import ConfigError
from lm.transformers_config import set_random_rates

VOCABULARY = 96
WINDOW = 8
"""tokens of sliding windows and of chunks: fewer than documents have in the examination"""
POSITIONS = 128

POSITIONS_OF = {
    "max_position_embeddings": POSITIONS,
    "max_seq_len": POSITIONS,
    "n_positions": POSITIONS,
    "original_max_position_embeddings": POSITIONS // 2,
}
"""more than rows have in the examination; those of a table of positions"""
_IDS = ("_id", "_index")
"""ends of the names of numbers that are no sizes"""
_LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers", "num_blocks")
_INNER = 96
"""widths of feed-forward networks"""
_SIZES_BY_NAMES = {
    "attention_hidden_size d_model emb_dim embedding_dim embedding_size hidden_size lru_width"
    " mamba_d_ssm n_embd word_embed_proj_dim": 64,
    "qk_head_dim swa_head_dim": 32,
    "head_dim hidden_size_per_layer_input index_head_dim indexer_head_dim kv_channels kv_lora_rank"
    " linear_head_dim linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim"
    " o_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim": 16,
    "mamba_d_state mamba_dt_rank rotary_dim ssm_state_size state_size time_step_rank": 8,
    "dense_intermediate_size expert_ffn_hidden_size ffn_dim ffn_hidden_size intermediate_size"
    " intermediate_size_mlp moe_intermediate_size moe_shared_expert_intermediate_size n_inner"
    " shared_expert_intermediate_size shared_intermediate_size": _INNER,
    "encoder_hash_byte_group_vocab vocab_size vocab_size_per_layer_input": VOCABULARY,
    "attention_chunk_size attention_window_size chunk_size heavily_compressed_attention index_topk"
    " indexer_budget mamba_chunk_size sliding_window sliding_window_size window_size": WINDOW,
}
"""Keys, separated by spaces -> their size. A size of 0 stays."""
_SIZES = POSITIONS_OF | {
    key: size for keys, size in _SIZES_BY_NAMES.items() for key in keys.split()
}
_INDEPENDENT = (_INNER, VOCABULARY, WINDOW)
"""sizes that are cut even if widths stay"""
_HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "linear_num_heads",
    "swa_num_attention_heads",
)
_KV_HEADS = (
    "num_key_value_heads",
    "kv_n_heads",
    "num_kv_heads",
    "swa_num_key_value_heads",
)
"""of all layers, or of some"""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "moe_top_k",
    "moe_topk",
    "top_k_experts",
)
_MOST = {
    **dict.fromkeys(_EXPERTS, 4),
    **dict.fromkeys((*_EXPERTS_PER_TOKEN, "n_group", "num_expert_group", "zero_expert_num"), 2),
    "topk_group": 1,
}
_IF_NULL = {
    "head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
}
"""What some classes derive from other sizes, and others need."""
_MAMBA_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
_RATE = 0.25


def small_configs(values: Mapping[str, Any], derived: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield versions of the complete config `values`, the smallest one first.

    Args:
        derived: keys of sizes that the class of the config sets if they are missing.
    """
    _check_experts(values)
    yield _cut(values)
    given = {key: value for key, value in values.items() if key not in derived}
    yield _cut(given, layers_of_a_kind=2)
    yield _cut(values, cuts_widths=False)


def _cut(
    values: Mapping[str, Any], *, layers_of_a_kind: int = 1, cuts_widths: bool = True
) -> dict[str, Any]:
    small = copy.deepcopy(dict(values))
    _cut_layers(small, layers_of_a_kind)
    _cut_sizes(small, cuts_widths=cuts_widths)
    if cuts_widths:
        _cut_heads(small)
        _cut_mamba(small)
    if cuts_widths and isinstance(small.get("rope_parameters"), dict):
        _cut_rope(small["rope_parameters"], small)
    set_random_rates(small, 0.0)
    return small


KeyPath = tuple[str, ...]
"""Keys that lead to a value inside of mappings."""


def possible_lengths(config: Mapping[str, Any], least: int) -> Iterator[KeyPath]:
    """Yield where a small config has integers above `least` that may be numbers of positions.

    They are all but those whose names say that they are something else, and windows, which are
    shorter.
    """
    for key, value in config.items():
        is_known = key in _SIZES and key not in POSITIONS_OF
        if isinstance(value, dict) and key != "per_layer_config":
            for inner in possible_lengths(value, least):
                yield (key, *inner)
        elif isinstance(value, int) and value > least and not is_known and not key.endswith(_IDS):
            yield (key,)


def with_value(config: Mapping[str, Any], path: KeyPath, value: int) -> dict[str, Any]:
    """Return a config with another value at `path`."""
    changed = copy.deepcopy(dict(config))
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


def with_dropout(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with dropout wherever its class can have some."""
    random = copy.deepcopy(dict(config))
    set_random_rates(random, _RATE)
    return random


def _cut_layers(small: dict[str, Any], layers_of_a_kind: int) -> None:
    """Keep the first layers of each kind."""
    if small.pop("num_layers_per_stack", None):  # from which all layers are derived
        small["num_hidden_layers"] = 1
        return
    n_layers = next((small[key] for key in _LAYERS if isinstance(small.get(key), int)), None)
    if n_layers is None:
        return
    kinds = _find_kinds(small, n_layers)
    if len(kinds) == 1:
        kept = kinds[0][:4]
        _cut_periods(small)
    else:
        kept = sorted(layer for layers in kinds for layer in layers[:layers_of_a_kind])[:6]
    _keep_layers(small, n_layers, kept)


def _find_kinds(small: Mapping[str, Any], n_layers: int) -> list[list[int]]:
    """Return the numbers of the layers of each kind.

    Lists with an option of each layer tell them apart, and whether they share the keys and values
    of earlier ones.
    """
    options = _options_of_layers(small, n_layers)
    kinds: dict[str, list[int]] = {}
    for layer in range(n_layers):
        its_options = [of_layers[layer] for of_layers in options]
        is_shared = layer >= n_layers - _n_shared(small)
        kinds.setdefault(repr((its_options, is_shared)), []).append(layer)
    return list(kinds.values())


def _options_of_layers(small: Mapping[str, Any], n_layers: int) -> list[list[Any]]:
    """Return the lists of a config that have an element for each layer."""
    lists = [value for value in small.values() if isinstance(value, list)]
    return [value for value in lists if len(value) == n_layers > 1]


def _n_shared(small: Mapping[str, Any]) -> int:
    """Return how many layers, the last ones, use the keys and values of earlier ones."""
    return small.get("num_kv_shared_layers") or 0


def _keep_layers(small: dict[str, Any], n_layers: int, kept: Sequence[int]) -> None:
    """Change a config of `n_layers` layers to one of those with the numbers `kept`."""
    for of_layers in _options_of_layers(small, n_layers):
        of_layers[:] = [of_layers[layer] for layer in kept]
    for key, value in small.items():
        if key.endswith("_layer_indices") and (value is None or value):
            small[key] = [1]
    per_layer = small.get("per_layer_config")
    if isinstance(per_layer, dict):
        numbers = {layer: number for number, layer in enumerate(kept)}
        small["per_layer_config"] = {
            str(numbers[int(layer)]): options
            for layer, options in per_layer.items()
            if int(layer) in numbers
        }
    n_shared = _n_shared(small)
    if n_shared:
        small["num_kv_shared_layers"] = sum(layer >= n_layers - n_shared for layer in kept)
    for key in ("first_k_dense_replace", "num_dense_layers"):
        if isinstance(small.get(key), int):
            small[key] = min(small[key], 1)
    for key in _LAYERS:
        if small.get(key) == n_layers:
            small[key] = len(kept)


def _cut_periods(small: dict[str, Any]) -> None:
    """Let what happens every so many layers happen within the first four."""
    for key, value in small.items():
        is_period = key.endswith(("_interval", "_period", "_pattern"))
        if is_period and isinstance(value, int) and value > 2:
            small[key] = 2
            offset = key.rpartition("_")[0] + "_offset"
            if isinstance(small.get(offset), int):
                small[offset] %= 2


def _cut_sizes(small: dict[str, Any], *, cuts_widths: bool) -> None:
    """Cut what has a known name, in inner mappings and lists, too."""
    for key, value in small.items():
        size = _SIZES.get(key)
        if isinstance(value, dict):
            _cut_sizes(value, cuts_widths=cuts_widths)
        elif value is None:
            small[key] = _IF_NULL.get(key)
        elif size is not None and (cuts_widths or size in _INDEPENDENT or key in POSITIONS_OF):
            small[key] = _replace(value, size)
        elif key in _MOST:
            small[key] = _replace(value, _MOST[key], least=_MOST[key])
        elif key == "pad_token_id":
            small[key] = 0
        elif key.endswith(("_token_id", "_token_index", "_token_ids")):
            small[key] = _replace(value, VOCABULARY - 1, least=VOCABULARY)


def _replace(value: Any, size: int, least: int = 1) -> Any:
    """Return `size` for a number of at least `least`; and for each of a list."""
    if isinstance(value, list):
        return [_replace(each, size, least) for each in value]
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if is_number and value >= least:
        return size
    return value


def _check_experts(values: Mapping[str, Any]) -> None:
    """Raise ConfigError if a token has more experts than there are, which a small model hides."""
    counts = {key: value for key, value in values.items() if type(value) is int and value > 0}
    n_experts = [(key, counts[key]) for key in _EXPERTS if key in counts]
    for per_token in _EXPERTS_PER_TOKEN:
        for key, n in n_experts:
            if counts.get(per_token, 0) > n:
                raise ConfigError(f"{per_token}: {counts[per_token]} exceeds {key} {n}")


def _cut_heads(small: dict[str, Any]) -> None:
    """Let there be four heads, of which keys and values have as many, one, or else two."""
    heads: Any = None
    for values in (small, *(value for value in small.values() if isinstance(value, dict))):
        for key in _HEADS:
            if isinstance(values.get(key), int):
                heads = values[key]
                values[key] = 4
        for key in _KV_HEADS:
            if key in values:
                values[key] = _cut_kv_heads(values[key], heads)
    n_linear = small.get("linear_num_key_heads")
    if isinstance(n_linear, int):
        are_equal = n_linear == small.get("linear_num_value_heads")
        small["linear_num_key_heads"] = 2
        small["linear_num_value_heads"] = 2 if are_equal else 4
    if isinstance(small.get("index_n_heads"), int):
        small["index_n_heads"] = 16  # with few, ReLU leaves ties between tokens


def _cut_kv_heads(value: Any, heads: Any) -> Any:
    if value is None:
        return 4
    if not isinstance(value, int) or isinstance(value, bool) or value <= 1:
        return value
    return 4 if value == heads else 2


def _cut_mamba(small: dict[str, Any]) -> None:
    """Let the heads of Mamba layers have 16 of their inner width each."""
    heads = [key for key in _MAMBA_HEADS if isinstance(small.get(key), int)]
    width_of_head = "mamba_d_head"
    if "mamba_head_dim" in small:
        width_of_head = "mamba_head_dim"
    if small.get("model_type") == "mamba2":
        heads = ["num_heads"]
        width_of_head = "head_dim"
    if not heads:
        return
    expand = small.get("mamba_expand", small.get("expand", 2))
    inner = small.get("mamba_d_ssm") or int(expand * small.get("hidden_size", 64))
    small[heads[0]] = inner // 16
    if isinstance(small.get(width_of_head), int):
        small[width_of_head] = 16
    for key in ("n_groups", "mamba_n_groups", "mamba_ngroups"):
        if isinstance(small.get(key), int):
            small[key] = min(small[key], 2)


def _cut_rope(rope: dict[str, Any], small: Mapping[str, Any]) -> None:
    """Cut the lists of a rotary embedding's options to the rotated dimensions of a small head."""
    head = small.get("qk_rope_head_dim") or small.get("head_dim")
    if not isinstance(head, int):
        head = 16
    n_angles = int(head * (rope.get("partial_rotary_factor") or 1)) // 2
    for key in ("short_factor", "long_factor"):
        if isinstance(rope.get(key), list):
            rope[key] = rope[key][:n_angles]
    sections: Sequence[int] | None = rope.get("mrope_section")
    if sections:
        rest = n_angles - (len(sections) - 1)
        rope["mrope_section"] = [rest, *([1] * (len(sections) - 1))]
