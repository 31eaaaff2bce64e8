"""Export of a checkpoint for transformers' `from_pretrained`, or of its adapters for PEFT's.

Memory holds the weights once, in the dtype of the export.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
import torch
from torch import Tensor

from lm.checkpoint.compare import find_changes
from lm.checkpoint.contents import verify
from lm.checkpoint.headers import full_shape
from lm.checkpoint.layout import model_of
from lm.checkpoint.locate import find_checkpoint
from lm.checkpoint.manifest import MANIFEST, WEIGHTS, Base, Manifest, read_manifest
from lm.checkpoint.tensor_files import (
    Source,
    read_into,
    torch_dtype,
    write_tensors,
)
from lm.data.tokenizer.byte_tokenizer import ByteTokenizer
from lm.data.tokenizer.file_tokenizer import END_OF_TEXT
from lm.data.tokenizer.files import (
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    MODEL_CONFIG,
    TOKENIZER_FILES,
    TOKENIZER_JSON,
    as_list,
    read_tokenizer_files,
)
from lm.data.tokenizer.loading import Tokenizer, load_saved_tokenizer
from lm.errors import ConfigError, limit_problems, oserror_as_config_error
from lm.hf import config_json, families, weights
from lm.hf.base import find_base_of, open_base, read_adapters
from lm.hf.class_export import collect, export_directory, write_directory, write_files
from lm.hf.class_weights import open_weights
from lm.hf.files import to_json
from lm.hf.saved_model import build_saved_model, find_names
from lm.hf.weights import find_weights
from lm.shards import Rows
from lm.storage.folder import drafted, writing
from lm.training.config import LoraConfig
from lm.training.lora import Adapters
from lm.transformers_config import AnyModelConfig, TransformersConfig, without_numbers
from lm.transformers_model import NETWORK, build_network, read_config, text_config
from lm.transformers_private import find_renamed, layouts_of_experts
from model import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@oserror_as_config_error
def export_model(
    where: Path | str,
    out: Path,
    dtype: str | None = None,
    base_dir: Path | None = None,
    adapters_only: bool = False,
) -> int:
    """Convert the checkpoint or run `where`, a path or URL, to the directory `out`.

    Args:
        dtype: one of `WEIGHT_DTYPES`; None = float32, or for a model of transformers that of each
            tensor of `init_from`.
        base_dir: see `open_base`; of adapters alone, only its config.json is read. Of a class of
            transformers trained from a checkpoint, the directory whose other files are copied.
        adapters_only: write LoRA adapters in PEFT's format, instead of the model with adapters
            merged.

    Returns:
        Bytes of weights.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged.
        ConfigError: no Hugging Face model has this structure (lists every key that differs), `out`
            exists, there are no adapters, PEFT cannot load their base, or it is not found.
        RunError: `out` cannot be written, or a weight exceeds the range of float16.
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out}: already exists and is not overwritten; use another directory")
    directory = find_checkpoint(where)
    manifest = read_manifest(directory)
    config = model_of(directory, manifest)
    if adapters_only:
        of_adapters = getattr(torch, dtype or "float32")
        return _export_adapters(out, directory, manifest, config, of_adapters, base_dir)
    verify(directory, manifest, parts=WEIGHTS)
    adapters: Adapters | None = None
    if manifest.base is not None:
        adapters = read_adapters(directory, manifest)
    if isinstance(config, TransformersConfig):
        return _export_of_class(out, directory, manifest, config, dtype, base_dir, adapters)
    return _export_of_ours(out, directory, manifest, config, dtype or "float32", base_dir, adapters)


def _export_of_ours(
    out: Path,
    directory: Path,
    manifest: Manifest,
    config: ModelConfig,
    dtype: str,
    base_dir: Path | None,
    adapters: Adapters | None,
) -> int:
    """Write a model of model.py as one of the class that can represent it."""
    family = config_json.find_family(config)
    tokenizer = _load_tokenizer(directory, manifest)
    files: dict[str, bytes] = {GENERATION_CONFIG: to_json({})}
    settings = config_json.write_config(config, dtype)
    if tokenizer is not None:
        files = _convert_tokenizer(tokenizer, tokenizer.bos_id)
        settings["bos_token_id"] = tokenizer.bos_id
        settings["eos_token_id"] = _stop_ids(tokenizer)
    network = build_network(read_config(settings))
    complete = json.loads(network.config.to_json_string())
    architecture = {"architectures": [type(network).__name__]}
    files[MODEL_CONFIG] = to_json(complete | settings | architecture)

    weights_dir = find_base_of(directory, manifest, base_dir) or directory
    sources = find_weights(weights_dir, config)
    names = families.map_parameters(family, config)
    empty = network.state_dict()
    lost = sorted(names.keys() - empty.keys())
    if lost:
        problem = f"its class has no {', '.join(limit_problems(lost))}"
        raise ConfigError(f"{family.model_type}: {problem}; {_OTHER_VERSION}")

    def read_tensor(their_name: str) -> Tensor:
        if their_name not in names:
            if not their_name.endswith("bias"):
                problem = f"{family.model_type}: its class also has {their_name}"
                raise ConfigError(f"{problem}; {_OTHER_VERSION}")
            # The model does not have this bias.
            return torch.zeros(empty[their_name].shape)
        parts: list[Tensor] = []
        for name in names[their_name]:
            tensor = _read(sources[name])
            if adapters is not None:
                adapters.merge(name, tensor)
            parts.append(tensor)
        return families.join(family, their_name, parts)

    dtypes: dict[str, torch.dtype] = {name: getattr(torch, dtype) for name in empty}
    for name, buffer in network.named_buffers():  # biases of routers stay as exact as they are
        dtypes[name] = buffer.dtype
    state = collect(network, empty, read_tensor, dtypes)
    if "router_bias" in sources:
        for layer, bias in enumerate(_read(sources["router_bias"])):
            state[family.router_bias.format(layer)] = bias
    return write_directory(network, state, out, files)


