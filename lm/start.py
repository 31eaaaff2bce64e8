"""What precedes the import of PyTorch, which takes seconds; a wrong command line ends it."""

from __future__ import annotations

import os
import sys

from lm.command_line import parse_arguments
from lm.errors import ConfigError
from lm.fileio import choose_compiler_cache
from lm.launch.console import announce, print_error
from lm.launch.startup import setup_environment


def start_run() -> None:
    """Set up this process, and exit if the command line asks for help or has an error.

    fsdp.py reads the same values again, and then also the files that they name.
    """
    setup_environment()
    try:
        arguments = parse_arguments()
        if "DET_TRIAL_ID" not in os.environ:  # a trial's hyperparameters are the master's
            announce("checking the hyperparameters")
            from lm.config.reading import check_values  # after the first line, as it imports more

            check_values(arguments.config, arguments.overrides)
        choose_compiler_cache()
    except ConfigError as error:
        print_error(error)
        sys.exit(error.exit_code)
    announce("importing PyTorch")
