"""A search ends with the same points whatever kills it, and refuses what it cannot compare."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE
from typing import Any

import optuna
import pytest
import yaml
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from lm.config.reading import load_hyperparameters
from lm.data.run_data import open_data
from lm.errors import ConfigError, RunError
from lm.hf import weights
from lm.inputs import fingerprint_inputs
from lm.search import __main__ as command
from lm.search.experiment import Experiment
from lm.search.search import Search, describe_changes
from lm.search.trials import Devices
from tests.support import PATIENCE, REPOSITORY
from tests.support.forked import start_python
from tests.support.hf import LLAMA, add_tokenizer, make_reference
from tests.support.hyperparameters import OF_TRANSFORMERS, TINY
from tests.support.runs import wait_until

ASHA: dict[str, Any] = {
    "name": "adaptive_asha",
    "metric": "loss",
    "time_metric": "batches",
    "max_trials": 4,
    "max_time": 8,
    "max_rungs": 2,
}
RANDOM: dict[str, Any] = {"name": "random", "metric": "loss", "max_trials": 2}
SINGLE: dict[str, Any] = {"name": "single", "metric": "loss"}
SMALL: dict[str, Any] = TINY | {
    "n_layers": 1,
    "max_steps": 8,
    "report_rate": 2,
    "validation_batches": 1,
    "checkpoint_rate": 100,
    "amp_dtype": None,
    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
}
TEXT: dict[str, Any] = {
    "dataset": "text",
    "train_data": "train.txt",
    "val_data": "val.txt",
    "vocab_size": 264,
}


@pytest.fixture(autouse=True)
def _chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_experiment(searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any]) -> Path:
    path = Path("tiny.yaml")
    contents = {"searcher": dict(searcher), "hyperparameters": dict(hyperparameters)}
    path.write_text(yaml.safe_dump(contents))
    return path


def write_data() -> None:
    Path("train.txt").write_text("some text " * 3000)
    Path("val.txt").write_text("held out " * 3000)


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    """Return what a process has printed to stdout and stderr at its end, with this exit code."""
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, output + errors
    return output, errors


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the search of `tiny.yaml` in `folder`, whose trials are forked, too."""
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = ["-m", "lm.search", "tiny.yaml", *arguments]
    return start_python(command, variables, cwd=folder, stdout=PIPE, stderr=PIPE)


def read_trials(name: str = "tiny") -> list[FrozenTrial]:
    backend = JournalFileBackend(f"runs/{name}/search.journal")
    return optuna.load_study(study_name="search", storage=JournalStorage(backend)).trials


def loss_at_end(run: str) -> float:
    lines = Path("runs", run, "metrics.jsonl").read_text().splitlines()
    last = [json.loads(line) for line in lines if '"validation"' in line][-1]
    loss: float = last["loss"]
    return loss


# ---- the file


RANGES: dict[str, Any] = {
    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -2, "count": 3},
    "n_layers": {"type": "int", "minval": 2, "maxval": 5, "count": 9},
    "dropout": {"type": "double", "minval": 0, "maxval": 0.5, "count": 1},
    "norm": {"type": "categorical", "vals": ["rmsnorm", "layernorm"]},
    "eval_tasks": {"type": "categorical", "vals": [["a.jsonl"], None]},
    "d_model": {"type": "const", "val": 32},
}


def test_ends_of_ranges_are_arguments_of_a_trial() -> None:
    experiment = Experiment(write_experiment(ASHA, RANGES), ["grad_clip=1"])
    first, last = [experiment.arguments_of(point, "check") for point in experiment.ends()]
    assert first[:3] == ["--config", "tiny.yaml", "grad_clip=1"]
    assert {"lr=0.0001", "n_layers=2", "dropout=0.0", "norm=rmsnorm"} < set(first)
    assert {"lr=0.01", "n_layers=4", "dropout=0.5", "norm=layernorm"} < set(last)
    assert {'eval_tasks=["a.jsonl"]'} < set(first)
    assert {"eval_tasks=null", "run_name=tiny/check"} < set(last)
    assert not [each for each in first if each.startswith("d_model")]  # trials read it in the file


def test_grid_has_the_values_of_determined() -> None:
    experiment = Experiment(write_experiment({"name": "grid", "metric": "loss"}, RANGES), [])
    values = {
        key: [yaml.safe_load(each) for each in experiment.choices()[key]]
        for key in RANGES
        if key != "d_model"
    }
    assert values["lr"] == pytest.approx([1e-4, 1e-3, 1e-2])
    assert values["n_layers"] == [2, 3, 4, 5]
    assert values["dropout"] == [0.25]
    assert experiment.n_points == 3 * 4 * 1 * 2 * 2


