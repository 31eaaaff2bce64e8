"""A report says what the files of runs say, and never ends a run."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from determined.core import DummyTrainContext
from matplotlib.figure import Figure

from lm import report
from lm.fileio import Line, print_once, read_records
from lm.metrics.logger import MetricLogger
from lm.runtime.run_dir import RunDir


@pytest.fixture(autouse=True)
def _chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    print_once.cache_clear()


def make_run(name: str, **hyperparameters: object) -> Path:
    """The directory of a run that was killed once: 100 s until its last report, then 50 s."""
    path = Path("runs") / name
    path.mkdir(parents=True)
    settings = {"run_name": name, "max_steps": 30, "lr": 0.001} | hyperparameters
    (path / "config.yaml").write_text(yaml.safe_dump({"hyperparameters": settings}))
    session = {
        "step": 0,
        "tokens_per_step": 1000,
        "ranks": 8,
        "gpus": 8,
        "device": "H100",
        "host": "a|\nb",
        "versions": "PyTorch 3",
    }
    sessions = [{"time": 1000.0, "last_write": None}, {"time": 2000.0, "last_write": 1100.0}]
    metrics = {
        "mfu": 0.5,
        "peak_memory_gib": 3.5,
        "save_stall_seconds": 1.5,
        "skipped_steps": 1.0,
        "lr": 1e-3,
    }
    reports = [
        {
            "group": "training",
            "step": 10,
            "time": 1050.0,
            "loss": 3.0,
            "tokens_per_second": 100.0,
            **metrics,
        },
        {"group": "validation", "step": 10, "time": 1060.0, "loss": 2.5},
        {
            "group": "training",
            "step": 20,
            "time": 2040.0,
            "loss": 2.0,
            "tokens_per_second": 120.0,
            **metrics,
        },
        {"group": "validation", "step": 20, "time": 2050.0, "loss": 2.7},
    ]
    samples = [
        {
            "group": "sample",
            "step": 20,
            "time": 2050.0,
            "prompt": "to be",
            "text": " or\nnot\x1b[2J",
        }
    ]
    sessions = [each | session | {"command": "fsdp.py lr=1"} for each in sessions]
    for file, records in (("metrics", reports), ("samples", samples), ("sessions", sessions)):
        (path / f"{file}.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records) + '{"trunc'
        )
    return path


def test_report_counts_sessions_and_the_best_validation() -> None:
    facts = report.RunRecords(make_run("a")).summarize()
    assert facts["validation loss"] == "2.7000, best 2.5000 (step 10)"
    assert (facts["steps"], facts["tokens"], facts["skipped steps"]) == ("20 of 30", "20,000", "2")
    assert facts["wall time"].startswith("0:02:30")
    assert facts["GPU-hours"] == f"{150 * 8 / 3600:.2f}"
    assert (facts["tokens/s (median)"], facts["MFU (median)"]) == ("110", "50.0%")
    assert facts["training blocked by saving (s)"] == "3.0"


def test_report_after_a_stop_has_the_step_that_was_saved() -> None:
    run = make_run("a")
    with MetricLogger(0, run, DummyTrainContext(), max_steps=30) as logger:
        logger.open(20)
        logger.log_checkpoint(25, "uuid")
    facts = report.RunRecords(run).summarize()
    assert (facts["steps"], facts["tokens"]) == ("25 of 30", "25,000")
    with MetricLogger(0, run, DummyTrainContext(), max_steps=30) as logger:
        logger.open(20)  # the checkpoint of step 25 was damaged
    assert report.RunRecords(run).summarize()["steps"] == "20 of 30"


def test_report_has_the_best_scores_of_tasks_and_of_named_sets() -> None:
    run = make_run("a")
    with (run / "metrics.jsonl").open("a") as file:
        for step, acc in ((10, 0.5), (20, 0.25)):
            scores = {"eval_own_acc": acc, "eval_own_bpb": acc, "eval_$\\x_acc": 1.0}
            of_sets = {"bits_per_byte_wiki": acc, "reward_accuracy_wiki": acc}
            scores |= of_sets | {"reward_margin_my-set_2": acc, "length_chosen_wiki": acc}
            line = {"group": "validation", "step": step, "time": 2060.0, **scores}
            file.write("\n" + json.dumps(line))
    facts = report.RunRecords(run).summarize()
    assert facts["validation eval_own_acc"] == "0.2500, best 0.5000 (step 10)"
    assert facts["validation eval_own_bpb"] == "0.2500, best 0.2500 (step 20)"
    assert facts["validation bits_per_byte_wiki"] == "0.2500, best 0.2500 (step 20)"
    assert facts["validation reward_accuracy_wiki"] == "0.2500, best 0.5000 (step 10)"
    assert facts["validation reward_margin_my-set_2"] == "0.2500, best 0.5000 (step 10)"
    assert sum(label.startswith("validation ") for label in facts) == 6  # with the loss
    assert report.write_report(run) == "runs/a/report.md and report.png"


def test_report_command_writes_a_report_again(capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run("a")
    assert report.main([str(run)]) == 0
    text = (run / "report.md").read_text()
    assert r"| hardware | 8 x H100, a\| b |" in text
    assert "| command | `fsdp.py lr=1` |" in text
    assert "Sample of a after step 20:\n\n    to be or\n    not\\x1b[2J\n" in text
    assert capsys.readouterr().out.endswith("runs/a/report.md and report.png\n")
    assert (run / "report.png").read_bytes().startswith(b"\x89PNG")


def test_report_command_compares_runs() -> None:
    assert report.main([str(make_run("a")), str(make_run("b", lr=0.01, seed=1))]) == 0
    text = Path("runs/report.md").read_text()
    assert "| `lr` | 0.001 | 0.01 |\n" in text
    assert "| `seed` |  | 1 |\n" in text  # one config lacks it
    assert "`packing`" not in text
    assert "| GPU-hours | 0.33 | 0.33 |\n" in text
    assert "`max_steps`" not in text
    assert Path("runs/report.png").stat().st_size > 10_000
    assert "differ" not in report.format_report(
        [report.RunRecords(make_run(name)) for name in "cd"]
    )


def test_report_of_an_older_version_says_what_is_known() -> None:
    run = make_run("a")
    for file in ("samples.jsonl", "sessions.jsonl", "config.yaml"):
        (run / file).unlink()
    assert report.write_report(run) == "runs/a/report.md and report.png"
    assert "wall time" not in (run / "report.md").read_text()
    shutil.rmtree(run)
    run.mkdir()
    (run / "metrics.jsonl").touch()
    assert report.write_report(run) == "runs/a/report.md"


def test_report_ignores_lines_that_are_no_records(capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run("a")
    before = report.RunRecords(run).summarize()
    for file in ("metrics.jsonl", "samples.jsonl", "sessions.jsonl"):
        with (run / file).open("ab") as lines:
            lines.write(b'\n[1]\n5\n{"step": 3}\n{}\n\xff\x00\n' + b"[" * 99_999)
    for _ in range(2):
        assert report.RunRecords(run).summarize() == before
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3
    assert said[0].startswith("runs/a/metrics.jsonl:5: left out (6 in all): ")
    (run / "metrics.jsonl").write_text('{"group": "g", "step": 1, "time": 1, "\\u001b[2J": "x"}\n')
    assert report.RunRecords(run).step == 0
    assert "\\x1b[2J: Input should be a valid number" in capsys.readouterr().err
    (run / "sessions.jsonl").write_text("{}\n")
    assert "wall time" not in report.RunRecords(run).summarize()
    assert capsys.readouterr().err.startswith(
        "runs/a/sessions.jsonl:1: left out (1 in all): step: "
    )


WRONG_VALUES: list[dict[str, object]] = [
    {"loss": "text"},
    {"loss": 1e308},
    {"lr": None},
    {"lr": 10**400},
    {"step": 2**70},
    {"time": "now"},
    {"time": 1e300},
    {"group": [1]},
    {"text": 5},
    {"gpus": "eight"},
    {"last_write": {}},
]


def test_report_ignores_lines_with_values_of_other_kinds() -> None:
    run = make_run("a")
    before = report.RunRecords(run).summarize()
    for file in ("metrics.jsonl", "samples.jsonl", "sessions.jsonl"):
        path = run / file
        record = json.loads(path.read_text().splitlines()[0])
        lines = [json.dumps(record | wrong) for wrong in WRONG_VALUES if wrong.keys() <= {*record}]
        path.write_text("\n".join([*lines, path.read_text()]))
    assert report.RunRecords(run).summarize() == before
    assert report.write_report(run) == "runs/a/report.md and report.png"


def draw(runs: Sequence[report.RunRecords]) -> Figure:
    """The figure of a picture."""
    drawn: list[Figure] = []
    save = Figure.savefig

    def savefig(figure: Figure, *args: Any, **kwargs: Any) -> None:
        drawn.append(figure)
        save(figure, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", savefig)
        report.draw_curves(runs, Path("picture.png"))
    return drawn[0]


def test_runs_that_were_validated_on_other_data_are_told_apart() -> None:
    paths = [make_run("a", val_data="val.txt"), make_run("b", train_data="books")]
    paths.append(make_run("c", val_data="val.txt"))
    for path, data in zip(paths, ("wiki", "books", "wiki"), strict=True):
        sessions = (path / "sessions.jsonl").read_text().splitlines()
        last = json.loads(sessions[1]) | {"validation_data": data}
        (path / "sessions.jsonl").write_text(f"{sessions[0]}\n{json.dumps(last)}\n")
    runs = [report.RunRecords(path) for path in paths]
    text = report.format_report(runs)
    assert "| validation data | 1: val.txt | 2: held out of books | 1: val.txt |" in text
    panels = [panel for panel in draw(runs).axes if panel.get_title().startswith("loss")]
    n_curves: list[int] = []
    for panel in panels:
        curves = [line for line in panel.lines if np.size(line.get_xdata())]
        n_curves.append(len(curves))
    assert n_curves == [4, 2], "training and validation of a and c, and of b"
    with (paths[1] / "metrics.jsonl").open("a") as file:
        of_a_set = {"group": "validation", "step": 30, "time": 2060.0, "loss_wiki": 1.0}
        file.write("\n" + json.dumps(of_a_set))
    titles = [panel.get_title() for panel in draw([runs[0], report.RunRecords(paths[1])]).axes]
    assert [title for title in titles if "loss_wiki" in title] == ["loss_wiki, validation data 2"]
    assert "validation data" not in report.format_report([runs[0], runs[2]])


def test_report_whose_picture_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("a")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no font")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    line = "runs/a/report.md: cannot be written (RuntimeError: no font)"
    assert report.write_report(run) == line


def test_report_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("a")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install matplotlib" in report.write_report(run)
    assert "report.png" not in (run / "report.md").read_text()


def test_report_that_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run("a")
    (run / "report.md").mkdir()
    assert report.write_report(run) == "runs/a/report.md: cannot be written (Is a directory)"
    assert report.main([str(run)]) == 2
    assert capsys.readouterr().err.startswith("runs/a/report.md: ")


def test_report_command_refuses_another_directory(capsys: pytest.CaptureFixture[str]) -> None:
    make_run("first")
    for given, advice in (("runs", "use runs/*"), ("runs/frist", "did you mean runs/first?")):
        assert report.main([given]) == 2
        error = capsys.readouterr().err.strip()
        assert error.startswith(f"{Path(given).absolute()}: ")
        assert error.endswith(advice)


def test_session_records_the_last_write_before_it() -> None:
    run_dir = RunDir("x")
    run_dir.path.mkdir(parents=True)
    run_dir.add_session({}, {"step": 0})
    # Written now, as files are that are copied to another machine or downloaded from a bucket.
    for name, step, when in (("metrics", 8, 30.0), ("checkpoints", 8, 40.0), ("samples", 5, 90.0)):
        line = json.dumps({"step": step, "time": when})
        (run_dir.path / f"{name}.jsonl").write_text(f"{line}\n")
    run_dir.add_session({}, {"step": 5})
    with run_dir.metrics.open("a") as metrics:  # of a session that only evaluates
        metrics.write('{"step": 8, "time": 50.0}\n')
    run_dir.add_session({}, {"step": 8})
    sessions = [json.loads(line) for line in run_dir.sessions.read_text().splitlines()]
    assert [session["step"] for session in sessions] == [0, 5, 8]
    assert [session["last_write"] for session in sessions] == [None, 40.0, 50.0]


@pytest.mark.parametrize(
    ("cut", "steps"), [('{"time": 2.0, "st', [0, 5]), ('{"time": 2.0, "step": 3}', [0, 3, 5])]
)
def test_session_follows_one_that_a_full_disk_has_cut_short(cut: str, steps: list[int]) -> None:
    run_dir = RunDir("x")
    run_dir.path.mkdir(parents=True)
    run_dir.sessions.write_text(f'{{"time": 1.0, "step": 0}}\n{cut}')
    run_dir.add_session({}, {"step": 5})
    assert [line.step for line in read_records(run_dir.sessions, Line)] == steps


def test_report_command_accepts_all_of_runs_again(capsys: pytest.CaptureFixture[str]) -> None:
    make_run("a")
    make_run("b")
    (Path("runs/refused")).mkdir()
    (Path("runs/refused/lock")).touch()
    for _ in range(2):
        assert report.main([str(path) for path in sorted(Path("runs").iterdir())]) == 0
        assert capsys.readouterr().err.splitlines() == [
            "runs/refused: left out: it has reported nothing",
        ]
    assert Path("runs/report.md").read_text().startswith("# a and b\n")


def test_report_command_leaves_out_the_directory_of_a_search(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_run("a")
    make_run("search/trial-0")
    make_run("search/trial-1", lr=0.01)
    for name in ("lock", "search.journal"):
        (Path("runs/search") / name).touch()
    for given, is_search in (("runs", True), ("runs/search", False)):
        assert report.main([str(path) for path in sorted(Path(given).iterdir())]) == 0
        said = capsys.readouterr().err
        assert ("runs/search/*" in said) == is_search
        assert "reported nothing" not in said
    assert Path("runs/search/report.md").read_text().startswith("# trial-0 and trial-1\n")
    assert report.main(["runs/search"]) == 2
    assert "runs/search/*" in capsys.readouterr().err
