"""What was read otherwise than it is in the data."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field

from lm.errors import limit_problems
from lm.units import format_count


@dataclass
class ReadingNotes:
    """How many records were read otherwise than they are in the data."""

    layouts: Counter[str] = field(default_factory=Counter)
    """of other layouts than messages, by their keys"""
    unread: Counter[str] = field(default_factory=Counter)
    """with a key that was not read"""
    others: Counter[str] = field(default_factory=Counter)
    """by what was done, after a noun in the singular"""

    def add(self, other: ReadingNotes) -> None:
        self.layouts.update(other.layouts)
        self.unread.update(other.unread)
        self.others.update(other.others)

    def take(self) -> ReadingNotes:
        """Return what was counted, and count from 0."""
        taken = copy.deepcopy(self)
        for counter in (self.layouts, self.unread, self.others):
            counter.clear()
        return taken

    def describe(self, *, has_template: bool) -> list[str]:
        """Return a line on each; `has_template` = of a tokenizer with a chat template."""
        how = "as chats with the chat template"
        if not has_template:
            how = "as prompt, newline and completion"
        notes = [
            f"{keys} of {format_count(n, 'record')} read {how}" for keys, n in self.layouts.items()
        ]
        if self.unread:
            *more, (last, n_last) = self.unread.most_common()
            counts = [f"{key} of {n:,}" for key, n in more]
            counts.append(f"{last} of {format_count(n_last, 'record')}")
            notes.append(f"not read: {', '.join(counts)}")
        others: list[str] = []
        for what, n in self.others.items():
            noun, _, rest = what.partition(" ")
            others.append(f"{format_count(n, noun)} {rest}")
        return notes + limit_problems(others)