def test_arguments_replace_ranges_and_keys_of_the_searcher() -> None:
    path = write_experiment(ASHA, SMALL)
    arguments = ["searcher.max_trials=7", "lr=0.1", "d_model={type: int, minval: 8, maxval: 17}"]
    experiment = Experiment(path, arguments)
    assert experiment.n_points == 7
    assert experiment.ends() == [{"d_model": 8}, {"d_model": 16}]


@pytest.mark.parametrize(
    ("searcher", "hyperparameters", "parts"),
    [
        ({"divisor": 1}, {}, ["tiny.yaml:18: searcher.divisor", "1"]),
        ({"max_trial": 3}, {}, ["searcher.max_trial:", "did you mean max_trials?"]),
        ({"max_trials": None}, {}, ["searcher", "max_trials"]),
        ({"name": "adaptive"}, {}, ["searcher.name", "adaptive", "adaptive_asha"]),
        ({"time_metric": "steps"}, {}, ["searcher.time_metric", "steps", "batches"]),
        ({"mode": "standard"}, {}, ["searcher.mode", "aggressive"]),
        ({"bracket_rungs": [2]}, {}, ["searcher.bracket_rungs"]),
        ({"max_trials": 10**9}, {}, ["searcher.max_trials", "10000"]),
        ({"sampler": "best"}, {}, ["searcher.sampler", "random", "tpe"]),
        ({"name": "grid"}, {}, ["tiny.yaml:", "lr", "count"]),
        ({"name": "grid"}, {"lr": RANGES["lr"] | {"count": 10**4, "base": 2},
                            "beta1": RANGES["dropout"] | {"count": 2}}, ["more than 10,000"]),
        ({}, {"lr": {"type": "log", "base": 10, "minval": 1}}, ["tiny.yaml:", "lr.maxval"]),
        ({}, {"lr": {"type": "log", "minval": -2, "maxval": -1}}, ["lr.base"]),
        ({}, {"lr": {"type": "logg", "minval": 1, "maxval": 2}}, ["lr", "logg", "categorical"]),
        ({}, {"lr": {"type": "log", "base": 10, "minval": 2, "maxval": 1}}, ["lr", "100.0"]),
        ({}, {"lr": {"type": "double", "minval": 0, "maxval": 1e300}}, ["lr.maxval", "1e+300"]),
        ({}, {"lr": {"type": "categorical", "vals": []}}, ["lr", "choices"]),
        ({}, {"stop_at_step": 1}, ["tiny.yaml:", "stop_at_step", "remove it"]),
    ],
)  # fmt: skip
def test_search_refuses_before_the_first_trial(
    searcher: dict[str, Any],
    hyperparameters: dict[str, Any],
    parts: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_experiment(ASHA | searcher, SMALL | hyperparameters)
    assert command.main([str(path)]) == ConfigError.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    assert all(part in line for part in parts), line
    assert not Path("runs").exists()


@pytest.mark.parametrize("section", ["resources", "reproducibility", "max_restarts"])
def test_search_refuses_a_section_of_another_kind(
    section: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_experiment(RANDOM, SMALL)
    path.write_text(f"{section}: some\n{path.read_text()}")
    assert command.main([str(path)]) == ConfigError.exit_code
    assert capsys.readouterr().err.startswith(f"tiny.yaml:1: {section}: 'some'")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "arguments are required: FILE\n"),
        (["tiny.yaml", "searcher.max_trial=4"], "argument searcher.max_trial: "),
        (["tiny.yaml", "searcher.metric=perplexity"], "searcher.metric: .*tiny.yaml"),
        (["tiny.yaml", "lr={type: int, minval: 1}"], "argument lr.maxval"),
        (["tiny.yaml", "run_name=a/b"], "run_name: 'a/b'"),
        (["tiny.yaml", "--parallel", "0"], "--parallel: 0"),
    ],
)
def test_wrong_arguments_of_a_search_are_named(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_experiment(ASHA, SMALL)
    with suppress(SystemExit):  # of argparse
        assert command.main(arguments) == ConfigError.exit_code
    assert re.search(part, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"lrr": 1}, ["tiny.yaml:", "lrr", "did you mean lr"]),
        ({"d_model": 2**15, "n_layers": 64, "n_heads": 8}, ["GiB"]),
    ],
)
@pytest.mark.slow
def test_search_of_which_trials_refuse_both_ends_leaves_nothing(
    changes: dict[str, Any], parts: list[str]
) -> None:
    write_experiment(ASHA, SMALL | changes)
    _, errors = finish(start(Path.cwd()), ConfigError.exit_code)
    (line,) = errors.splitlines()
    assert all(part in line for part in parts), line
    assert not Path("runs").exists()


