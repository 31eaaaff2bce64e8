"""Directories of models, also those of the cache of the Hugging Face Hub, and downloads from it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lm.errors import ConfigError, nearest_file, oserror_as_config_error


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


def download_from_hub(
    source: str, files: Sequence[str], key: str, *, but_not: Sequence[str] = ()
) -> Path:
    """Download files of a model on the Hugging Face Hub.

    The processes of a node can call it at the same time: one downloads, the others wait.

    Args:
        source: the model, OWNER/MODEL or OWNER/MODEL@REVISION.
        files: names or patterns.
        key: the hyperparameter that `source` is the value of, for errors.
        but_not: names or patterns of other files.

    Returns:
        The directory of the files, in the Hub's cache.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # the error below reports the problem
    name, _, revision = source.partition("@")
    try:
        directory = snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=list(files),
            ignore_patterns=list(but_not),
        )
    except Exception as error:  # each transport raises its own
        directory = getattr(error, "snapshot_path", None)  # of an earlier download
        if key != "tokenizer" or directory is None:  # of which only tokenizer.json is required
            cause = " ".join(str(error).split())
            problem = f"no such file or directory, and cannot be downloaded: {cause}"
            access = f"request access at https://huggingface.co/{name} and run `hf auth login`"
            copy = f"run `hf download {name} --local-dir DIRECTORY` on another machine and copy it"
            remedy = f"if it is gated or private, {access}; without network access, {copy}"
            hint = nearest_file(source)
            raise ConfigError(f"{key}: {source}: {problem}; {remedy}{hint}") from None
    return Path(directory)
