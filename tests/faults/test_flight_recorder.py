"""The flight recorder names the collective that ranks wait in, and no other."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from lm.runtime.flight_recorder import PendingCollectives
from lm.runtime.world import World
from tests.support.ranks import run_ranks
from tests.support.runs import wait_until


def seems_pending(check_after: float) -> bool:
    """Return whether a collective is pending that was first seen two seconds ago."""
    pending = PendingCollectives(check_after)
    pending.longest(0)
    return pending.longest(2) == 2


def complete_pairs(world: World) -> tuple[int, bool]:
    """Return how many completed pairs of collectives seem pending without a check.

    Pairs are tried until some of each rank's do. With a check, none does for long. Also return
    whether a collective does that only this rank has started.
    """
    unchecked = 0
    tries = 0
    while tries < 60 or (tries < 6000 and 0 in world.all_gather_object(unchecked)):
        tries += 1
        large: Any = dist.all_reduce(torch.ones(200_000), async_op=True)
        small: Any = dist.all_reduce(torch.ones(2), async_op=True)
        large.wait()
        small.wait()
        unchecked += seems_pending(check_after=math.inf)
        # The recorder learns that both have ended after the waits.
        wait_until(lambda: not seems_pending(check_after=1))
    dist.barrier(world.control)
    alone = False
    if world.rank == 0:
        dist.all_reduce(torch.ones(2), async_op=True)
        alone = seems_pending(check_after=1)
    dist.barrier(world.control)
    return unchecked, alone


def test_pending_collectives_that_complete_out_of_order() -> None:
    results = run_ranks(2, complete_pairs)
    for rank, (unchecked, alone) in enumerate(results):
        assert unchecked > 0
        assert alone == (rank == 0)