_OTHER_VERSION = "use the version of transformers in constraints.txt"


def _read(source: Source) -> Tensor:
    tensor = torch.empty(full_shape(source.slices) or (), dtype=torch_dtype(source.slices[0]))
    read_into(tensor, source)
    return tensor


def _export_of_class(
    out: Path,
    directory: Path,
    manifest: Manifest,
    config: TransformersConfig,
    dtype: str | None,
    base_dir: Path | None,
    adapters: Adapters | None,
) -> int:
    """Write the directory of `init_from` again, with the weights of a checkpoint."""
    source = manifest.hyperparameters.get("init_from")
    if manifest.base is not None:
        source = manifest.base.source
    opened = _find_original(str(base_dir or source))
    _require_trained_model(config, opened)
    weights_dir = directory
    if manifest.base is not None:
        weights_dir = open_base(manifest.base, None if _is_checkpoint(manifest.base) else opened)
    class_weights = open_weights(opened)
    tensors: dict[str, Tensor] = {}
    sources: dict[str, Source] = {}
    if weights_dir == opened:
        tensors = class_weights.load()
    else:
        sources = find_weights(weights_dir, config)

    def get_tensor(name: str) -> Tensor:
        our_name = f"{NETWORK}.{name}"
        tensor = _read(sources[our_name]) if sources else tensors[name]
        if adapters is None or not tensor.is_floating_point():
            return tensor
        tensor = tensor.to(torch.float32, copy=True)
        adapters.merge(our_name, tensor)
        return tensor

    tokenizer = _load_tokenizer(directory, manifest)
    files: dict[str, bytes | None] = {}
    stop_ids: int | list[int] | None = None
    if tokenizer is not None:
        files = _replace_tokenizer(tokenizer, opened)
        stop_ids = _stop_ids(tokenizer)
    return export_directory(class_weights, get_tensor, out, dtype, files, stop_ids)


def _is_checkpoint(base: Base) -> bool:
    """Return whether adapters were trained on a checkpoint, not on a Hugging Face model."""
    return (Path(base.source) / MANIFEST).exists()


def _replace_tokenizer(tokenizer: Tokenizer, source: Path) -> dict[str, bytes | None]:
    """Return the files of a tokenizer by name; None = one of `source` that is left out."""
    files = _convert_tokenizer(tokenizer, bos_id=None)
    theirs = read_tokenizer_files(source)
    left_out: set[str] = set()
    if theirs.get(TOKENIZER_JSON) != files[TOKENIZER_JSON]:
        left_out = set(theirs)
    elif CHAT_TEMPLATE in files:  # all chats have it
        left_out = theirs.keys() - set(TOKENIZER_FILES)
    return dict.fromkeys(left_out) | files


def _find_original(source: str) -> Path:
    """Return the directory of the Hugging Face model that a run started from, with all its files.

    Raises:
        ConfigError: it is not there, or the run started from a checkpoint.
    """
    remedy = "pass the directory of the original Hugging Face model with --base"
    if not weights.is_model(source):
        problem = "no Hugging Face model, whose files are copied"
        raise ConfigError(f"init_from: {source}: {problem}; {remedy}")
    try:
        return weights.find_complete_source(source)
    except ConfigError as error:
        raise ConfigError(f"{error}; {remedy}") from None


