"""Kill searches at random moments while their data change, and check what they end with.

    python -m tests.soak_search [COUNT] [--seed S]

A search is started again and again, until COUNT starts were killed or stopped at a random moment.
At random, one of its files has other content at the start, or gets it while the search runs. Once
it has ended, it is started once more, on any data, and then another search begins.

A search that ends must have the points of an undisturbed search, and for each trial the values that
this measures on the content that the first trial has read. A search that is refused must name a
file that has changed, and no trial may fail.

Exit code 1 after anything else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from lm.errors import ConfigError
from tests.support import REPOSITORY
from tests.support.forked import start_python
from tests.support.hyperparameters import TINY

QUESTION = '{{"context": "a", "choices": ["b", "c"], "gold": {}}}\n'
FILES = {
    "train.txt": ("some text " * 300, "other text " * 300),
    "val.txt": ("held out " * 300, "left over " * 300),
    "own.jsonl": (QUESTION.format(0), QUESTION.format(1)),
}
"""the content of each at first, and after a change"""
KEYS = {"train.txt": "train_data", "val.txt": "val_data", "own.jsonl": "eval_tasks"}
EXPERIMENT: dict[str, Any] = {
    "searcher": {
        "name": "adaptive_asha",
        "metric": "loss",
        "time_metric": "batches",
        "max_trials": 3,
        "max_time": 6,
        "max_rungs": 2,
        "divisor": 2,
    },
    "hyperparameters": TINY
    | {
        "dataset": "text",
        "train_data": "train.txt",
        "val_data": "val.txt",
        "eval_tasks": ["own.jsonl"],
        "vocab_size": 264,
        "n_layers": 1,
        "max_steps": 6,
        "validation_rate": 3,
        "validation_batches": 1,
        "checkpoint_rate": 1,
        "amp_dtype": None,
        "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
    },
}
CHANGED_AT_START, CHANGED_WHILE_RUNNING, UNTOUCHED = 0.3, 0.3, 0.2
"""Shares of the starts: the last one is of those that nothing ends early."""
KINDS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)
LONGEST_AFTER_REPORT = 2.0
"""seconds from the report after which a search is disturbed"""
TIMEOUT = 600

Variant = str | None
"""which file has changed; None = none has"""


class SoakError(Exception):
    """A search did not behave as it should."""


def write_data(folder: Path, variant: Variant) -> None:
    """Write the experiment and the data, each file of data at once as a whole."""
    for name, contents in FILES.items():
        draft = folder / f"{name}.draft"
        draft.write_text(contents[name == variant])
        draft.replace(folder / name)
    (folder / "tiny.yaml").write_text(json.dumps(EXPERIMENT))


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the search of `tiny.yaml` in `folder`, whose trials are forked, too."""
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return start_python(
        ["-m", "lm.search", "tiny.yaml", *arguments],
        variables,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def read_study(directory: Path) -> optuna.Study:
    """Return the study of the search in `directory`."""
    backend = JournalFileBackend(str(directory / "search.journal"))
    return optuna.load_study(study_name="search", storage=JournalStorage(backend))


def n_reports(folder: Path) -> int:
    """Return how many lines the trials have reported."""
    return sum(
        len(file.read_bytes().splitlines()) for file in folder.glob("runs/tiny/*/metrics.jsonl")
    )


@dataclass
class Soak:
    """Searches in `root`, and what has come of their starts."""

    root: Path
    draw: random.Random
    expected: dict[Variant, optuna.Study] = field(default_factory=dict)
    """of undisturbed searches that stop no trial"""
    outcomes: Counter[str] = field(default_factory=Counter[str])
    _n_searches: int = 0
    _n_killed: int = 0

    def reference(self, variant: Variant) -> optuna.Study:
        """Return the study of an undisturbed search that stops no trial."""
        if variant not in self.expected:
            folder = self.root / f"reference-{variant}"
            folder.mkdir()
            write_data(folder, variant)
            contents = json.loads((folder / "tiny.yaml").read_text())
            contents["searcher"]["name"] = "random"
            (folder / "tiny.yaml").write_text(json.dumps(contents))
            search = start(folder, "--parallel", "2")
            output, errors = search.communicate(timeout=TIMEOUT)
            if search.returncode:
                raise SoakError(f"{folder}: {output}{errors}")
            self.expected[variant] = read_study(folder / "runs/tiny")
        return self.expected[variant]

    def run(self, count: int) -> None:
        """Start searches until `count` were killed or stopped."""
        self.reference(None)
        while self._n_killed < count:
            folder = self.root / f"search-{self._n_searches}"
            self._n_searches += 1
            folder.mkdir()
            while not self._run_once(folder):
                pass
            self._run_once(folder)
            shutil.rmtree(folder, ignore_errors=True)  # a killed search's trials may be saving

    def _run_once(self, folder: Path) -> bool:
        """Start a search, disturb it, and check its outcome. Return whether it has ended."""
        on_disk: list[Variant] = [self._choose(CHANGED_AT_START, folder)]
        write_data(folder, on_disk[0])
        search = start(folder, "--parallel", "2")
        killed = self._disturb(folder, search, on_disk)
        try:
            output, errors = search.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            search.kill()
            raise SoakError(f"{folder}: still running") from None
        outcome = self._judge(folder, search.returncode, output, errors, on_disk)
        self._n_killed += killed is not None
        self.outcomes[outcome if killed is None else f"{outcome}, {killed.name}"] += 1
        print(f"{self._n_killed} {outcome}", file=sys.stderr, flush=True)
        return outcome == "ended"

    def _choose(self, share: float, folder: Path) -> Variant:
        """Draw a file that changes; else return what the first trial has read, as a user would."""
        if self.draw.random() < share:
            return self.draw.choice(list(FILES))
        if not (folder / "runs/tiny/search.journal").exists():
            return None
        inputs = read_study(folder / "runs/tiny").user_attrs.get("inputs ")
        if inputs is None:
            return None
        return self._variant_of(inputs)

    def _disturb(
        self, folder: Path, search: subprocess.Popen[str], on_disk: list[Variant]
    ) -> signal.Signals | None:
        """Change data and end the search at random moments. Return the signal; None = it ended."""
        moments: list[tuple[int, signal.Signals | None]] = []
        if self.draw.random() < CHANGED_WHILE_RUNNING:
            moments.append((self._draw_moment(folder), None))
        if self.draw.random() >= UNTOUCHED:
            moments.append((self._draw_moment(folder), self.draw.choice(KINDS)))
        for moment, signum in sorted(moments, key=lambda each: each[0]):
            while n_reports(folder) < moment:
                if search.poll() is not None:
                    return None
                time.sleep(0.02)
            time.sleep(self.draw.uniform(0, LONGEST_AFTER_REPORT))
            if search.poll() is not None:
                return None
            if signum is not None:
                search.send_signal(signum)
                return signum
            on_disk.append(self._choose(0.5, folder))
            write_data(folder, on_disk[-1])
        return None

    def _draw_moment(self, folder: Path) -> int:
        """Draw after which report of its trials a search is disturbed; 0 = at its start."""
        n_at_start = n_reports(folder)
        n_in_all = n_reports(self.root / "reference-None")
        return self.draw.randint(n_at_start, max(n_at_start, n_in_all))

    def _judge(
        self, folder: Path, code: int, output: str, errors: str, on_disk: list[Variant]
    ) -> str:
        """Return what a start of a search has done; raise SoakError if it should not have."""
        shown = f"{folder}, data {on_disk}, code {code}: {output}{errors}"
        if "Traceback" in errors or " failed: " in output:
            raise SoakError(f"a traceback, or a trial has failed: {shown}")
        if "best: " in output:
            self._check_values(read_study(folder / "runs/tiny"), shown)
            return "ended"
        if code == ConfigError.exit_code:
            changed = "|".join(f"{key}: was " for key in KEYS.values())
            if not re.search(f"{changed}|train_data: .* in the checkpoint", errors):
                raise SoakError(f"refused without a reason: {shown}")
            for trial in re.findall(r"delete (runs/tiny/trial-\d+),", errors):
                shutil.rmtree(folder / trial)
            return "refused"
        if code in (0, -signal.SIGKILL, 128 + signal.SIGTERM, -signal.SIGTERM):
            return "stopped"
        raise SoakError(f"another exit code: {shown}")

    def _check_values(self, study: optuna.Study, shown: str) -> None:
        """Raise SoakError unless points and values are those of an undisturbed search."""
        expected = self.reference(self._variant_of(study.user_attrs["inputs "]))
        if [trial.params for trial in study.trials] != [trial.params for trial in expected.trials]:
            raise SoakError(f"other points: {shown}")
        for trial, other in zip(study.trials, expected.trials, strict=True):
            if trial.state not in (TrialState.COMPLETE, TrialState.PRUNED):
                raise SoakError(f"trial-{trial.number} is {trial.state.name}: {shown}")
            found = trial.intermediate_values.items()
            if not found or not found <= other.intermediate_values.items():
                raise SoakError(f"{found} is not in {other.intermediate_values}: {shown}")

    def _variant_of(self, inputs: Any) -> Variant:
        for variant in (None, *FILES):
            if self.reference(variant).user_attrs["inputs "] == inputs:
                return variant
        raise SoakError(f"unknown inputs: {inputs}")


def main() -> int:
    """Run the command. Return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak_search", description="Kill searches while their data change."
    )
    parser.add_argument(
        "count", nargs="?", type=int, default=50, help="interruptions (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="soak-search-"))
    soak = Soak(root, random.Random(args.seed))
    try:
        soak.run(args.count)
    except SoakError as error:
        print(error)
        return 1
    shutil.rmtree(root, ignore_errors=True)
    for outcome, number in sorted(soak.outcomes.items()):
        print(f"{number:>6} {outcome}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
