"""Models and tokenizers that transformers creates, and training in transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from torch import nn

from lm.any_model import new_model
from lm.config.hyperparameters import Hyperparameters
from lm.config.reading import read_hyperparameters
from lm.data.loader import Loader
from lm.data.run_data import open_data
from lm.hf import weights
from lm.hf.small_config import small_configs
from lm.training import lora, parallelize
from lm.transformers_model import NETWORK, read_config, text_config
from model import IGNORE_INDEX

VOCABULARY = 300
"""of the models of `save_model`"""
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 96,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}

GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "vocab_size": 96,
    "n_positions": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
MISTRAL = LLAMA | {"model_type": "mistral", "num_key_value_heads": 2}
QWEN2 = LLAMA | {"model_type": "qwen2", "num_key_value_heads": 2}
QWEN3 = LLAMA | {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 12}
OLMO2 = LLAMA | {"model_type": "olmo2", "num_key_value_heads": 2, "pad_token_id": None}

TEXTS = ["Grüße aus Köln, wo der Käse zäh ist.", "def f(x):\n\treturn x + 1\n", "漢字 🎉"]


def make_reference(raw: dict[str, Any], seed: int = 0) -> Any:
    """Return transformers' model of a config.

    Its weights are large enough that all parts affect the logits.
    """
    fields = dict(raw)
    kind = fields.pop("model_type")
    config = transformers.AutoConfig.for_model(kind, **fields)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.15)
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            if is_norm:
                parameter += 1
    return model


def complete_values(kind: str, sizes: Mapping[str, float] = {}, **changes: Any) -> dict[str, Any]:
    """Return the values of a small model of a `kind` of transformers.

    Args:
        sizes: instead of the small ones, and rates instead of 0.
        changes: of the config of which the small one is made.
    """
    config = transformers.CONFIG_MAPPING[kind]()
    raw = json.loads(config.to_json_string()) | {"model_type": kind} | changes
    values = next(small_configs(text_config(raw), derived=()))
    for key in ("vocab_size", "vocab_size_per_layer_input"):
        if key in values:
            values[key] = VOCABULARY
    assert sizes.keys() <= values.keys()  # another name of a size would leave it as it is
    if "max_position_embeddings" in values:
        values["max_position_embeddings"] = 256
    return values | dict(sizes)


def randomize(model: nn.Module) -> None:
    """Let all parts of `model` affect its logits."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim > 1:
                parameter.copy_(0.5 * noise / parameter.shape[-1] ** 0.5)
            else:
                parameter += 0.05 * noise


def save_model(kind: str, folder: Path, sizes: Mapping[str, float] = {}, **changes: Any) -> None:
    """Save a small model of a `kind` of transformers, with a tokenizer."""
    values = complete_values(kind, sizes, **changes)
    model = transformers.AutoModelForCausalLM.from_config(read_config(values))
    randomize(model)
    model.save_pretrained(folder)
    add_tokenizer(folder, 290)


def add_tokenizer(folder: Path, size: int) -> Any:
    """Train a byte-level tokenizer of `size` ids and save it in `folder` as transformers does."""
    encoder = tokenizers.Tokenizer(tokenizers.models.BPE())
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    encoder.train_from_iterator(TEXTS * 3, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=encoder, eos_token="<end>")
    tokenizer.save_pretrained(folder)
    return tokenizer


def read_with_model_defaults(hyperparameters: dict[str, Any], *overrides: str) -> Hyperparameters:
    """Return a run's hyperparameters, in which `init_from` sets what is not set of the model."""
    return read_hyperparameters(
        {"hyperparameters": hyperparameters}, overrides, "test", defaults=weights.model_defaults
    )


def adapters_in_peft(model: nn.Module) -> dict[str, nn.Parameter]:
    """PEFT's adapters by our names."""
    found: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        layer, _, part = name.removeprefix("base_model.model.").rpartition(".lora_")
        if layer:
            found[f"{NETWORK}.{layer}.lora_{part.replace('.default', '')}"] = parameter
    return found


def initial_adapters(hp: Hyperparameters, seed: int) -> dict[str, torch.Tensor]:
    """The adapters that a run with `seed` starts with."""
    model = lora.add_adapters(new_model(hp.model), hp.lora, None).to_empty(device="cpu")
    parallelize.initialize_parameters(model, seed)
    return lora.trained_parameters(model)


def start_as_ours(adapters: dict[str, nn.Parameter], hp: Hyperparameters, seed: int) -> None:
    """Give `adapters` the values that a run with `seed` starts with."""
    initial = initial_adapters(hp, seed)
    assert adapters.keys() == initial.keys()
    for name, values in initial.items():
        adapters[name].data.copy_(values)


def train_reference(
    model: nn.Module, optimizer: Any, hp: Hyperparameters, seed: int
) -> list[float]:
    """Train a model of transformers on the batches of a run; return the loss of each step.

    It reads rows without their padding, together with others of their length.
    """
    total = hp.data.total_batch_size or 0
    data = open_data(hp.data, hp.model.vocab_size, hp.model.max_seq_len, total, seed)
    batches = Loader(hp.data, data, total, 0, 1, torch.device("cpu")).training(0)
    losses = []
    for _ in range(hp.run.max_steps or 0):
        rows_by_length: dict[int, list[torch.Tensor]] = {}
        for micro_batch in next(batches).micro_batches:
            for row in torch.stack([micro_batch.inputs, micro_batch.targets], dim=1):
                length = int((row[1] != IGNORE_INDEX).nonzero()[-1]) + 1
                rows_by_length.setdefault(length, []).append(row[:, :length])
        loss = torch.zeros(())
        n_targets = 0
        for rows in rows_by_length.values():
            inputs, targets = torch.stack(rows, dim=1)
            logits = model(inputs).logits.flatten(0, 1)
            loss = loss + nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
            n_targets += int((targets != IGNORE_INDEX).sum())
        loss = loss / n_targets
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
