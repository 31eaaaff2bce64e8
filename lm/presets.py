"""Published models: the hyperparameters of `ModelConfig` that `model=NAME` sets."""

from __future__ import annotations

from typing import Any


def _preset(
    family: dict[str, Any], d_model: int, n_layers: int, n_heads: int, **changes: Any
) -> dict[str, Any]:
    size = {"d_model": d_model, "n_layers": n_layers, "n_heads": n_heads}
    return size | family | changes


_GPT2 = {
    "vocab_size": 50257,
    "max_seq_len": 1024,
    "ffn": "gelu",
    "bias": "all",
    "tie_embeddings": True,
}
_LLAMA_STYLE = {"norm": "rmsnorm", "positions": "rope", "ffn": "swiglu", "bias": "none"}
_LLAMA2 = {"vocab_size": 32000, "max_seq_len": 4096, **_LLAMA_STYLE}
_LLAMA3 = _LLAMA2 | {
    "n_kv_heads": 8,
    "vocab_size": 128256,
    "max_seq_len": 8192,
    "rope_theta": 500000.0,
}
_SMOLLM2 = _LLAMA2 | {"vocab_size": 49152, "max_seq_len": 8192, "tie_embeddings": True}
_LLAMA32 = _LLAMA3 | {
    "d_ff": 8192,
    "tie_embeddings": True,
    "rope_scaling": {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_CODELLAMA = _LLAMA2 | {"vocab_size": 32016, "max_seq_len": 16384, "rope_theta": 1e6}
_MISTRAL = _LLAMA2 | {"n_kv_heads": 8, "d_ff": 14336}
_MISTRAL_NEMO = _MISTRAL | {
    "head_dim": 128,
    "vocab_size": 131072,
    "max_seq_len": 131072,
    "rope_theta": 1e6,
}
_QWEN = _LLAMA2 | {"rope_theta": 1e6, "norm_eps": 1e-6, "vocab_size": 151936}
_QWEN25 = _QWEN | {"bias": "qkv", "max_seq_len": 131072}
_QWEN25_SMALL = _QWEN25 | {"n_kv_heads": 2, "tie_embeddings": True}
_QWEN3 = _QWEN | {"n_kv_heads": 8, "head_dim": 128, "qk_norm": "head", "max_seq_len": 40960}
_QWEN3_SMALL = _QWEN3 | {"tie_embeddings": True}
_OLMO2 = _LLAMA2 | {
    "vocab_size": 100352,
    "rope_theta": 500000.0,
    "norm_eps": 1e-6,
    "qk_norm": "projection",
    "norm_placement": "post",
}
_QWEN3_MOE = _QWEN3 | {"n_kv_heads": 4, "n_experts": 128, "experts_per_token": 8}
_OLMOE = _LLAMA2 | {
    "vocab_size": 50304,
    "qk_norm": "projection",
    "n_experts": 64,
    "experts_per_token": 8,
    "norm_topk_prob": False,
}

PRESETS: dict[str, dict[str, Any]] = {
    # family, d_model, n_layers, n_heads
    "gpt2": _preset(_GPT2, 768, 12, 12),
    "gpt2-medium": _preset(_GPT2, 1024, 24, 16),
    "gpt2-large": _preset(_GPT2, 1280, 36, 20),
    "gpt2-xl": _preset(_GPT2, 1600, 48, 25),
    "llama2-7b": _preset(_LLAMA2, 4096, 32, 32),
    "llama2-13b": _preset(_LLAMA2, 5120, 40, 40),
    "llama2-70b": _preset(_LLAMA2, 8192, 80, 64, n_kv_heads=8, d_ff=28672),
    "llama3-8b": _preset(_LLAMA3, 4096, 32, 32, d_ff=14336),
    "llama3-70b": _preset(_LLAMA3, 8192, 80, 64, d_ff=28672),
    "llama3.2-1b": _preset(_LLAMA32, 2048, 16, 32),
    "llama3.2-3b": _preset(_LLAMA32, 3072, 28, 24),
    "codellama-7b": _preset(_CODELLAMA, 4096, 32, 32),
    "mistral": _LLAMA_STYLE,
    "mistral-7b": _preset(_MISTRAL, 4096, 32, 32, max_seq_len=32768, sliding_window=4096),
    "mistral-nemo-12b": _preset(_MISTRAL_NEMO, 5120, 40, 32),
    "qwen2.5-0.5b": _preset(_QWEN25_SMALL, 896, 24, 14, max_seq_len=32768, d_ff=4864),
    "qwen2.5-1.5b": _preset(_QWEN25_SMALL, 1536, 28, 12, d_ff=8960),
    "qwen2.5-7b": _preset(_QWEN25, 3584, 28, 28, vocab_size=152064, n_kv_heads=4, d_ff=18944),
    "qwen3-0.6b": _preset(_QWEN3_SMALL, 1024, 28, 16, d_ff=3072),
    "qwen3-1.7b": _preset(_QWEN3_SMALL, 2048, 28, 16, d_ff=6144),
    "qwen3-4b": _preset(_QWEN3_SMALL, 2560, 36, 32, d_ff=9728),
    "qwen3-8b": _preset(_QWEN3, 4096, 36, 32, d_ff=12288),
    "smollm2-1.7b": _preset(_SMOLLM2, 2048, 24, 32, d_ff=8192, rope_theta=130000.0),
    "olmo2-7b": _preset(_OLMO2, 4096, 32, 32, d_ff=11008),
    "olmoe-1b-7b": _preset(_OLMOE, 2048, 16, 16, d_ff=1024),
    "qwen3-30b-a3b": _preset(_QWEN3_MOE, 2048, 48, 32, d_ff=768),
}
