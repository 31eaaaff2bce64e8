"""The order of samples is a pure function of seed and position; mixtures keep their weights."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data.sampler import MIXTURE_BLOCK, Permutation, Sampler
from lm.errors import ConfigError


def test_sampler_epochs_are_different_permutations() -> None:
    order = Sampler([7], [1.0], seed=3, shuffle=True)
    epochs = [[order[i] for i in range(7 * epoch, 7 * epoch + 7)] for epoch in range(4)]
    assert all(sorted(epoch) == [(0, i) for i in range(7)] for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1
    assert [order[i] for i in range(7)] == epochs[0]


@settings(max_examples=20)
@given(st.lists(st.integers(1, 30), min_size=2, max_size=4), st.data())
def test_mixture_shares_hold_in_every_block(counts: list[int], data: st.DataObject) -> None:
    weights = [data.draw(st.sampled_from([0.5, 1.0, 2.0, 10.0])) for _ in counts]
    order = Sampler(counts, weights, seed=1, shuffle=data.draw(st.booleans()))
    samples = [order[i] for i in range(2 * MIXTURE_BLOCK)]
    passes = order.passes(2 * MIXTURE_BLOCK)
    for dataset, (count, weight) in enumerate(zip(counts, weights, strict=True)):
        mine = [
            [index for number, index in block if number == dataset]
            for block in (samples[:MIXTURE_BLOCK], samples[MIXTURE_BLOCK:])
        ]
        assert len(mine[0]) == len(mine[1]), dataset
        assert abs(len(mine[0]) - MIXTURE_BLOCK * weight / sum(weights)) < 1
        joined = mine[0] + mine[1]
        assert passes[dataset] == pytest.approx(len(joined) / count)
        for start in range(0, len(joined) - count + 1, count):
            assert sorted(joined[start : start + count]) == list(range(count))


def test_sampler_position_does_not_depend_on_earlier_reads() -> None:
    order, other = (Sampler([11, 5, 300], [3, 1, 1], seed, shuffle=True) for seed in (5, 6))
    samples = [order[i] for i in range(3 * MIXTURE_BLOCK)]
    for start in (0, 1, MIXTURE_BLOCK - 1, MIXTURE_BLOCK, 2 * MIXTURE_BLOCK + 17):
        assert Sampler([11, 5, 300], [3, 1, 1], seed=5, shuffle=True)[start] == samples[start]
    assert samples != [other[i] for i in range(3 * MIXTURE_BLOCK)]
    datasets = [dataset for dataset, _ in samples]
    assert datasets[:MIXTURE_BLOCK] != datasets[MIXTURE_BLOCK : 2 * MIXTURE_BLOCK]


def test_mixture_weight_too_small_for_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"^train_data: .*1e-05 .*{MIXTURE_BLOCK}"):
        Sampler([1, 1], [1, 1e-5], seed=0, shuffle=True)


# ---- orders that are not a list


@pytest.mark.parametrize("size", [1, 2, 3, 10, 64, 65, 1000, 4097])
def test_permutation_has_every_index_once(size: int) -> None:
    orders = [Permutation(size, "order", seed, 0) for seed in range(2)]
    indices = [[order[i] for i in range(size)] for order in orders]
    assert sorted(indices[0]) == sorted(indices[1]) == list(range(size))
    if size > 10:
        assert indices[0] != indices[1] != list(range(size))


def test_permutation_is_random() -> None:
    size = 50_000
    order = np.array([Permutation(size, 7)[i] for i in range(0, size, 10)])
    uniform = np.random.default_rng(0).permutation(size)[::10]
    for statistic in (np.mean, np.std, lambda x: np.corrcoef(x[1:], x[:-1])[0, 1] * size):
        spread = size / len(order) ** 0.5
        assert abs(statistic(order) - statistic(uniform)) < 5 * spread


def test_long_epoch_has_no_list() -> None:
    tracemalloc.start()
    sampler = Sampler([2 * 10**8], [1.0], seed=7, shuffle=True)
    drawn = [sampler[position][1] for position in range(5000)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(drawn)) == 5000
    assert 0.9e8 < np.mean(drawn) < 1.1e8
    assert peak < 1 << 20
    assert sampler[2 * 10**8 + 3] != sampler[3], "the next epoch has another order"
