"""Steer a run of `fsdp.execute` from outside: a callback before each of its steps."""

from __future__ import annotations

from collections.abc import Callable

from lm.runtime.watchdog import Watchdog
from lm.runtime.world import World


class StepObserver(Watchdog):
    """A watchdog that calls `before_step(step)` instead of recording the step."""

    def __init__(self, world: World, before_step: Callable[[int], object]) -> None:
        super().__init__(
            world.rendezvous_store, world.rank, world.size, world.tensor_timeout.total_seconds()
        )
        self._before_step = before_step

    def on_step_start(self, step: int) -> None:
        self._before_step(step)
