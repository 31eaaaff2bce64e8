"""Command: run a script on several ranks on this machine."""

import sys

from lm.launch.spawn import main

if __name__ == "__main__":
    sys.exit(main())
