"""Directories of models, also those that the Hub's cache consists of."""

from __future__ import annotations

import os
from pathlib import Path

from lm.errors import ConfigError, oserror_as_config_error


@oserror_as_config_error
def find_directory(source: str) -> str:
    """Return `source` with `~` expanded, or the snapshot in it if it is a model's cache.

    The Hub's cache has a directory `models--OWNER--MODEL` of each model, with the files of each
    revision in `snapshots` and the name of that of a branch in `refs`.

    Raises:
        ConfigError: the cache has several snapshots, and none is that of the main branch.
    """
    source = os.path.expanduser(source)  # noqa: PTH111 - it can be a name on the Hub, or a URL
    directory = Path(source)
    snapshots = directory / "snapshots"
    if not (directory.name.startswith("models--") and snapshots.is_dir()):
        return source
    found = sorted(snapshots.iterdir())
    branch = directory / "refs" / "main"
    if branch.is_file():
        snapshot = snapshots / branch.read_text(errors="replace").strip()
        if snapshot in found:
            return str(snapshot)
    if len(found) == 1:
        return str(found[0])
    names = ", ".join(each.name for each in found[:5]) or "none"
    problem = f"a cache of the Hub with {len(found)} snapshots ({names})"
    raise ConfigError(f"{source}: {problem}; use {snapshots}/NAME")
