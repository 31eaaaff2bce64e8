"""Models of transformers with random weights, saved and read again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lm.hf.class_weights import ClassWeights, open_weights
from lm.runtime.world import World
from lm.training.parallelize import MeshShape
from lm.transformers_model import build_network, language_model_of
from tests.support.allocations import measure_peak
from tests.support.hf import LLAMA

QWEN3_MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}
HRM = LLAMA | {"model_type": "hrm_text", "num_key_value_heads": 4, "head_dim": 8}
DEEPSEEK_V3 = LLAMA | {
    "model_type": "deepseek_v3",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "image_size": 16,
    "patch_size": 8,
}
GEMMA3_TEXT = LLAMA | {
    "model_type": "gemma3_text",
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
}
GEMMA3 = {
    "model_type": "gemma3",
    "text_config": GEMMA3_TEXT,
    "vision_config": VISION | {"model_type": "siglip_vision_model"},
    "mm_tokens_per_image": 4,
}
QWEN3_5_MOE = {
    "model_type": "qwen3_5_moe",
    "text_config": QWEN3_MOE
    | {
        "model_type": "qwen3_5_moe_text",
        "layer_types": ["linear_attention", "full_attention"],
        "shared_expert_intermediate_size": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "vision_config": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "out_hidden_size": 32,
        "patch_size": 4,
        "num_position_embeddings": 16,
    },
}
MINISTRAL3 = LLAMA | {
    "model_type": "ministral3",
    "tie_word_embeddings": False,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
MISTRAL3 = {
    "model_type": "mistral3",
    "tie_word_embeddings": True,  # which decides, not the text model's
    "text_config": MINISTRAL3,
    "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8},
}


def make_model(raw: Mapping[str, Any]) -> Any:
    """A model of a config, with random weights that all differ."""
    fields = dict(raw)
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    kind = transformers.AutoModelForCausalLM
    if "vision_config" in raw:
        kind = transformers.AutoModelForImageTextToText
    torch.manual_seed(0)
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(0.1 * torch.randn(tensor.shape))
    return model.eval()


def read_network(opened: ClassWeights) -> Any:
    """The network of `opened`, in which what is not read is NaN."""
    network = build_network(language_model_of(opened.config), on_meta=False).eval()
    with torch.no_grad():
        for tensor in network.state_dict().values():
            tensor.fill_(torch.nan)
    opened.read(network)
    return network


def get_from(network: nn.Module) -> Callable[[str], Tensor]:
    return network.state_dict().__getitem__


class ReadShards(NamedTuple):
    """What a rank has read."""

    shapes: dict[str, list[int]]
    """local ones, by tensor"""
    are_equal: bool
    """to what one process reads"""
    peak_bytes: int
    """allocated meanwhile, without the shards"""
    layer_bytes: int
    """of all tensors of a layer"""


def read_on_ranks(world: World, directory: Path) -> ReadShards:
    opened = open_weights(directory)
    sharded = build_network(language_model_of(opened.config))
    fully_shard(sharded, mesh=world.device_mesh(MeshShape(1, world.size)))
    sharded.to_empty(device="cpu")
    peak = measure_peak(lambda: opened.read(sharded, world))
    complete = read_network(opened).state_dict()
    shapes: dict[str, list[int]] = {}
    differing: list[str] = []
    for name, tensor in sharded.state_dict().items():
        local = tensor
        if isinstance(tensor, DTensor):
            local = tensor.to_local()
            tensor = tensor.full_tensor()
        shapes[name] = list(local.shape)
        if not tensor.equal(complete[name]):
            differing.append(name)
    of_layer = [tensor.nbytes for name, tensor in complete.items() if ".layers.0." in name]
    return ReadShards(shapes, not differing, peak, sum(of_layer))


def load_all(directory: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors
