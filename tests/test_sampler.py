"""The order of samples is a pure function of seed and place; shares are kept, and every sample comes once an epoch."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data.sampler import BLOCK, Sampler


def test_one_source_is_one_permutation_after_the_other() -> None:
    order = Sampler([7], [1.0], seed=3, shuffle=True)
    epochs = [[order[place] for place in range(7 * epoch, 7 * epoch + 7)] for epoch in range(4)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1
    assert [order[place] for place in range(7)] == epochs[0]  # also after going on


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 30), min_size=2, max_size=4), st.data())
def test_sources_have_their_shares_in_every_block_and_each_sample_comes_once_an_epoch(
    counts: list[int], data: st.DataObject
) -> None:
    shares = [data.draw(st.sampled_from([0.5, 1.0, 2.0, 10.0])) for _ in counts]
    order = Sampler(counts, shares, seed=1, shuffle=data.draw(st.booleans()))
    firsts = [sum(counts[:source]) for source in range(len(counts))]
    drawn = [order[place] for place in range(2 * BLOCK)]
    for source, (first, count, share) in enumerate(zip(firsts, counts, shares, strict=True)):
        mine = [[n for n in block if first <= n < first + count] for block in (drawn[:BLOCK], drawn[BLOCK:])]
        assert len(mine[0]) == len(mine[1]), source
        assert abs(len(mine[0]) - BLOCK * share / sum(shares)) < 1
        row = mine[0] + mine[1]
        for start in range(0, len(row) - count + 1, count):
            assert sorted(row[start : start + count]) == list(range(first, first + count))


def test_a_place_is_the_same_from_wherever_one_starts() -> None:
    order = Sampler([11, 5, 300], [3, 1, 1], seed=5, shuffle=True)
    row = [order[place] for place in range(3 * BLOCK)]
    for start in (0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 17):
        assert Sampler([11, 5, 300], [3, 1, 1], seed=5, shuffle=True)[start] == row[start]
    assert row != [Sampler([11, 5, 300], [3, 1, 1], seed=6, shuffle=True)[place] for place in range(3 * BLOCK)]


def test_sources_come_mixed() -> None:
    order = Sampler([100, 100], [1, 1], seed=0, shuffle=False)
    sides = Counter(order[place] < 100 for place in range(40))
    assert 8 < sides[True] < 32


def test_a_share_too_small_to_come_once_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="a share of 1e-05 is less than one sample in 1024"):
        Sampler([1, 1], [1, 1e-5], seed=0, shuffle=True)
