"""What a step of a run needs, as its dry run prints it: reads the run as JSON from stdin."""

from __future__ import annotations

import json
import sys

import torch

from lm.config.hyperparameters import Hyperparameters
from lm.errors import ConfigError, command
from lm.memory import Ranks
from lm.plan.fit import advise_batch_size, measure
from lm.plan.step import NotPlannedError
from lm.units import format_bytes


@command
def main() -> int:
    """Print what a step needs by part. Return 0, or 2 if it is more than a rank has."""
    run = json.load(sys.stdin)
    dtype = getattr(torch, run["ranks"].pop("dtype"), None)
    ranks = Ranks(dtype, **run["ranks"])
    hp = Hyperparameters.from_flat(run["hyperparameters"])
    try:
        need = measure(hp, ranks)
    except NotPlannedError as error:
        print(error)
        return 0
    print("\n".join(need.describe()))
    faster = advise_batch_size(hp, need)
    if faster is not None:
        print(faster)
    if need.peak > ranks.memory:
        problem = f"out of memory: a step needs {format_bytes(need.peak)} per rank"
        remedy = "`python -m lm.plan` with the same arguments says what needs less"
        raise ConfigError(f"{problem} of {format_bytes(ranks.memory)}; {remedy}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
