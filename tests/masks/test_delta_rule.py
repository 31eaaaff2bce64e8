"""Linear attention inside of documents, next to recurrences token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from lm.delta_rule import CHUNK, COMPUTED_BY, causal_convolution, gated_delta_rule
from lm.plan.step import LiveBytes, device_bytes
from tests.support.allocations import measure_peak

LENGTHS = (37, 51, 40, 70, 2, 56)
"""of documents, in tokens"""


def number_documents(length: int) -> Tensor:
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    other = torch.zeros(length, dtype=torch.int64)
    return torch.stack([ids[:length], other])


def draw(length: int) -> list[Tensor]:
    """Queries, keys, values, logarithms of decays, and steps, in float64."""
    generator = torch.Generator().manual_seed(length)

    def normal(heads: int, width: int) -> Tensor:
        return torch.randn(2, length, heads, width, generator=generator, dtype=torch.float64)

    def uniform() -> Tensor:
        return torch.rand(2, length, 4, generator=generator, dtype=torch.float64)

    decays = -0.05 * uniform()  # so slow that a state outlives the chunks after it
    return [normal(2, 16), normal(2, 16), normal(4, 8), decays, 2 * uniform()]


def recur(inputs: list[Tensor], document_ids: Tensor) -> Tensor:
    """The gated delta rule token by token."""
    query, key, value, g, beta = inputs
    query = query / (query.square().sum(-1, keepdim=True) + 1e-6).sqrt() * key.shape[-1] ** -0.5
    key = key / (key.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    query, key = (x.repeat_interleave(2, dim=2) for x in (query, key))
    state = torch.zeros(2, 4, 16, 8, dtype=value.dtype)
    outputs: list[Tensor] = []
    for t in range(query.shape[1]):
        if t > 0:
            is_same = document_ids[:, t] == document_ids[:, t - 1]
            state = state * is_same[:, None, None, None]
        state = state * g[:, t].exp()[..., None, None]
        known = torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        new = beta[:, t, :, None] * (value[:, t] - known)
        state = state + key[:, t, :, :, None] * new[..., None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]))
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
@pytest.mark.parametrize("length", [1, 40, 64, 65, 200, sum(LENGTHS)])
def test_chunks_compute_the_recurrence(length: int, dtype: torch.dtype, tolerance: float) -> None:
    ids = number_documents(length)
    inputs = [x.requires_grad_() for x in draw(length)]
    expected = recur(inputs, ids)
    weight = torch.randn(expected.shape, dtype=torch.float64)
    right = torch.autograd.grad((expected * weight).sum(), inputs)

    ours = [x.detach().to(dtype).requires_grad_() for x in inputs]
    found = gated_delta_rule(*ours, ids)
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)
    gradients = torch.autograd.grad((found * weight.to(dtype)).sum(), ours)
    for gradient, each in zip(gradients, right, strict=True):
        scale = each.abs().max().item()
        torch.testing.assert_close(gradient.double(), each, rtol=0, atol=tolerance * scale)


def test_gradients_of_bfloat16_have_its_dtype() -> None:
    inputs = [x.to(torch.bfloat16).requires_grad_() for x in draw(70)]
    inputs[3] = inputs[3].detach().float().requires_grad_()
    found = gated_delta_rule(*inputs, number_documents(70))
    gradients = torch.autograd.grad(found.sum(), inputs)
    assert [gradient.dtype for gradient in gradients] == [x.dtype for x in inputs]


@pytest.mark.parametrize("length", [2, 30])
def test_convolutions_stay_inside_of_documents(length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, length, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    ids = torch.arange(length)[None] // torch.tensor([[7], [100]])
    found = causal_convolution(x, weight, ids)
    for row in range(2):
        for document in ids[row].unique():
            of_document = ids[row] == document
            alone = torch.nn.functional.conv1d(
                x[row, :, of_document], weight[:, None], padding=3, groups=6
            )
            torch.testing.assert_close(found[row, :, of_document], alone[:, :-3])
    assert torch.autograd.gradcheck(lambda *inputs: causal_convolution(*inputs, ids), (x, weight))


def test_operators_are_what_compilers_and_plans_expect() -> None:
    inputs: list[Any] = [x.requires_grad_() for x in draw(70)]
    torch.library.opcheck(gated_delta_rule, (*inputs, number_documents(70)))
    x = torch.randn(2, 5, 70, requires_grad=True)
    weight = torch.randn(5, 4, requires_grad=True)
    torch.library.opcheck(causal_convolution, (x, weight, number_documents(70)))


def test_plans_count_what_exists_while_the_rule_computes() -> None:
    """On fake tensors as much as PyTorch's profiler sees of real ones."""

    def make_inputs() -> list[Tensor]:
        shape = (1, 512, 4)
        projections = [torch.randn(*shape, 32) for _ in range(3)]
        made = [*projections, -torch.rand(shape), torch.rand(shape)]
        return [x.requires_grad_() for x in made] + [torch.zeros(shape[:2], dtype=torch.int64)]

    def take_step(inputs: list[Tensor]) -> None:
        gated_delta_rule(*inputs).sum().backward()

    with FakeTensorMode():
        inputs = make_inputs()
        with LiveBytes(offloads_state=False) as live:
            for each in inputs[:3]:
                live.add(each)  # of which the rule reads views
            before = sum(each.nbytes for each in inputs[:3])
            live.start_phase("step")
            take_step(inputs)
    inputs = make_inputs()
    peak = measure_peak(lambda: take_step(inputs))
    needed = device_bytes(live.peaks["step"]) - before
    assert needed == pytest.approx(peak, rel=0.01)
    assert needed < 10.5 * before  # autograd frees what it has used


def test_flops_are_those_of_the_products_that_the_rule_computes() -> None:
    inputs: list[Any] = [*draw(20 * CHUNK), torch.zeros(2, 20 * CHUNK)]
    counts: list[int] = []
    operator = torch.ops.lm.gated_delta_rule.default
    for rule in (operator, COMPUTED_BY[operator]):
        with FlopCounterMode(display=False) as counter:
            rule(*inputs)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]
