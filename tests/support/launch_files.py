"""The documents of the YAML files in launch/."""

from __future__ import annotations

from typing import Any

import yaml

from tests.support import REPOSITORY

Document = dict[str, Any]


def read_documents(name: str) -> list[Document]:
    """Return the documents of a file in launch/."""
    return list(yaml.safe_load_all((REPOSITORY / "launch" / name).read_text()))


def only_container(pod: Document) -> Document:
    """Return the only container of a pod template."""
    (found,) = pod["spec"]["containers"]
    return found