@pytest.mark.slow
def test_dry_run_tells_which_end_is_refused() -> None:
    write_experiment(ASHA, SMALL | {"n_heads": {"type": "categorical", "vals": [5, 4]}})
    output, _ = finish(start(Path.cwd(), "--dry-run"))
    assert re.search("refused: .*n_heads", output)
    write_experiment(ASHA | {"metric": "accuracy"}, SMALL)
    _, errors = finish(start(Path.cwd(), "--dry-run"), ConfigError.exit_code)
    assert "searcher.metric" in errors
    assert not Path("runs").exists()


# ---- the study


def open_search(*arguments: str) -> Search:
    return Search(Experiment(Path("tiny.yaml"), arguments), Devices(1, None))


def draw_all(search: Search, n_trials: int) -> list[dict[str, Any]]:
    """Draw points, whose trials are complete, the better the nearer lr is to 1e-2."""
    for number in range(n_trials):
        point = search._draw(number)
        trial = optuna.trial.create_trial(
            params=point,
            distributions=dict(search.experiment.distributions),
            value=abs(point["lr"] - 1e-2),
        )
        search.study.add_trial(trial)
    return [trial.params for trial in search.study.trials]


def test_points_are_a_function_of_seed_and_number() -> None:
    write_experiment(RANDOM, SMALL)
    points = draw_all(open_search("run_name=a"), 5)
    assert draw_all(open_search("run_name=b"), 5) == points
    assert len({point["lr"] for point in points}) == 5
    assert all(1e-4 <= point["lr"] <= 1e-1 for point in points)
    Path("tiny.yaml").write_text(
        f"reproducibility: {{experiment_seed: 1}}\n{Path('tiny.yaml').read_text()}"
    )
    others = draw_all(open_search("run_name=c"), 5)
    assert not [point for point in others if point in points]


def test_tpe_draws_near_the_best_points() -> None:
    write_experiment(RANDOM, SMALL)
    medians: list[float] = []
    for sampler in ("tpe", "random"):
        points = draw_all(open_search(f"run_name={sampler}", f"searcher.sampler={sampler}"), 40)
        decades = [abs(math.log10(point["lr"]) + 2) for point in points[20:]]
        medians.append(statistics.median(decades))
    assert medians[0] < 0.7 * medians[1]


def test_partial_record_of_a_kill_is_dropped() -> None:
    write_experiment(RANDOM, SMALL)
    draw_all(open_search("run_name=a"), 2)
    Path("runs/b").mkdir()
    journal = Path("runs/a/search.journal").read_bytes()
    Path("runs/b/search.journal").write_bytes(journal + b'{"op_code":4,"wor')
    assert len(draw_all(open_search("run_name=b"), 1)) == 3
    Path("runs/c").mkdir()
    Path("runs/c/search.journal").write_bytes(b"{}\n" + journal)
    with pytest.raises(ConfigError, match=r"runs/c/search\.journal: damaged"):
        open_search("run_name=c")


@pytest.mark.parametrize("state", [TrialState.RUNNING, TrialState.PRUNED])
def test_trial_that_is_still_saving_is_waited_for(
    state: TrialState, capsys: pytest.CaptureFixture[str]
) -> None:
    """It uses a GPU that another trial would be started on."""
    write_experiment(RANDOM, SMALL)
    search = open_search()
    trial = optuna.trial.create_trial(
        state=state,
        params=search._draw(0),
        distributions=dict(search.experiment.distributions),
    )
    search.study.add_trial(trial)
    Path("runs/tiny/trial-0").mkdir()
    hold = (
        "import fcntl\nfile = open('runs/tiny/trial-0/lock', 'w')\nfcntl.flock(file, fcntl.LOCK_EX)"
    )
    script = f"{hold}\nprint('locked', flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=PIPE, stdout=PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        waiting = threading.Thread(target=search._wait_for_saving_trials)
        waiting.start()
        wait_until(lambda: "waiting for trial-0" in capsys.readouterr().out)
        assert waiting.is_alive()
        holder.kill()
        waiting.join(PATIENCE)
        assert not waiting.is_alive()


def test_search_in_the_directory_of_a_run_is_refused() -> None:
    write_experiment(RANDOM, SMALL)
    Path("runs/tiny").mkdir(parents=True)
    Path("runs/tiny/config.yaml").write_text("hyperparameters: {}")
    with pytest.raises(ConfigError, match=r"runs/tiny: is a run; .*run_name=NAME"):
        open_search()