def _require_trained_model(config: TransformersConfig, directory: Path) -> None:
    """Raise ConfigError if config.json in `directory` describes another model than `config`.

    It is exported, and the trained weights would mean something else in it. Keys that only one of
    two versions of transformers has say nothing of them, and neither do ids of special tokens.
    """
    trained = config.transformers_config
    found = text_config(weights.read_config(str(directory)))
    keys = [key for key in found if key in trained and not key.endswith("_token_id")]
    changes = find_changes(trained, found, keys)
    if changes:
        problem = f"{directory / MODEL_CONFIG}: describes another model than the checkpoint"
        remedy = "pass the directory of the original Hugging Face model with --base"
        raise ConfigError(f"{problem}; {remedy}:", *limit_problems(list(changes.values())))


def _load_tokenizer(directory: Path, manifest: Manifest) -> Tokenizer | None:
    if manifest.tokenizer is None:
        return None
    return load_saved_tokenizer(
        manifest.tokenizer, directory, manifest.files, manifest.hyperparameters
    )


def _export_adapters(
    out: Path,
    directory: Path,
    manifest: Manifest,
    config: AnyModelConfig,
    dtype: torch.dtype,
    base_dir: Path | None,
) -> int:
    """Write the adapters in a checkpoint to `out` in PEFT's format; return their bytes."""
    if manifest.base is None:
        problem = "has no LoRA adapters (lora_rank: null); export it without --adapter"
        raise ConfigError(f"{directory}: {problem}")
    if isinstance(config, ModelConfig):
        problem = f"{directory} has adapters of a model of model.py, which PEFT cannot load"
        raise ConfigError(f"--adapter: {problem}; {_MERGED}")
    if _is_checkpoint(manifest.base):
        problem = f"{directory} has adapters of {manifest.base.source}, which PEFT cannot load"
        raise ConfigError(f"--adapter: {problem}; {_MERGED}")
    saved, names = _find_saved(config, str(base_dir or manifest.base.source))
    adapters = read_adapters(directory, manifest)
    layers: dict[str, str] = {}
    """our layers with adapters, by the class's names"""
    experts: dict[str, str] = {}
    """our tensors of experts with adapters, by the class's names, in its order"""
    for their_name, name in names.items():
        parent, _, leaf = f"{NETWORK}.{name}".rpartition(".")
        if f"{parent}.lora_A.{leaf}" not in adapters:
            continue
        if leaf == "weight":
            layers[their_name.removesuffix(".weight")] = parent
        else:
            experts[their_name] = f"{parent}.{leaf}"
    _refuse_renamed(saved, [*layers, *(name.rpartition(".")[0] for name in experts)])
    _refuse_names_of_experts(saved.config.model_type, layers)
    tensors: dict[str, Tensor] = {}
    for their_name, name in layers.items():
        for part in ("lora_A", "lora_B"):
            tensors[f"{their_name}.{part}.weight"] = adapters[f"{name}.{part}.weight"]
    tensors |= _arrange_for_peft(adapters, experts)
    rows: dict[str, Rows] = {}
    for name, tensor in tensors.items():
        rows[f"base_model.model.{name}"] = Rows(tensor.to(dtype), 0)

    peft_config = _write_peft_config(manifest.base, adapters.config, list(layers), list(experts))
    files = {"adapter_config.json": peft_config}
    tokenizer = _load_tokenizer(directory, manifest)
    if tokenizer is not None:
        files |= _convert_tokenizer(tokenizer, tokenizer.bos_id)
    n_bytes = sum(tensor.nbytes for tensor, _ in rows.values())
    with writing(out), drafted(out, n_bytes) as draft:
        write_tensors(draft / "adapter_model.safetensors", rows)
        write_files(draft, files)
    return n_bytes


def _find_saved(config: TransformersConfig, base: str) -> tuple[PreTrainedModel, Mapping[str, str]]:
    """Return the model that config.json of `base` names, which PEFT adapts, and `find_names` in it.

    Raises:
        ConfigError: `base` has no config.json, or its class does not contain the trained model.
    """
    try:
        base_config = read_config(weights.read_config(base))
    except ConfigError as error:
        remedy = "pass the directory of the original Hugging Face model with --base"
        raise ConfigError(f"{error}; {remedy}") from None
    network = build_network(read_config(config.transformers_config))
    with torch.device("meta"):
        saved = build_saved_model(base_config, network)
    return saved, find_names(saved, network)


def _refuse_renamed(saved: PreTrainedModel, modules: Iterable[str]) -> None:
    """Raise ConfigError if PEFT renames tensors of `modules` when it loads adapters of them."""
    renamed = find_renamed(saved, [f"{name}.lora_A.weight" for name in modules])
    if renamed:
        shown = ", ".join(limit_problems(list(dict.fromkeys(map(without_numbers, renamed)))))
        model_type = saved.config.model_type
        problem = f"PEFT renames {shown} as transformers does in older files of {model_type}"
        raise ConfigError(f"--adapter: {problem}; {_MERGED}")


