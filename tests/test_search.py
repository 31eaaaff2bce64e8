"""Searches on this machine: the trials that survive, and what a kill or a mistake changes."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import yaml
from filelock import FileLock

from lm.data.run_data import open_data
from lm.determined.search import OTHER_INPUTS, differences
from lm.errors import MAX_LINE, ConfigError, RunError
from lm.hf import config_json
from lm.hf.weights import examined_config
from lm.inputs import fingerprint_inputs
from lm.launch.signals import STOP_SIGNALS
from lm.model_config import ModelConfig
from lm.runtime.run_state import RunState, write_state
from lm.search import __main__ as command
from lm.search.experiment import Experiment, SearcherConfig
from lm.search.halving import DROPPED, Replay, asha_brackets, single_bracket
from lm.search.report import Row, Table
from lm.search.search import Search
from tests.soak_search import Soak, start
from tests.support import PATIENCE
from tests.support.cluster.searcher import Halving
from tests.support.forked import start_python
from tests.support.hf import LLAMA, add_tokenizer, make_reference
from tests.support.hyperparameters import LLAMA_STYLE, OF_TRANSFORMERS, TINY
from tests.support.runs import run_fsdp, wait_until

ASHA: dict[str, Any] = {
    "name": "adaptive_asha",
    "metric": "loss",
    "time_metric": "batches",
    "max_trials": 32,
    "max_time": 400,
    "max_rungs": 3,
    "max_concurrent_trials": 8,
}


@pytest.fixture(autouse=True)
def _chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def replay_losses(
    searcher: Mapping[str, Any], loss: Callable[[int, int], float | None], seed: int = 0
) -> Replay:
    """Replay a search whose trials differ in speed."""
    brackets = asha_brackets(SearcherConfig.model_validate(searcher))
    replay = Replay(brackets, loss, lambda number, rung: 4.0**rung * (1 + (number * seed) % 7))
    replay.run()
    return replay


def random_loss(seed: int) -> Callable[[int, int], float]:
    """Return losses that fall with the rung, a fifth of which have failed, with equal ones."""

    def loss(number: int, rung: int) -> float:
        draw = random.Random(f"{seed}/{number}/{rung}")
        if draw.random() < 0.2:
            return DROPPED
        return round(draw.uniform(0, 4) - rung, 1)

    return loss


@pytest.mark.parametrize("divisor", [2, 3, 4, 2.5])
def test_halving_keeps_the_trials_of_determined(divisor: float) -> None:
    for seed in range(25):
        searcher = ASHA | {"mode": "aggressive", "divisor": divisor}
        platform = Halving({"searcher": searcher, "hyperparameters": {}})
        n_running = platform.n_at_start()
        for _ in range(n_running):
            platform.create()
        loss = random_loss(seed)

        # The platform decides in the order in which the replay asks for the last time.
        stopped: dict[int, int] = {}
        arrivals: list[tuple[float, int, int]] = []
        ours = replay_losses(searcher, loss, seed)
        for trial in ours.standings:
            for rung in range(trial.rung + 1):
                arrival = trial.start + ours.arrival(trial.number, rung)
                arrivals.append((arrival, trial.number, rung))
        for _, number, rung in sorted(arrivals):
            assert number not in stopped
            value = loss(number, rung)
            steps = platform.rungs[rung]
            if value == DROPPED:
                stopped[number] = rung
                if platform.replaces(number, "STATE_ERROR"):
                    platform.create()
            elif platform.stops(number, steps, value):
                stopped[number] = rung
                if platform.wants_more:
                    platform.create()
        assert stopped == {trial.number: trial.rung for trial in ours.standings}
        assert len(platform.points) == len(ours.standings) == 32


def test_halving_is_the_same_in_any_order_of_results() -> None:
    loss = random_loss(1)
    expected = replay_losses(ASHA, loss, seed=3)
    known: dict[tuple[int, int], float] = {}
    order = random.Random(0)
    while True:
        replay = replay_losses(ASHA, lambda number, rung: known.get((number, rung)), seed=3)
        missing = [t for t in replay.active() if (t.number, t.rung) not in known]
        if not missing:
            break
        trial = order.choice(missing)
        known[trial.number, trial.rung] = loss(trial.number, trial.rung)
    assert [vars(t) for t in replay.standings] == [vars(t) for t in expected.standings]
    assert {t.state for t in replay.standings} == {"stopped", "completed", "dropped"}


@pytest.mark.parametrize(
    ("searcher", "rungs", "trials", "at_start"),
    [
        ({}, [3, 2], [24, 8], [4, 4]),
        ({"mode": "aggressive"}, [3], [32], [8]),
        ({"mode": "conservative"}, [3, 2, 1], [22, 7, 3], [3, 3, 2]),
        # Of Determined's own tests.
        (
            {"max_trials": 5, "max_time": 900, "max_rungs": 2, "divisor": 3},
            [2, 1],
            [3, 2],
            [3, 2],
        ),
        ({"bracket_rungs": [1, 3], "max_concurrent_trials": 0}, [3, 1], [27, 5], [5, 5]),
    ],
)
def test_asha_brackets_are_those_of_determined(
    searcher: dict[str, Any], rungs: list[int], trials: list[int], at_start: list[int]
) -> None:
    brackets = asha_brackets(SearcherConfig.model_validate(ASHA | searcher))
    assert [len(bracket.rungs) for bracket in brackets] == rungs
    assert [bracket.max_trials for bracket in brackets] == trials
    assert [bracket.n_at_start for bracket in brackets] == at_start
    assert {bracket.rungs[-1] for bracket in brackets} == {max(rungs) - 1}


def test_random_search_runs_every_trial_to_its_end() -> None:
    config = SearcherConfig.model_validate(
        {"name": "random", "metric": "loss", "max_trials": 9, "max_concurrent_trials": 2}
    )
    replay = Replay([single_bracket(config, 9)], random_loss(2), lambda number, _: float(number))
    replay.run()
    assert len(replay.standings) == 9
    assert {trial.state for trial in replay.standings} == {"completed", "dropped"}


def write_lines(path: Path, *records: Any) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_experiment(searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any]) -> Path:
    path = Path("tiny.yaml")
    contents = {"searcher": dict(searcher), "hyperparameters": dict(hyperparameters)}
    path.write_text(yaml.safe_dump(contents))
    return path


RANGES: dict[str, Any] = {
    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -2, "count": 3},
    "n_layers": {"type": "int", "minval": 2, "maxval": 5, "count": 9},
    "dropout": {"type": "double", "minval": 0, "maxval": 0.5, "count": 1},
    "norm": {"type": "categorical", "vals": ["rmsnorm", "layernorm"]},
    "d_model": {"type": "const", "val": 32},
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": {"type": "int", "minval": 2, "maxval": 4, "count": 2},
    },
}


def test_points_lie_in_their_ranges_and_repeat() -> None:
    path = write_experiment(ASHA, RANGES)
    points = Experiment(path, []).points(200)
    assert points == Experiment(path, []).points(200)
    assert {point["n_layers"] for point in points} == {2, 3, 4}  # without maxval
    assert all(1e-4 <= point["lr"] <= 1e-2 for point in points)
    assert {point["rope_scaling"]["factor"] for point in points} == {2, 3}
    assert {point["d_model"] for point in points} == {32}
    assert points[:3] == Experiment(path, []).points(3)
    without_lr = Experiment(path, ["lr=0.1"]).points(3)
    for key in RANGES.keys() - {"lr"}:
        assert [point[key] for point in without_lr] == [point[key] for point in points[:3]]
    assert "lr" not in without_lr[0]
    reordered = write_experiment(ASHA, dict(reversed(RANGES.items())))
    assert Experiment(reordered, []).points(3) == points[:3]


def test_experiment_accepts_the_nulls_of_a_master() -> None:
    searcher = ASHA | {"mode": None, "divisor": None, "source_trial_id": None}
    searcher["source_checkpoint_uuid"] = None
    contents = {"searcher": searcher, "hyperparameters": {}, "max_restarts": None}
    contents |= {"resources": {"slots_per_trial": None}, "reproducibility": None}
    Path("tiny.yaml").write_text(yaml.safe_dump(contents))
    experiment = Experiment(Path("tiny.yaml"), [])
    assert experiment.searcher == SearcherConfig.model_validate(ASHA)
    assert (experiment.slots, experiment.seed, experiment.max_restarts) == (1, 0, 5)


def test_best_trial_is_complete() -> None:
    write_experiment({"name": "random", "metric": "loss", "max_trials": 1}, SMALL)
    search = Search(Path("tiny.yaml"), [])
    rows = [
        Row("trial-1", {}, "stopped", 8, {4: 0.5, 8: 0.1}, ""),
        Row("trial-2", {}, "completed", 4, {4: 1.0}, ""),
        Row("trial-3", {}, "completed", 8, {4: 0.9, 8: 2.9}, ""),
        Row("trial-4", {}, "dropped", 4, {}, "refused"),
    ]
    ranked = search.ranked(rows)
    assert [row.name for row in ranked] == ["trial-2", "trial-3", "trial-1", "trial-4"]
    assert search.overtaken(ranked) == [rows[0]]
    assert search.ranked([rows[3], rows[0]]) == [rows[0], rows[3]]


@pytest.mark.parametrize(
    ("before", "now", "changes"),
    [
        ({}, {"lr": "1e-3"}, ["arguments.lr: was not set, is now 1e-3"]),
        ({"seed": 1}, {}, ["arguments.seed: was 1, is now not set"]),
        ({"x": None}, {"x": True}, ["arguments.x: was null, is now true"]),
        ({"x": ""}, {"x": [1]}, ['arguments.x: was "", is now [1]']),
        ({"lr": {"minval": 1}}, {"lr": {"minval": 2}}, ["arguments.lr.minval: was 1, is now 2"]),
        ({"lr": 1}, {"lr": 1.0}, []),
    ],
)
def test_differences_are_shown_as_yaml(before: Any, now: Any, changes: list[str]) -> None:
    assert differences({"arguments": before}, {"arguments": now}) == changes


@pytest.mark.parametrize(("minval", "maxval"), [(-4, -2), (0, 1), (0.1, 2), (-0.5, 0.5)])
def test_range_of_exponents_needs_no_note(minval: float, maxval: float) -> None:
    lr = {"type": "log", "base": 10, "minval": minval, "maxval": maxval}
    assert Experiment(write_experiment(ASHA, {"lr": lr}), []).notes() == []


def test_note_on_values_where_a_range_has_exponents() -> None:
    lr = {"type": "log", "base": 10, "minval": 1e-4, "maxval": 1e-2}
    (note,) = Experiment(write_experiment(ASHA, {"lr": lr}), []).notes()
    assert note.startswith("tiny.yaml:2: lr: minval and maxval are exponents of 10")
    assert "1.0002 to 1.0233 is drawn" in note
    assert "minval -4 and maxval -2" in note


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "arguments are required: FILE\n"),
        (["tiny.yaml", "max_trials=4"], "argument max_trials: .*mean searcher.max_trials\\?"),
        (["tiny.yaml", "searcher.max_trial=4"], "argument searcher.max_trial: .*max_trials\\?"),
        (["tiny.yaml", "searcher.divisor=x"], "argument searcher.divisor: 'x' is not"),
        (["tiny.yaml", "searcher.divisor"], 'argument "searcher.divisor": is not key=value'),
    ],
)
def test_wrong_arguments_of_a_search_have_a_remedy(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_experiment(ASHA, SMALL | {"max_steps": 400})
    with suppress(SystemExit):  # of argparse
        assert command.main(arguments) == ConfigError.exit_code
    assert re.search(part, capsys.readouterr().err)


def test_argument_sets_a_key_of_the_searcher() -> None:
    path = write_experiment(ASHA, SMALL)
    experiment = Experiment(path, ["searcher.max_trials=4", "batch_size=2"])
    assert experiment.searcher.max_trials == 4
    assert experiment.overrides == ["batch_size=2"]
    changes = differences(Experiment(path, ["batch_size=2"]).identity(), experiment.identity())
    assert changes == ["searcher.max_trials: was 32, is now 4"]


def test_range_on_the_command_line_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    path = write_experiment({"name": "single", "metric": "loss"}, SMALL)
    argument = "lr={type: log, base: 10, minval: -4, maxval: -2}"
    assert command.main([str(path), argument]) == ConfigError.exit_code
    error = capsys.readouterr().err
    assert "argument lr: a range is set in tiny.yaml" in error
    assert "lm.search" not in error


@pytest.mark.parametrize(
    "hyperparameters",
    [
        {key: RANGES["lr"] | {"count": 101} for key in ("lr", "min_lr_ratio")},
        {"rope_scaling": {key: RANGES["lr"] | {"count": 10_000} for key in "abcd"}},
    ],
)
def test_grid_of_too_many_points_is_refused(hyperparameters: dict[str, Any]) -> None:
    path = write_experiment({"name": "grid", "metric": "loss"}, hyperparameters)
    with pytest.raises(ConfigError, match="more than 10,000 points"):
        Experiment(path, []).grid()


def test_largest_values_of_a_search_are_accepted() -> None:
    searcher = {
        "max_trials": 10_000,
        "divisor": 10_000,
        "bracket_rungs": [64, 1],
        "max_time": 2**53,
    }
    brackets = asha_brackets(SearcherConfig.model_validate(ASHA | searcher))
    assert [len(bracket.rungs) for bracket in brackets] == [64, 1]


@pytest.mark.parametrize("parallel", ["0", "1000000000"])
def test_search_refuses_impossible_numbers_of_trials(
    parallel: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_experiment({"name": "single", "metric": "loss"}, SMALL)
    assert command.main([str(path), "--parallel", parallel]) == ConfigError.exit_code
    assert f"--parallel: {parallel} must be from 1 to 10000" in capsys.readouterr().err


def test_grid_has_the_values_of_determined() -> None:
    searcher = {"name": "grid", "metric": "loss"}
    points = Experiment(write_experiment(searcher, RANGES), []).grid()
    assert len(points) == 3 * 4 * 1 * 2 * 1 * 2
    assert sorted({point["lr"] for point in points}) == pytest.approx([1e-4, 1e-3, 1e-2])
    assert sorted({point["n_layers"] for point in points}) == [2, 3, 4, 5]
    assert {point["dropout"] for point in points} == {0.25}
    assert {point["rope_scaling"]["factor"] for point in points} == {2, 4}


SMALL: dict[str, Any] = TINY | {
    "n_layers": 1,
    "max_steps": 8,
    "report_rate": 2,
    "validation_batches": 1,
    "checkpoint_rate": 100,
    "amp_dtype": None,
    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
}


@pytest.mark.parametrize(
    ("searcher", "hyperparameters", "parts"),
    [
        ({"divisor": 1}, {}, ["searcher.divisor", "1"]),
        ({"max_trial": 3}, {}, ["searcher.max_trial:", "did you mean max_trials?"]),
        ({"max_trials": None}, {}, ["searcher", "max_trials"]),
        ({"name": "random", "max_trials": 0}, {}, ["searcher.max_trials", "0"]),
        ({"time_metric": "steps"}, {}, ["searcher.time_metric", "steps", "batches"]),
        ({"metric": "accuracy"}, {}, ["searcher.metric", "accuracy"]),
        ({"max_time": 16}, {}, ["searcher.max_time", "16", "max_steps 8"]),
        ({"name": "grid"}, {}, ["lr", "count"]),
        ({}, {"lr": {"type": "log", "base": 10, "minval": 1}}, ["lr", "maxval"]),
        ({}, {"lr": {"type": "log", "minval": -2, "maxval": -1}}, ["lr", "base"]),
        ({}, {"lr": {"type": "logg", "minval": 1, "maxval": 2}}, ["lr", "logg", "categorical"]),
        ({"source_trial_id": 7}, {}, ["searcher", "init_from"]),
        ({}, {"train_data": "missing.txt", "dataset": "text"}, ["train_data", "missing.txt"]),
        ({}, {"lr": {"type": "log", "base": 10, "minval": 2, "maxval": 1}}, ["lr", "minval 2"]),
        ({}, {"lrr": 1}, ["lrr", "did you mean lr"]),
        ({}, {"max_epochs": 1}, ["max_epochs", "max_steps"]),
        ({}, {"resume": "fresh"}, ["resume", "fresh"]),
        ({}, {"stop_at_step": 1}, ["tiny.yaml:", "stop_at_step", "remove it"]),
        (
            {},
            {"stop_at_step": {"type": "categorical", "vals": [1, 2]}},
            ["stop_at_step", "remove it"],
        ),
        ({}, {"lr": {"type": "categorical", "vals": [RANGES["lr"]]}}, ["lr", "range itself"]),
        ({"max_trials": 10**9}, {}, ["searcher.max_trials", "10000"]),
        ({"bracket_rungs": [1_000_000_000]}, {}, ["searcher.bracket_rungs.0", "64"]),
        ({"bracket_rungs": [2000]}, {}, ["searcher.bracket_rungs.0", "64"]),
        ({"bracket_rungs": [2] * 1000}, {}, ["searcher.bracket_rungs", "64"]),
        ({"divisor": 1.0e200}, {}, ["searcher.divisor", "1e+200", "10000"]),
        ({"max_time": 2**62}, {}, ["searcher.max_time"]),
        ({"max_rungs": 10**9}, {}, ["searcher.max_rungs", "64"]),
        ({"max_concurrent_trials": 10**9}, {}, ["searcher.max_concurrent_trials"]),
        ({}, {"lr": {"type": "int", "minval": 1, "maxval": 10**400}}, ["1000", "float64"]),
        ({}, {"lr": {"type": "int", "minval": 1, "maxval": 2**63}}, ["lr.maxval"]),
        ({}, {"lr": {"type": "double", "minval": -1.7e308, "maxval": 1.7e308}}, ["lr", "float64"]),
        ({}, {"lr": {"type": "log", "base": 10, "minval": -1e308, "maxval": 1}}, ["lr", "float64"]),
    ],
)
def test_search_refuses_before_the_first_trial(
    searcher: dict[str, Any],
    hyperparameters: dict[str, Any],
    parts: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = {**ASHA, "max_time": 8, "max_trials": 4, "max_rungs": 2}
    path = write_experiment(base | searcher, SMALL | hyperparameters)
    assert command.main([str(path)]) == ConfigError.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    assert all(part in line for part in parts), line
    assert not Path("runs").exists()


def test_search_refuses_a_preset_that_replaces_its_ranges(
    capsys: pytest.CaptureFixture[str],
) -> None:
    searcher = {"name": "random", "metric": "loss", "max_trials": 2}
    layers = {"n_layers": {"type": "int", "minval": 1, "maxval": 3}}
    path = write_experiment(searcher, SMALL | layers)
    assert command.main([str(path), "model=gpt2"]) == ConfigError.exit_code
    assert "n_layers" in capsys.readouterr().err


def test_last_errors_are_the_end_of_a_long_stderr() -> None:
    write_experiment({"name": "random", "metric": "loss", "max_trials": 1}, SMALL)
    (trial,) = Search(Path("tiny.yaml"), []).trials
    trial.path.mkdir(parents=True)
    (trial.path / "stderr.txt").write_text("x" * 3_000_000 + "\nthe\n\nlast\nlines\n")
    assert trial.last_errors() == "the; last; lines"


def test_reason_of_a_dropped_trial_is_one_short_line() -> None:
    write_experiment({"name": "single", "metric": "loss"}, SMALL)
    (trial,) = Search(Path("tiny.yaml"), []).trials
    trial.path.mkdir(parents=True)
    (trial.path / "dropped").write_text("\x1b[2J" + "x" * 1_000_000)
    reason = trial.why_dropped()
    assert reason is not None
    assert len(reason) <= MAX_LINE + 10
    assert reason.isprintable()


def test_records_that_are_malformed_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    write_experiment({"name": "single", "metric": "loss"}, SMALL)
    (trial,) = Search(Path("tiny.yaml"), []).trials
    trial.path.mkdir(parents=True)
    good = {"group": "validation", "step": 8, "time": 1.0, "loss": 2.0}
    others = [{"group": "validation", "loss": 1.0}, [], {"step": 8}, good | {"step": None}]
    write_lines(trial.path / "metrics.jsonl", *others, good, good | {"loss": "x", "step": 10})
    write_lines(trial.path / "sessions.jsonl", {"time": 1}, {"step": 0}, {"step": None})
    assert trial.values() == {8: 2.0}
    assert trial.n_sessions() == 1
    assert "metrics.jsonl:1: left out (5 in all): step" in capsys.readouterr().err


def losses_by_trial(name: str) -> dict[str, dict[int, float]]:
    """Return the validation losses of each trial, by step."""
    losses: dict[str, dict[int, float]] = {}
    for file in sorted(Path("runs", name).glob("*/metrics.jsonl")):
        records = [json.loads(line) for line in file.read_text().splitlines()]
        losses[file.parent.name] = {
            record["step"]: record["loss"] for record in records if record["group"] == "validation"
        }
    return losses


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    """Return what a process has printed to stdout and stderr at its end, with this exit code."""
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, errors
    return output, errors


@pytest.fixture
def _signals() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.slow
@pytest.mark.usefixtures("_signals")
def test_search_killed_and_rerun_ends_as_an_undisturbed_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    searcher = ASHA | {"mode": "aggressive", "max_time": 8, "max_trials": 4, "max_rungs": 2}
    hyperparameters = SMALL | {"n_heads": {"type": "categorical", "vals": [4, 5]}}
    write_experiment(searcher, hyperparameters)  # heads of 32 / 5 are refused
    whole = start(Path.cwd(), "run_name=whole", "--parallel", "2")
    killed = start(Path.cwd(), "run_name=killed", "--parallel", "2")
    wait_until(lambda: list(Path("runs/killed").glob("trial-*/metrics.jsonl")))
    killed.kill()
    killed.communicate()
    output, _ = finish(start(Path.cwd(), "run_name=killed", "--parallel", "2"))
    printed = finish(whole)[0].splitlines()[-1].split()
    assert printed[-1] == "run_name=whole-best"

    expected = losses_by_trial("whole")
    _, config, _ = printed[-3:]
    best = Path(config).parent.name
    arguments = printed[1:]
    finish(start_python(arguments, os.environ, stdout=PIPE, stderr=PIPE))
    again = losses_by_trial("")["whole-best"]
    assert again == expected[best]
    arguments[-1] = "run_name=whole"
    as_a_run = start_python(arguments, os.environ, stdout=PIPE, stderr=PIPE)
    assert "is a search" in finish(as_a_run, ConfigError.exit_code)[1]
    assert losses_by_trial("killed") == expected
    assert max(max(losses) for losses in expected.values()) == 8
    report = Path("runs/killed/report.md").read_text()
    assert "dropped: " in report
    assert "run_name=killed-best" in output
    assert Path("runs/killed/report.png").read_bytes().startswith(b"\x89PNG")

    write_experiment(searcher | {"max_trials": 5}, hyperparameters)
    again = ["tiny.yaml", "run_name=killed", "--parallel", "2"]
    _, errors = finish(start(Path.cwd(), *again[1:]), ConfigError.exit_code)
    assert "searcher.max_trials: was 4, is now 5" in errors
    write_experiment(searcher, hyperparameters)
    assert command.main(again) == 0
    assert capsys.readouterr().out.splitlines()[-1] == output.splitlines()[-1]
    assert command.main(again) == RunError.exit_code  # the first has locked the directory
    assert "in use" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_search_stops_and_saves_on_a_signal(signum: signal.Signals) -> None:
    write_experiment(
        {"name": "random", "metric": "loss", "max_trials": 2},
        SMALL | {"max_steps": 4000, "validation_rate": 4000},
    )
    search = start(Path.cwd())
    metrics = Path("runs/tiny/trial-1/metrics.jsonl")
    wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0)
    search.send_signal(signum)
    output, _ = finish(search)
    assert "rerun the same command" in output
    assert list(Path("runs/tiny/trial-1/checkpoints").glob("*/manifest.json"))
    assert not Path("runs/tiny/trial-2").exists()


@pytest.mark.slow
def test_search_whose_output_is_not_read_goes_on() -> None:
    write_experiment({"name": "single", "metric": "loss"}, SMALL | {"lr": 0.01})
    with Path("/dev/full").open("wb") as full:
        search = start_python(["-m", "lm.search", "tiny.yaml"], os.environ, stdout=full)
        assert search.wait(PATIENCE) == 0
    assert losses_by_trial("tiny")["trial-1"].keys() >= {8}
    assert Path("runs/tiny/report.md").exists()


@pytest.mark.slow
def test_search_restarts_a_trial_that_was_killed() -> None:
    write_experiment({"name": "single", "metric": "loss"}, SMALL | {"lr": 0.01, "max_steps": 300})
    search = start(Path.cwd())
    trial = Path("runs/tiny/trial-1")
    wait_until((trial / "metrics.jsonl").exists)
    os.kill(int((trial / "lock").read_text().split()[1]), signal.SIGKILL)
    output, _ = finish(search)
    assert "before step 300" in output
    assert "(" not in output.partition("trains to step")[2].splitlines()[0]  # nothing is searched
    assert not re.search("best: trial-1, loss .*:", output)
    assert losses_by_trial("tiny")["trial-1"].keys() >= {300}


TEXT: dict[str, Any] = {
    "dataset": "text",
    "train_data": "train.txt",
    "val_data": "val.txt",
    "vocab_size": 264,
}


def write_data() -> None:
    Path("train.txt").write_text("some text " * 3000)
    Path("val.txt").write_text("held out " * 3000)
    write_lines(Path("own.jsonl"), {"context": "a", "choices": ["b", "c"], "gold": 0})


def started_search(hyperparameters: Mapping[str, Any], *overrides: str) -> Search:
    """A search whose first trial has left the files of a start."""
    write_experiment({"name": "random", "metric": "loss", "max_trials": 2}, hyperparameters)
    search = Search(Path("tiny.yaml"), list(overrides))
    trial = search.trials[0]
    trial.prepare()
    session = {"step": 0, "inputs": dict(trial.settings.inputs)}
    write_lines(trial.path / "sessions.jsonl", session)
    result = {"group": "validation", "step": 8, "time": 1.0, "loss": 2.0}
    write_lines(trial.path / "metrics.jsonl", result)
    write_state(trial.path, RunState(had_checkpoint=True))
    search.require_unchanged(*search.trials)
    return search


def edit_config(key: str, value: Any) -> None:
    path = Path("runs/tiny/trial-1/config.yaml")
    contents = yaml.safe_load(path.read_text())
    contents["hyperparameters"][key] = value
    path.write_text(yaml.safe_dump(contents))


def edit_file(name: str, content: str | None) -> None:
    path = Path("runs/tiny/trial-1", name)
    path.unlink()
    if content is not None:
        path.write_text(content)


def edit_inputs(change: Mapping[str, str]) -> None:
    path = Path("runs/tiny/trial-1/sessions.jsonl")
    session = json.loads(path.read_text())
    session["inputs"] |= change
    path.write_text(json.dumps(session) + "\n")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda: Path("train.txt").write_text("other text " * 3000), "train_data: was "),
        (lambda: Path("val.txt").write_text("other text " * 3000), "val_data: was "),
        (lambda: Path("val.txt").unlink(), "val_data"),
        (lambda: write_lines(Path("own.jsonl"), *OTHER_QUESTIONS), "eval_tasks: was own: 1 q"),
        (lambda: edit_inputs({"versions": "PyTorch 2.11.0"}), "versions: was PyTorch 2.11.0, is"),
        (lambda: edit_config("lr", 0.5), "lr: was "),
        (lambda: edit_config("seed", 7), "seed: was 42, is now 7"),
        (lambda: edit_config("n_layers", None), "n_layers: was 1, is now null"),
        (lambda: edit_file("config.yaml", None), "config.yaml: is missing"),
        (lambda: edit_file("config.yaml", "a: ["), "trial-1/config.yaml:1"),
        (lambda: edit_file("metrics.jsonl", None), "metrics.jsonl: is missing"),
        (lambda: edit_file("sessions.jsonl", None), "inputs: are unknown"),
        (lambda: edit_file("sessions.jsonl", "damaged\n"), "inputs: are unknown"),
        (lambda: edit_file("sessions.jsonl", '{"step": 0, "inputs": 3}\n'), "inputs: are unknown"),
    ],
)
def test_search_names_what_makes_its_trials_incomparable(
    change: Callable[[], Any], name: str
) -> None:
    write_data()
    hyperparameters = SMALL | TEXT | {"eval_tasks": ["own.jsonl"]}
    started_search(hyperparameters)
    change()
    with pytest.raises(ConfigError) as raised:
        Search(Path("tiny.yaml"), []).save()
    (line,) = raised.value.problems
    assert name in line


def test_search_limits_the_lines_on_one_trial() -> None:
    started_search(SMALL)
    edit_file("config.yaml", "hyperparameters:\n")
    with pytest.raises(ConfigError, match="more") as raised:
        Search(Path("tiny.yaml"), []).save()
    assert str(raised.value).count("undo the change") == 1


def test_search_that_is_complete_reads_its_data_again(capsys: pytest.CaptureFixture[str]) -> None:
    write_data()
    started = started_search(SMALL | TEXT)
    replay = started.replay()
    table = Table("loss")
    started.require_same_inputs(*started.trials)
    Path("val.txt").write_text("other text " * 3000)
    with pytest.raises(ConfigError, match="val_data: was "):
        command.finish(started, replay, table)
    assert "best" not in capsys.readouterr().out


OTHER_QUESTIONS = [{"context": "a", "choices": ["b", "d"], "gold": 1}] * 2


@pytest.mark.slow
def test_search_names_other_weights_and_templates() -> None:
    add_tokenizer(Path("hf"), 290)
    make_reference(LLAMA | {"vocab_size": 290}, 0).save_pretrained("hf")
    Path("template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    write_lines(Path("chat.jsonl"), *[{"text": "some text"}] * 200)
    chat = {"dataset": "jsonl", "train_data": "chat.jsonl", "init_from": "hf", "tokenizer": "hf"}
    chat |= {"chat_template": "template.jinja", "lr": SMALL["lr"], "max_steps": 8}
    started_search(chat | {"max_seq_len": 32})
    make_reference(LLAMA | {"vocab_size": 290}, 1).save_pretrained("hf")
    Path("template.jinja").write_text("{% for m in messages %}{{ m.role }}{% endfor %}")
    again = Search(Path("tiny.yaml"), [])
    (template, weights) = again.trials[0].changes()
    assert template.startswith("chat_template: was ")
    assert weights.startswith("init_from: was 1 files, ")


def test_inputs_have_the_config_of_transformers() -> None:
    write_experiment({"name": "single", "metric": "loss"}, SMALL)
    (trial,) = Search(Path("tiny.yaml"), []).trials
    hp = trial.settings.hp
    data = open_data(hp.data, 64, 16, 1, seed=0)
    now = fingerprint_inputs(dataclasses.replace(hp, model=OF_TRANSFORMERS), data, None)
    changes = differences(trial.settings.inputs, now)
    assert [change.partition(":")[0] for change in changes[:1]] == ["config.norm_eps"]
    assert changes[-1].startswith("transformers: was not set, is now 5.")


def test_classes_of_transformers_arrive_when_the_same_model_does() -> None:
    """Of a mixture, experts that a token does not use are not counted."""
    write_experiment({"name": "single", "metric": "loss"}, SMALL)
    (trial,) = Search(Path("tiny.yaml"), []).trials
    mixture = {"n_experts": 5, "experts_per_token": 2, "d_ff": 24, "qk_norm": "head"}
    ours = ModelConfig.model_validate(TINY | LLAMA_STYLE | mixture)
    theirs = examined_config(config_json.write_config(ours, "float32", None))
    arrivals: list[float] = []
    for model in (ours, theirs):
        hp = dataclasses.replace(trial.settings.hp, model=model)
        arrivals.append(dataclasses.replace(trial.settings, hp=hp).flops_until(0))
    assert arrivals[0] == arrivals[1]


def test_search_keeps_the_date_of_its_first_trial() -> None:
    write_lines(Path("train.jsonl"), *[{"text": "some text"}] * 400)
    started_search(SMALL | {"dataset": "jsonl", "train_data": "train.jsonl", "vocab_size": 264})
    edit_config("chat_template_date", "2026-01-31")
    again = Search(Path("tiny.yaml"), [])
    again.require_unchanged(*again.trials)
    dates = {str(trial.settings.hp.data.chat_template_date) for trial in again.trials}
    assert dates == {"2026-01-31"}


@pytest.mark.parametrize("content", [None, "", "[]", '{"format": 1}'])
def test_search_restores_its_file_from_the_trials(
    content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    started_search(SMALL)
    file = Path("runs/tiny/search.json")
    if content is not None:
        file.write_text(content)
    search = Search(Path("tiny.yaml"), [])
    search.save()
    points = [trial.point for trial in search.trials]
    assert json.loads(file.read_text())["points"] == points
    assert "search.json was missing or damaged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("prepare", "parts"),
    [
        (lambda: edit_config("lr", 0.5), ["trial-1", "lr: was "]),
        (lambda: Path("runs/tiny/trial-3").mkdir(), ["search.json", "trial-3"]),
        (
            lambda: Path("runs/tiny/search.json").write_text(
                '{"format": 2, "experiment": {}, "points": []}'
            ),
            ["search.json: has format 2", "format 1"],
        ),
        (
            lambda: Path("runs/tiny/search.json").write_text('{"format": 3, "trials": {}}'),
            ["search.json: has format 3", "format 1"],
        ),
    ],
)
def test_search_does_not_adopt_other_trials(prepare: Callable[[], Any], parts: list[str]) -> None:
    started_search(SMALL)
    prepare()
    with pytest.raises(ConfigError) as raised:
        Search(Path("tiny.yaml"), []).save()
    (line,) = raised.value.problems
    assert all(part in line for part in parts), line
    assert "delete" not in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda path: path.write_text("other text " * 3000), "val_data: was "),
        (lambda path: path.unlink(), "val_data: "),
    ],
)
def test_search_ends_where_its_data_change(change: Callable[[Path], Any], problem: str) -> None:
    """No trial is dropped: nothing is wrong with its point."""
    write_data()
    write_experiment({"name": "random", "metric": "loss", "max_trials": 2}, SMALL | TEXT)
    second = Path("runs/tiny/trial-2")
    second.mkdir(parents=True)
    with FileLock((second / "lock").absolute()):  # the search waits for it
        search = start(Path.cwd())
        wait_until(lambda: 8 in losses_by_trial("tiny").get("trial-1", {}))
        change(Path("val.txt"))
    _, errors = finish(search, ConfigError.exit_code)
    (line,) = errors.splitlines()
    assert "trial-2 does not start" in line
    assert problem in line
    assert "run the same command again" in line
    assert not (second / "dropped").exists()
    output, errors = finish(start(Path.cwd()), ConfigError.exit_code)
    assert problem in errors
    assert "trial-2" not in output
    write_data()
    finish(start(Path.cwd()))
    assert {max(losses) for losses in losses_by_trial("tiny").values()} == {8}


@pytest.mark.slow
def test_trial_does_not_resume_from_a_checkpoint_of_other_data() -> None:
    """One whose records are lost, e.g. in object storage."""
    write_data()
    hyperparameters = SMALL | TEXT | {"lr": 0.01, "run_name": "tiny/trial-1"}
    write_experiment({"name": "single", "metric": "loss"}, SMALL | TEXT | {"lr": 0.01})
    run_fsdp(Path.cwd(), "stop_at_step=4", config=hyperparameters, code=0)
    Path("val.txt").write_text("other text " * 3000)
    (trial,) = Search(Path("tiny.yaml"), []).trials
    inputs = json.dumps(trial.settings.inputs)
    resumed = run_fsdp(Path.cwd(), config=hyperparameters, SEARCH_INPUTS=inputs)
    assert resumed.returncode == ConfigError.exit_code
    assert OTHER_INPUTS in resumed.stderr
    assert "val_data: " in resumed.stderr


@pytest.mark.slow
def test_complete_trial_whose_result_is_lost_is_not_dropped() -> None:
    write_experiment({"name": "single", "metric": "loss"}, SMALL | {"lr": 0.01})
    finish(start(Path.cwd()))
    metrics = Path("runs/tiny/trial-1/metrics.jsonl")
    metrics.write_text("")
    _, errors = finish(start(Path.cwd()), ConfigError.exit_code)
    assert "trial-1 is complete: its metrics.jsonl lacks step 8" in errors
    assert not (metrics.parent / "dropped").exists()


@pytest.mark.slow
def test_search_ends_where_all_trials_are_refused_alike() -> None:
    too_large = {"d_model": 32768, "n_layers": 64}  # for this machine
    write_experiment({"name": "random", "metric": "loss", "max_trials": 20}, SMALL | too_large)
    _, errors = finish(start(Path.cwd()), ConfigError.exit_code)
    assert "the first 3 trials were refused alike" in errors
    assert len(list(Path("runs/tiny").glob("trial-*"))) == 3
    assert not list(Path("runs/tiny").glob("trial-*/dropped"))


@pytest.mark.slow
def test_killed_search_whose_data_change_ranks_equal_trials() -> None:
    """With this seed: killed, refused on other data, completed on its own, refused on others."""
    Soak(Path.cwd(), random.Random(1664510)).run(1)


@pytest.mark.slow
def test_search_waits_for_a_trial_that_is_still_saving() -> None:
    """A search that was killed leaves trials that save, and hold their directory meanwhile."""
    write_experiment({"name": "random", "metric": "loss", "max_trials": 2}, SMALL)
    second = Path("runs/tiny/trial-2")
    second.mkdir(parents=True)
    with FileLock((second / "lock").absolute()):
        search = start(Path.cwd(), "--parallel", "2")
        wait_until(lambda: 8 in losses_by_trial("tiny").get("trial-1", {}))
        assert search.poll() is None
        assert not (second / "config.yaml").exists()
    output, _ = finish(search)
    assert "before step" not in output
    assert 8 in losses_by_trial("tiny")["trial-2"]