def test_trials_of_a_lost_study_are_not_adopted() -> None:
    """Their points can be others."""
    write_experiment(RANDOM, SMALL)
    Path("runs/tiny/trial-1").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"runs/tiny: has trials .*run_name=tiny-2"):
        open_search()


# ---- trials


@pytest.mark.slow
def test_search_killed_and_rerun_ends_with_the_same_points() -> None:
    heads = {"n_heads": {"type": "categorical", "vals": [4, 5]}}  # heads of 32 / 5 are refused
    write_experiment(ASHA | {"max_trials": 3}, SMALL | heads)
    whole = start(Path.cwd(), "run_name=whole")
    killed = start(Path.cwd(), "run_name=killed", "--parallel", "2")
    wait_until(lambda: list(Path("runs/killed").glob("trial-*/metrics.jsonl")))
    killed.kill()
    killed.communicate()
    finish(start(Path.cwd(), "run_name=killed", "--parallel", "2"))
    lines = finish(whole)[0].splitlines()
    trials = read_trials("whole")
    again = read_trials("killed")
    assert [trial.params for trial in again] == [trial.params for trial in trials]
    assert len(trials) == 3
    for trial, other in zip(trials, again, strict=True):
        assert (trial.state == TrialState.FAIL) == (trial.params["n_heads"] == "5")
        assert (other.state == TrialState.FAIL) == (trial.params["n_heads"] == "5")
        for step in trial.intermediate_values.keys() & other.intermediate_values.keys():
            assert trial.intermediate_values[step] == other.intermediate_values[step]
    failed = [line for line in lines if line.startswith("|") and "n_heads" in line]
    assert len(failed) == 1 + sum(trial.state == TrialState.FAIL for trial in trials)

    best = min(
        (trial for trial in trials if trial.state == TrialState.COMPLETE),
        key=lambda trial: trial.value or 0,
    )
    arguments = lines[-1].split()
    assert f"runs/whole/trial-{best.number}/config.yaml" in arguments
    finish(start_python(arguments[1:], os.environ, stdout=PIPE, stderr=PIPE))
    assert loss_at_end("whole-best") == best.value


@pytest.mark.slow
def test_search_is_extended_but_not_changed() -> None:
    write_experiment(RANDOM, SMALL)
    _, errors = finish(start(Path.cwd()))
    first = [trial.params for trial in read_trials()]
    for change in ("grad_clip=0.5", "lr=0.1"):
        _, errors = finish(start(Path.cwd(), change), ConfigError.exit_code)
        assert f"runs/tiny: {change.partition('=')[0]}: was " in errors
        assert "run_name=tiny-2" in errors
    output, _ = finish(start(Path.cwd(), "searcher.max_trials=3"))
    assert [trial.params for trial in read_trials()][:2] == first
    assert "trial-2 complete" in output
    assert "trial-1 starts" not in output


def test_search_with_a_larger_metric_prefers_it() -> None:
    """One trial learns the words of its text, the other one nothing."""
    write_data()
    question = {"context": "0: ", "choices": ["some text", "#$%&?@~^|"], "gold": 0}
    Path("own.jsonl").write_text(json.dumps(question))
    searcher = {"name": "grid", "metric": "eval_own_acc", "smaller_is_better": False}
    rates = {"lr": {"type": "categorical", "vals": [1e-9, 0.01]}}
    write_experiment(searcher, SMALL | TEXT | rates | {"eval_tasks": ["own.jsonl"]})
    output, _ = finish(start(Path.cwd()))
    trials = {trial.params["lr"]: trial for trial in read_trials()}
    assert [trials[lr].value for lr in ("0.01", "1e-09")] == [1, 0]
    assert f"best: trial-{trials['0.01'].number}, eval_own_acc" in output


@pytest.mark.slow
def test_search_compares_models_that_are_not_trained() -> None:
    write_data()
    widths = {"d_model": {"type": "categorical", "vals": [32, 64]}}
    untrained = {"max_epochs": -1, "max_steps": None, "lr": 1e-3}
    write_experiment({"name": "grid", "metric": "loss"}, SMALL | TEXT | widths | untrained)
    output, _ = finish(start(Path.cwd()))
    assert {trial.state for trial in read_trials()} == {TrialState.COMPLETE}
    assert "best: trial-" in output


