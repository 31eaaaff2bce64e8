"""Attention that skips what a mask hides gives what masks of all pairs give, with gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lm.attention import (
    SequencePart,
    attend,
    attend_to_spans,
    find_document_starts,
    find_key_bounds,
    make_block_mask,
    make_dense,
    make_mask,
)

DOCUMENTS = (1, 40, 300, 7, 2, 250)
"""tokens; windows hide keys of the longest"""
LENGTH = sum(DOCUMENTS)


class Case(NamedTuple):
    """Sizes of attention, and what hides or scales its scores."""

    n_heads: int
    n_kv_heads: int
    width: int
    value_width: int
    window: int | None
    has_sinks: bool


CASES = {
    "documents": Case(4, 4, 16, 16, None, False),
    "grouped": Case(8, 2, 32, 32, None, False),
    "window": Case(4, 2, 16, 16, 50, False),
    "window of several blocks": Case(4, 4, 16, 16, 290, False),
    "window of one": Case(4, 4, 16, 16, 1, False),
    "narrow values": Case(4, 4, 24, 16, None, False),
    "wide values": Case(4, 4, 8, 16, 9, False),
    "sinks": Case(4, 2, 16, 16, None, True),
    "sinks and a window": Case(4, 4, 16, 16, 30, True),
}


def find_mask(window: int | None) -> Tensor:
    """Return the bounds of the keys of two rows, one of several documents, one of a single one."""
    ids = torch.repeat_interleave(torch.arange(len(DOCUMENTS)), torch.tensor(DOCUMENTS))
    document_ids = torch.stack([ids, torch.zeros_like(ids)])
    starts = find_document_starts(document_ids, torch.arange(LENGTH))
    return find_key_bounds(starts, window)


def draw(case: Case, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return queries, keys, values, and sinks if the case has them."""
    generator = torch.Generator().manual_seed(0)

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    inputs = [
        new(2, LENGTH, case.n_heads, case.width).transpose(1, 2),
        new(2, LENGTH, case.n_kv_heads, case.width).transpose(1, 2),
        new(2, LENGTH, case.n_kv_heads, case.value_width).transpose(1, 2),
    ]
    if case.has_sinks:
        inputs.append(new(case.n_heads))
    return [each.requires_grad_() for each in inputs]


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    hidden: Tensor,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Return attention as its formula says."""
    n_repeats = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(n_repeats, dim=1)
    value = value.repeat_interleave(n_repeats, dim=1)
    scores = query @ key.mT * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    exponents = scores.masked_fill(hidden, float("-inf")).exp()
    total = exponents.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[:, None, None]
    return exponents / total @ value


def hides(window: int | None) -> Tensor:
    """Return which pairs are hidden, from what documents and windows are."""
    indices = torch.arange(LENGTH)
    ids = torch.repeat_interleave(torch.arange(len(DOCUMENTS)), torch.tensor(DOCUMENTS))
    distance = indices[:, None] - indices
    hidden = torch.stack([ids[:, None] != ids, torch.zeros(LENGTH, LENGTH, dtype=torch.bool)])
    hidden |= distance < 0
    if window is not None:
        hidden |= distance >= window
    return hidden[:, None]


@pytest.mark.parametrize("name", CASES)
def test_documents_one_by_one_have_the_attention_and_gradients_of_the_formula(name: str) -> None:
    case = CASES[name]
    inputs = draw(case)
    query, key, value, *rest = inputs
    sinks = rest[0] if rest else None
    mask = make_mask(find_mask(case.window), LENGTH)
    found = attend(query, key, value, mask, scale=0.3, sinks=sinks)
    expected = reference(query, key, value, sinks, hides(case.window), 0.3)
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(expected)
    found_grads = torch.autograd.grad(found, inputs, grad)
    expected_grads = torch.autograd.grad(expected, inputs, grad)
    torch.testing.assert_close(found_grads, expected_grads)


def test_documents_are_computed_as_each_alone_to_the_last_bit() -> None:
    query, key, value = (each[:1].detach() for each in draw(CASES["grouped"], torch.float32))
    found = attend(query, key, value, make_mask(find_mask(None)[:1], LENGTH))
    splits = [each.split(DOCUMENTS, dim=2) for each in (query, key, value)]
    alone = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        for q, k, v in zip(*splits, strict=True)
    ]
    assert torch.equal(found, torch.cat(alone, dim=2))


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"softcap": 2.0, "sinks": True}, {}])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_kernels_agree_on_softcaps_and_sinks(options: dict[str, Any]) -> None:
    query, key, value, drawn = (each.detach() for each in draw(CASES["sinks"], torch.float32))
    sinks = drawn if "sinks" in options else None
    softcap = options.get("softcap")
    bounds = find_mask(None)
    expected = reference(query, key, value, sinks, hides(None), 0.3, softcap)
    masks = (
        make_mask(bounds, LENGTH),
        make_block_mask(bounds, LENGTH),
        make_dense(make_mask(bounds, LENGTH), LENGTH),
    )
    for mask in masks:
        if sinks is not None and not isinstance(mask, Tensor):
            continue  # FlexAttention returns the sums of exponents on a GPU only
        found = attend(query, key, value, mask, scale=0.3, softcap=softcap, sinks=sinks)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_both_compact_masks_stand_for_the_same_pairs() -> None:
    bounds = find_mask(50)
    dense = make_dense(make_mask(bounds, LENGTH), LENGTH)
    assert torch.equal(dense, ~hides(50))
    assert torch.equal(make_dense(make_block_mask(bounds, LENGTH), LENGTH), dense)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_queries_of_a_part_of_a_sequence_attend_as_among_all() -> None:
    query, key, value = (each.detach() for each in draw(CASES["grouped"], torch.float32))
    indices = torch.cat([torch.arange(30, 180), torch.arange(400, LENGTH)]).expand(2, -1)
    part = SequencePart(indices, gather=lambda x: x, exchange=lambda x: x, is_first=True)
    expected = reference(query, key, value, None, hides(50), 0.3)[:, :, indices[0]]
    bounds = find_mask(50)
    for mask in (make_mask(bounds, LENGTH), make_block_mask(bounds, LENGTH)):
        mask_of_part = part.mask_of(mask)
        assert torch.equal(make_dense(mask_of_part, LENGTH), ~hides(50)[:, :, indices[0]])
        found = attend(query[:, :, indices[0]], key, value, mask_of_part, scale=0.3)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_dropout_is_that_of_masks_of_all_pairs() -> None:
    query, key, value = draw(CASES["documents"], torch.float32)
    mask = make_mask(find_mask(None), LENGTH)
    outputs: list[Tensor] = []
    for each in (mask, make_dense(mask, LENGTH)):
        torch.manual_seed(1)
        outputs.append(attend(query, key, value, each, dropout=0.5))
    assert torch.equal(*outputs)
    assert not torch.allclose(outputs[0], attend(query, key, value, mask))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grouped", "sinks and a window"])
def test_the_compiler_traces_documents_in_one_graph(name: str) -> None:
    case = CASES[name]
    inputs = draw(case, torch.float32)
    query, key, value, *rest = inputs
    sinks = rest[0] if rest else None
    mask = make_mask(find_mask(case.window), LENGTH)
    traced = torch.compile(attend, fullgraph=True, backend="aot_eager")
    found = traced(query, key, value, mask, sinks=sinks)
    expected = attend(query, key, value, mask, sinks=sinks)
    assert torch.equal(found, expected)
    found_grads = torch.autograd.grad(found.square().sum(), inputs)
    expected_grads = torch.autograd.grad(expected.square().sum(), inputs)
    torch.testing.assert_close(found_grads, expected_grads)


@pytest.mark.parametrize("sinks", [None, torch.zeros(4)])
def test_the_compiler_traces_rows_of_changing_lengths(sinks: Tensor | None) -> None:
    query, key, value = (each.detach() for each in draw(CASES["documents"], torch.float32))
    traced = torch.compile(attend, fullgraph=True, backend="eager")
    for length in (50, 60, 70, 1):
        inputs = [each[:, :, :length] for each in (query, key, value)]
        assert torch.equal(traced(*inputs, sinks=sinks), attend(*inputs, sinks=sinks))


def test_the_operator_is_registered_as_pytorch_expects() -> None:
    query, key, value = (each.detach()[:, :, :50] for each in draw(CASES["grouped"], torch.float32))
    inputs = [each.clone().requires_grad_() for each in (query, key, value)]
    bounds = find_mask(None)[..., :50]
    torch.library.opcheck(
        attend_to_spans,
        (*inputs, bounds, 0.3, None),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
    output, sums = attend_to_spans(query, key, value, bounds, 0.3, None)
    arguments = output, query, key, value, output, sums, bounds, 0.3
    operator = torch.ops.lm.attend_to_spans_backward
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
