"""The commands of jq that errors name, run on a file."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from typing import Any

import pytest

from lm.errors import ConfigError


def make_lines(error: ConfigError, content: str) -> list[Any]:
    """Return what the command in `error` writes for a file with `content`."""
    found = re.search(r"(jq|grep|python) -.*(?= OLD > NEW| < OLD > NEW)", str(error))
    assert found is not None, error
    program, *arguments = shlex.split(found[0])
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    done = subprocess.run(
        [program, *arguments], input=content, capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]
