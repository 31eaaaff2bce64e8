"""torchrun that exits with the exit code of the first rank that failed, instead of 1.

    python -m lm.launch.torchrun [OPTIONS OF TORCHRUN] fsdp.py ARGUMENTS...

Kubernetes reads it: with exit code 2, for a bad configuration, launch/trainjob.yaml ends the job
instead of restarting it.
"""

from __future__ import annotations

import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> int:
    """Run the command. Return its exit code."""
    try:
        run.main()
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        _, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        return 128 - failure.exitcode  # a signal killed the rank
    return 0


if __name__ == "__main__":
    sys.exit(main())