def _arrange_for_peft(adapters: Adapters, of_experts: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the adapters of experts as PEFT stores those of `target_parameters`, by name.

    PEFT wraps a module once for each of its tensors, the first one innermost. The rows of A are
    those of one expert after those of another; the columns of B are those of all experts for the
    first rank, then for the second, and so on.
    """
    by_module: dict[str, list[str]] = {}
    for place, name in of_experts.items():
        by_module.setdefault(place.rpartition(".")[0], []).append(name)
    tensors: dict[str, Tensor] = {}
    for module, names in by_module.items():
        wrapper = module
        for name in reversed(names):
            parent, _, leaf = name.rpartition(".")
            a = adapters[f"{parent}.lora_A.{leaf}"]  # E rank in
            b = adapters[f"{parent}.lora_B.{leaf}"]  # E out rank
            tensors[f"{wrapper}.lora_A.weight"] = a.flatten(0, 1)
            tensors[f"{wrapper}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1)
            wrapper += ".base_layer"
    return tensors


def _refuse_names_of_experts(model_type: str, targets: Iterable[str]) -> None:
    """Raise ConfigError if PEFT takes `targets` in a class for the matrices of its experts.

    In files of older versions, these were layers of such names. PEFT goes by the last part of a
    target, so that dense layers and shared experts cannot be told from them.
    """
    layout = "mixtral" if model_type == "mixtral" else layouts_of_experts().get(model_type, "")
    names = _NAMES_OF_EXPERTS.get(layout, set())
    taken = [target for target in targets if target.rpartition(".")[2] in names]
    if taken:
        shown = ", ".join(limit_problems(sorted(set(taken))))
        problem = f"PEFT takes adapters of {shown} in {model_type} for those of experts"
        raise ConfigError(f"--adapter: {problem}; {_MERGED}")


_MERGED = "leave it out to export the merged model"
_NAMES_OF_EXPERTS = {
    "mixtral": {"gate", "w1", "w2", "w3"},
    "qwen2_moe": {"gate", "gate_proj", "up_proj", "down_proj"},
}
"""of PEFT's `_MOE_TARGET_MODULE_MAPPING`"""


def _write_peft_config(
    base: Base,
    config: LoraConfig,
    layers: Sequence[str],
    parameters: Sequence[str],
) -> bytes:
    """Return PEFT's `adapter_config.json`.

    Args:
        layers: `target_modules`.
        parameters: targets that are tensors of experts.
    """
    name = base.source
    revision: str | None = None
    is_on_hub = not Path(base.source).is_absolute()
    if is_on_hub:
        name, _, revision = base.source.partition("@")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": revision or None,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "use_rslora": config.use_rslora,
        "lora_dropout": config.lora_dropout,
        "target_modules": layers,
        "target_parameters": parameters or None,
        "bias": "none",
        "inference_mode": True,
    }
    return to_json(settings)


def _convert_tokenizer(tokenizer: Tokenizer, bos_id: int | None) -> dict[str, bytes]:
    """Return the files that `AutoTokenizer` and `GenerationConfig` read, by name."""
    files = dict(tokenizer.files)
    if isinstance(tokenizer, ByteTokenizer):
        files[TOKENIZER_JSON] = _write_byte_level_bpe()
    encoder = tokenizers.Tokenizer.from_buffer(files[TOKENIZER_JSON])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": encoder.id_to_token(tokenizer.eos_id),
    }
    files.setdefault("tokenizer_config.json", json.dumps(settings, indent=2).encode())
    generation: dict[str, Any] = {}
    if bos_id is not None:
        generation["bos_token_id"] = bos_id
    read: dict[str, Any] = json.loads(files.get(GENERATION_CONFIG, b"{}"))
    generation |= read
    if set(as_list(read.get("eos_token_id"))) != tokenizer.chat_stop_ids:
        generation["eos_token_id"] = _stop_ids(tokenizer)
    if generation != read:
        files[GENERATION_CONFIG] = to_json(generation)
    return files


def _stop_ids(tokenizer: Tokenizer) -> int | list[int]:
    """Return the ids that end a text or a reply, as transformers writes them."""
    ids = sorted(tokenizer.chat_stop_ids)
    if len(ids) == 1:
        return ids[0]
    return ids


def _write_byte_level_bpe() -> bytes:
    """Return the file of a byte-level BPE without merges, which has the ids of the byte tokenizer.

    Byte-level BPE represents a byte by its character if that prints, else, in order, by letters
    from U+0100 on.
    """
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    printed = [ord(letter) for letter in letters if ord(letter) < 256]
    others = sorted(set(range(256)) - set(printed))
    vocabulary = dict(zip(letters, [*printed, *others], strict=True))
    encoder = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    encoder.decoder = tokenizers.decoders.ByteLevel()
    encoder.add_special_tokens([tokenizers.AddedToken(END_OF_TEXT, special=True)])
    return encoder.to_str(pretty=True).encode()