@pytest.mark.slow
def test_search_ends_where_its_data_change() -> None:
    """No trial fails: nothing is wrong with its point."""
    write_data()
    write_experiment(RANDOM, SMALL | TEXT)
    finish(start(Path.cwd(), "searcher.max_trials=1"))
    Path("val.txt").write_text("other text " * 3000)
    _, errors = finish(start(Path.cwd()), ConfigError.exit_code)
    (line,) = errors.splitlines()
    assert "runs/tiny: trial-1: val_data: was " in line
    assert "delete runs/tiny/trial-1, and run the same command again" in line
    assert read_trials()[1].state == TrialState.RUNNING
    write_data()
    shutil.rmtree("runs/tiny/trial-1")
    finish(start(Path.cwd()))
    assert {trial.state for trial in read_trials()} == {TrialState.COMPLETE}
    assert loss_at_end("tiny/trial-1") == read_trials()[1].value


@pytest.mark.slow
def test_search_ends_where_a_trial_does_not_resume() -> None:
    write_data()
    write_experiment(SINGLE, SMALL | TEXT | {"lr": 0.01, "max_steps": 4000, "checkpoint_rate": 1})
    search = start(Path.cwd())
    wait_until(lambda: list(Path("runs/tiny/trial-0").glob("checkpoints/*/manifest.json")))
    search.kill()
    search.communicate()
    Path("train.txt").write_text("other text " * 3000)
    _, errors = finish(start(Path.cwd()), ConfigError.exit_code)
    assert "trial-0 does not resume: " in errors
    assert "train_data" in errors
    assert read_trials()[0].state == TrialState.RUNNING


@pytest.mark.slow
def test_search_restarts_a_trial_that_was_killed() -> None:
    write_experiment(SINGLE, SMALL | {"lr": 0.01, "max_steps": 300, "validation_rate": 300})
    search = start(Path.cwd())
    trial = Path("runs/tiny/trial-0")
    wait_until((trial / "metrics.jsonl").exists)
    os.kill(int((trial / "lock").read_text().split()[1]), signal.SIGKILL)
    output, _ = finish(search)
    assert "before its last step" in output
    assert read_trials()[0].last_step == 300


@pytest.mark.slow
def test_search_without_a_result_names_the_reasons() -> None:
    write_experiment(SINGLE, SMALL | {"lr": 1e15})  # diverges
    _, errors = finish(start(Path.cwd()), RunError.exit_code)
    assert "no trial is complete" in errors
    (trial,) = read_trials()
    assert trial.state == TrialState.FAIL
    assert trial.user_attrs["problem"]


@pytest.mark.slow
def test_search_stops_and_saves_on_a_signal() -> None:
    write_experiment(RANDOM, SMALL | {"lr": 0.01, "max_steps": 4000, "validation_rate": 4000})
    search = start(Path.cwd())
    metrics = Path("runs/tiny/trial-0/metrics.jsonl")
    wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0)
    second = start(Path.cwd())
    assert "in use" in finish(second, RunError.exit_code)[1]
    search.send_signal(signal.SIGTERM)
    output, _ = finish(search)
    assert "rerun the same command" in output
    assert list(Path("runs/tiny/trial-0/checkpoints").glob("*/manifest.json"))
    assert not Path("runs/tiny/trial-1").exists()


def read_inputs(**changes: Any) -> dict[str, Any]:
    """Return what a run of `tiny.yaml` depends on besides its hyperparameters."""
    hp = load_hyperparameters(Path("tiny.yaml"), [], weights.model_defaults)
    model = hp.model
    data = open_data(hp.data, model.vocab_size, model.max_seq_len, 1, seed=0)
    return fingerprint_inputs(dataclasses.replace(hp, **changes), data, "own: 1 question")


@pytest.mark.slow
def test_inputs_name_other_weights_templates_and_configs() -> None:
    add_tokenizer(Path("hf"), 290)
    make_reference(LLAMA | {"vocab_size": 290}, 0).save_pretrained("hf")
    Path("template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    Path("chat.jsonl").write_text('{"text": "some text"}\n' * 200)
    chat = {"dataset": "jsonl", "train_data": "chat.jsonl", "init_from": "hf", "tokenizer": "hf"}
    write_experiment({}, chat | {"chat_template": "template.jinja", "max_seq_len": 32})
    before = read_inputs()
    make_reference(LLAMA | {"vocab_size": 290}, 1).save_pretrained("hf")
    Path("template.jinja").write_text("{% for m in messages %}{{ m.role }}{% endfor %}")
    template, init_from = describe_changes(before, read_inputs())
    assert template.startswith("chat_template: was ")
    assert init_from.startswith("init_from: was 1 files, ")
    (config,) = describe_changes(read_inputs(), read_inputs(model=OF_TRANSFORMERS))
    assert config.startswith("config: was ")
