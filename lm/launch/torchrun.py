"""torchrun that exits with the exit code of the rank that failed first (2 = bad configuration) instead of 1.

    python -m lm.launch.torchrun [OPTIONS OF TORCHRUN] fsdp.py ARGUMENTS...

Kubernetes reads it: launch/trainjob.yaml ends a job with a bad configuration instead of restarting
it.
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
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(main())
