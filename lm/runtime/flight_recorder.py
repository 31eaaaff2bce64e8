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
    """A group of which the recorder says that a collective has started and not completed."""

    backend: int
    group: str
    last_enqueued: int
    last_completed: int


class PendingCollectives:
    """How long collectives of this process have been pending: started and not completed.

    The recorder's status of a group names the collective that completed last. If two complete at
    once, that can be the earlier one, and the later one then seems to be pending until the group
    starts another. Only the entries tell, which take 0.1 s or more to read: they are read once for
    a collective that seems to be pending for long.

    Args:
        check_after: seconds after which the entries are read.
    """

    def __init__(self, check_after: float) -> None:
        self._check_after = check_after
        self._since: dict[_Pending, float] = {}
        self._is_active: dict[_Pending, bool] = {}

    def longest(self, now: float) -> float:
        """Return for how many seconds the collective that is pending longest has been; 0 if none.

        Args:
            now: seconds of the caller's clock, by which its calls are apart.
        """
        longest = 0.0
        since: dict[_Pending, float] = {}
        is_active: dict[_Pending, bool] = {}
        for pending in _read_pending():
            since[pending] = self._since.get(pending, now)
            seconds = now - since[pending]
            if pending in self._is_active:
                is_active[pending] = self._is_active[pending]
            elif seconds >= self._check_after:
                is_active[pending] = _has_active_entries(pending)
            if is_active.get(pending, True):
                longest = max(longest, seconds)
        self._since = since
        self._is_active = is_active
        return longest


def _read_pending() -> list[_Pending]:
    found = []
    for backend, dump in enumerate(_dump(with_entries=False)):
        for group, status in dump.get("pg_status", {}).items():
            last_enqueued = int(status["last_enqueued_collective"])
            last_completed = int(status["last_completed_collective"])
            if last_enqueued > last_completed:
                found.append(_Pending(backend, group, last_enqueued, last_completed))
    return found


def _has_active_entries(pending: _Pending) -> bool:
    """Return whether the recorder has a collective of the group that has not ended."""
    entries = _dump(with_entries=True)[pending.backend].get("entries", [])
    return any(str(entry["pg_id"]) == pending.group and not entry["retired"] for entry in entries)
