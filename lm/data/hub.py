"""Downloads from the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lm.errors import ConfigError, nearest_file


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
