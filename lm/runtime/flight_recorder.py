"""What PyTorch's flight recorder knows about the collectives of this process.

The recorder keeps the last 2,000 collectives (TORCH_FR_BUFFER_SIZE) that each backend started. Its
readers are private functions of `torch._C`, until PyTorch offers public ones.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple, cast

import torch

_bindings: Any = cast(Any, torch._C)._distributed_c10d


def _dump(*, with_entries: bool) -> list[dict[str, Any]]:
    """Return the recorder's state for gloo and, in CUDA builds of PyTorch, for NCCL."""
    only_active = False
    dumps = [_bindings._dump_fr_trace_json(with_entries, only_active)]
    if hasattr(_bindings, "_dump_nccl_trace_json"):
        dumps.append(_bindings._dump_nccl_trace_json(with_entries, only_active))
    return [json.loads(dump) for dump in dumps]


class _Pending(NamedTuple):
    """The collective after the last completed one of a group, which has started."""

    backend: int
    group: str
    n_completed: int


class PendingCollectives:
    """How long collectives of this process have been pending: started and not completed."""

    def __init__(self) -> None:
        self._since: dict[_Pending, float] = {}

    def longest(self, now: float) -> float:
        """Return for how many seconds the collective that is pending longest has been; 0 if none.

        Args:
            now: seconds of the caller's clock, by which its calls are apart.
        """
        since: dict[_Pending, float] = {}
        for backend, dump in enumerate(_dump(with_entries=False)):
            for group, status in dump.get("pg_status", {}).items():
                completed = int(status["last_completed_collective"])
                if int(status["last_enqueued_collective"]) > completed:
                    pending = _Pending(backend, group, completed)
                    since[pending] = self._since.get(pending, now)
        self._since = since
        return now - min(since.values(), default=now)


def describe_last_collectives(number: int = 3) -> str:
    """Return the last collectives that this process started, newest last, e.g. for an error."""
    entries = []
    for dump in _dump(with_entries=True):
        entries += dump.get("entries", [])
    entries.sort(key=lambda entry: entry["time_created_ns"])
    described = [_describe(entry) for entry in entries[-number:]]
    return ", ".join(described) or "none"


def _describe(entry: dict[str, Any]) -> str:
    """Return e.g. "gloo:all_gather 7 of [[5]] (group 1, ended)"."""
    name, description = entry["process_group"]
    if description not in ("", "undefined"):
        name = f"{name} {description}"
    state = entry["state"]
    if entry["retired"]:
        state = "ended"
    what = f"{entry['profiling_name']} {entry['collective_seq_id']} of {entry['input_sizes']}"
    return f"{what} (group {name}, {state})"
