"""The attention of model.py for classes of transformers, by its public interface.

A class calls two functions that are registered by a name: one makes masks from what the class says
of pairs of positions, the other attends. A class that makes its masks otherwise, or changes them,
computes something else with ours, which its examination finds (lm/hf/examine.py); it keeps its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lm.attention import Mask, SequencePart, attend, find_key_bounds, make_mask

NAME = "lm"
"""by which transformers finds the functions, as `attn_implementation`"""


@functools.cache
def register() -> None:
    """Let classes of transformers find the functions."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _make_mask)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    part: SequencePart | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """Return what `attend` does, `(B, T, H, K)`; what else a class passes acts on other kernels.

    Args:
        module: of the class; its `is_causal` holds where the argument is None.
        s_aux: sinks.
        part: of longer sequences, that the tokens are; needs a mask.
    """
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    output = attend(
        query,
        key,
        value,
        attention_mask,
        is_causal=is_causal,
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
        dropout=dropout,
        gather=None if part is None else part.gather,
    )
    return output.transpose(1, 2).contiguous(), None


def _make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    *,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Mask | None:
    """Return the mask of a kind of layer; None = each query attends to all keys before it.

    Args: those of `transformers.masking_utils.sdpa_mask`, which makes the masks of cached keys.
        mask_function: of row, head, query and key, which broadcast: whether the query attends.
        local_size: of a sliding window, or of chunks.
        allow_is_causal_skip: whether None may be returned, as all rows are one document.
    """
    device = torch.device(device)
    is_cached = q_length != kv_length
    is_padded = attention_mask is not None
    hides_nothing = allow_is_causal_skip and (local_size is None or q_length < local_size)
    has_values = device.type in ("cpu", "cuda")
    if is_cached or is_padded or use_vmap or hides_nothing or not has_values:
        from transformers.masking_utils import sdpa_mask

        return sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip,
            use_vmap=use_vmap,
            device=device,
            **options,
        )
    indices = torch.arange(q_length, device=device)
    rows = torch.arange(batch_size, device=device)[:, None]
    # A token that does not attend to the one before it is the first of its document.
    continues = mask_function(rows, torch.zeros_like(rows), indices, indices - 1)
    is_first = (~continues | (indices == 0)).expand(batch_size, -1)
    document_start = torch.where(is_first, indices, 0).cummax(dim=1).values
    return make_mask(find_key_bounds(document_start, local_size), q_length)
