"""Entry point of `python -m lm.prepare`."""

import sys

from lm.prepare.command import main

if __name__ == "__main__":
    sys.exit(main())
