"""What precedes the import of PyTorch, which takes seconds; a wrong command line ends it."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from lm.command_line import parse_arguments
from lm.errors import ConfigError, oserror_as_config_error
from lm.fileio import find_stranger
from lm.launch.console import announce, print_error
from lm.launch.startup import setup_environment


def start_run() -> None:
    """Set up this process, and exit if the command line asks for help or has an error.

    fsdp.py reads the same values again, and then also the files that they name.
    """
    setup_environment()
    arguments = parse_arguments()
    try:
        if "DET_TRIAL_ID" not in os.environ:  # a trial's hyperparameters are the master's
            announce("checking the hyperparameters")
            from lm.config.reading import check_values  # after the first line, as it imports more

            check_values(arguments.config, arguments.overrides)
        choose_compiler_cache()
    except ConfigError as error:
        print_error(error)
        sys.exit(error.exit_code)
    announce("importing PyTorch")


@oserror_as_config_error
def choose_compiler_cache() -> None:
    """Let PyTorch cache compiled code, which it executes, where no other user can write.

    Its default is in /tmp, for whoever comes first. It sets the variable to it when it is imported.
    """
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        cache = Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
        cache.mkdir(mode=0o700, exist_ok=True)
        stranger = find_stranger(cache, os.getuid())
        if stranger is not None:
            remedy = "set TORCHINDUCTOR_CACHE_DIR to a directory of yours"
            raise ConfigError(f"{cache}: {stranger}; {remedy}")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
