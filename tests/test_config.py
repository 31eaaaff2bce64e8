"""Configuration: what is written down is what runs, and what cannot run is refused in the words of the file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lm import config, parallelize
from lm.data import loader
from lm.errors import ConfigError
from model import PRESETS
from tests.support import TINY, checkpoints, reports, run

Refusal = Callable[..., list[str]]


@pytest.fixture
def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refusal:
    """Loads a YAML text as `exp.yaml`, with overrides; returns the lines of its refusal."""
    monkeypatch.chdir(tmp_path)

    def load(source: str, *overrides: str) -> list[str]:
        Path("exp.yaml").write_text(source)
        with pytest.raises(ConfigError) as refused:
            config.load(Path("exp.yaml"), overrides)
        assert refused.value.exit_code == 2
        return str(refused.value).splitlines()

    return load


def accept(*overrides: str, **hyperparameters: Any) -> dict[str, Any]:
    """What was set by that, defaults left out."""
    return config.read({"hyperparameters": hyperparameters}, overrides, "test").model_dump(exclude_unset=True)


# ---- one key at a time ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("n_layer: 3", "n_layer: no such hyperparameter; did you mean n_layers?"),
        ("xyzzy: 3", "xyzzy: no such hyperparameter; python -m lm.config lists all"),
        ("5: 3", "5: no such hyperparameter; python -m lm.config lists all"),
        ("n_layers: four", 'n_layers: "four" is not a whole number > 0'),
        ("n_layers: 2.5", "n_layers: 2.5 is not a whole number > 0"),
        ("n_layers:", "n_layers: null is not a whole number > 0"),
        ("n_layers: true", "n_layers: true is not a whole number > 0"),
        ("n_layers: 99999999999999999999", "n_layers: 99999999999999999999 is too large, 2^63 or more"),
        ("lr: [1]", "lr: [1] is not a number > 0"),
        ("lr: false", "lr: false is not a number > 0"),
        ("lr: .nan", "lr: NaN is not a number > 0"),
        ("lr: 'inf'", 'lr: "inf" is not a number > 0'),
        ("weight_decay: .inf", "weight_decay: Infinity is not a number >= 0"),
        ("max_epochs: .nan", "max_epochs: NaN is not a number <= 1000000 or null"),
        ("dropout: 1", "dropout: 1 is not a number >= 0 and < 1"),
        ("report_rate: 0", "report_rate: 0 is not a whole number > 0"),
        ("checkpoint_rate: -5", "checkpoint_rate: -5 is not a whole number > 0"),
        ("validation_rate: 0", "validation_rate: 0 is not a whole number > 0 or null"),
        ("norm: batchnorm", 'norm: "batchnorm" is not one of layernorm, rmsnorm'),
        ("amp_dtype: fp8", 'amp_dtype: "fp8" is not one of auto, bfloat16, float16 or null'),
        ("compile: sometimes", 'compile: "sometimes" is not auto or true or false'),
        ("tie_embeddings: 3", "tie_embeddings: 3 is not true or false"),
        ("prompt: 5", "prompt: 5 is not text or null; put it in quotes"),
        ("prompt: ''", 'prompt: "" is not text or null'),
        ("run_name: 2024-01-01", 'run_name: "2024-01-01" is not text or null; put it in quotes'),
        ("train_data: {a: 0, b: 1}", "train_data: a: 0 is not a number > 0"),
        ("train_data: {a: {b: 1}}", 'train_data: a: {"b": 1} is not a number > 0'),
        ('train_data: "a\\0b"', 'train_data: "a\\u0000b" is not text or a mapping or null'),
        ("seed: {}", "seed: {} is not a whole number >= 0 or null"),
        ("max_epochs: 0", "max_epochs: 0 epochs are nothing to do; use -1 to validate and generate only"),
        ("warmup_steps: 2.5", "warmup_steps: 2.5 is neither a whole number nor a fraction below 1"),
        ("collective_timeout: 0.5", "collective_timeout: 0.5 is not a number >= 1 and <= 604800"),
        ("torch_profiler_steps: [1]", "torch_profiler_steps: is missing; a list of 3 whole numbers is needed"),
        ("torch_profiler_steps: 7", "torch_profiler_steps: 7 is not a list of 3 whole numbers"),
        ("torch_profiler_steps: [1, a, 2]", 'torch_profiler_steps: [1, "a", 2] is not a list of 3 whole numbers'),
        ("rope_scaling: 3", "rope_scaling: 3 is not a mapping or null"),
        ("model: [gpt2]", 'model: ["gpt2"] is not text or null; put it in quotes'),
        ("model: 5", "model: 5 is not text or null; put it in quotes"),
        ("model: gpt3", "model: no preset 'gpt3'; there are " + ", ".join(PRESETS)),
        ("n_heads: 7", "n_heads: 7 does not divide d_model 512; nearest: [1, 2, 4, 8]"),
        ("n_kv_heads: 3", "n_kv_heads: 3 does not divide n_heads 8; choose from [1, 2, 4, 8]"),
        ("lr: " + "x" * 99, 'lr: "' + "x" * 56 + "... is not a number > 0"),
    ],
)
def test_a_wrong_value_is_named_with_its_line_and_what_would_work(setting: str, problem: str, refusal: Refusal) -> None:
    assert refusal(f"name: x\nhyperparameters:\n  batch_size: 1\n  {setting}\n") == [f"exp.yaml:4: {problem}"]


def test_keys_inside_a_mapping_are_named_one_by_one(refusal: Refusal) -> None:
    scaling = "{factor: -2, low_freq_factor: a, low_freq: 1, original_max_position_embeddings: 8192}"
    assert refusal(f"hyperparameters:\n  positions: rope\n  rope_scaling: {scaling}\n") == [
        "exp.yaml:3: rope_scaling.factor: -2 is not a number > 0",
        'exp.yaml:3: rope_scaling.low_freq_factor: "a" is not a number > 0',
        "exp.yaml:3: rope_scaling.high_freq_factor: is missing; a number > 0 is needed",
        "exp.yaml:3: rope_scaling.low_freq: no such key; did you mean low_freq_factor?",
    ]


def test_all_problems_are_reported_at_once_in_the_order_of_the_file(refusal: Refusal) -> None:
    source = """\
hyperparameters:
  report_rate: 0
  n_layers: four
  lr: -1
  n_head: 3
  n_kv_heads: 3
  norm: x
"""
    assert refusal(source, "dropout=2", "oops", "lr=0") == [
        'argument "oops": is not key=value',
        "exp.yaml:2: report_rate: 0 is not a whole number > 0",
        'exp.yaml:3: n_layers: "four" is not a whole number > 0',
        "argument lr: 0 is not a number > 0",
        "exp.yaml:5: n_head: no such hyperparameter; did you mean n_heads?",
        'exp.yaml:7: norm: "x" is not one of layernorm, rmsnorm',
        "argument dropout: 2 is not a number >= 0 and < 1",
    ]


def test_one_parts_mistakes_do_not_hide_anothers(refusal: Refusal) -> None:
    assert refusal("hyperparameters:\n  n_heads: 7\n  n_kv_heads: 2\n  warmup_steps: 1.5\n  lr_schedule: cosine\n") == [
        "exp.yaml:2: n_heads: 7 does not divide d_model 512; nearest: [1, 2, 4, 8]",
        "exp.yaml:3: n_kv_heads: 2 does not divide n_heads 7; choose from [1, 7]",
        "exp.yaml:4: warmup_steps: 1.5 is neither a whole number nor a fraction below 1",
    ]


def test_float8_takes_tokens_sixteen_at_a_time(refusal: Refusal) -> None:
    assert refusal("hyperparameters:\n  float8: rowwise\n  max_seq_len: 1000\n") == [
        "exp.yaml:2: float8: batch_size x max_seq_len is 1000, no multiple of 16"
    ]


# ---- numbers and text -------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["1e-4", "1.0e-4", "1E-4", "0.0001", "'1e-4'", "+1e-04"])
def test_a_number_may_be_spelled_in_any_way(spelling: str, tmp_path: Path) -> None:
    (tmp_path / "exp.yaml").write_text(f"hyperparameters: {{lr: {spelling}, n_layers: '4', d_model: 1e3}}")
    hp = config.load(tmp_path / "exp.yaml", [])
    assert (hp.lr, hp.n_layers, hp.d_model) == (1e-4, 4, 1000)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("lr= 5e-4", "lr", 5e-4),
        (" lr =5e-4", "lr", 5e-4),
        ("seed=0x10", "seed", 16),
        ("amp_dtype=null", "amp_dtype", None),
        ("tie_embeddings=yes", "tie_embeddings", True),
        ("torch_profiler_steps=[0, 1, 3]", "torch_profiler_steps", (0, 1, 3)),
        ("prompt=null", "prompt", None),
        ("prompt=yes", "prompt", "yes"),
        ("prompt=a=b: [c # {é", "prompt", "a=b: [c # {é"),
        ("prompt= def main(", "prompt", " def main("),
        ("train_data=*.txt", "train_data", "*.txt"),
        ("train_data={a: 3, b/*.txt: 1}", "train_data", {"a": 3, "b/*.txt": 1}),
        ("run_name=7", "run_name", "7"),
    ],
)
def test_an_override_is_yaml_and_text_is_taken_as_it_stands(override: str, key: str, value: Any) -> None:
    assert accept("lr=1", override, lr=2)[key] == value


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("lr", 'argument "lr": is not key=value'),
        ("=5", 'argument "=5": is not key=value'),
        ("l\nr=5", 'argument "l\\nr=5": is not key=value'),
        ("n_layers=", 'argument n_layers: "" is not a whole number > 0'),
        ("lr=[1", 'argument lr: "[1" is not a number > 0'),
        ("lr=nan", 'argument lr: "nan" is not a number > 0'),
        ("lr=!!python/name:os.system", 'argument lr: "!!python/name:os.system" is not a number > 0'),
        ("hyperparameters.lr=5", "argument hyperparameters.lr: no such hyperparameter; python -m lm.config lists all"),
        ("prompt=\udcff", 'argument prompt: "\udcff" is not text or null'),
    ],
)
def test_a_wrong_override_is_named(override: str, problem: str, refusal: Refusal) -> None:
    assert refusal("hyperparameters: {}", override) == [problem]


# ---- the file ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("", "exp.yaml: hyperparameters: is missing; config.yaml shows what an experiment file holds"),
        ("- 1", "exp.yaml: hyperparameters: is missing; config.yaml shows what an experiment file holds"),
        (
            "hyperparameter: {}",
            "exp.yaml: hyperparameters: is missing; config.yaml shows what an experiment file holds",
        ),
        ("hyperparameters: [lr]", 'exp.yaml: hyperparameters: ["lr"] is not a mapping of names to values'),
        ("hyperparameters:\n  lr: 1\n  'lr': 2", "exp.yaml:3: lr: given twice, first on line 2"),
        ("name: a\nname: b\nhyperparameters: {}", "exp.yaml:2: name: given twice, first on line 1"),
        ("hyperparameters:\n  [lr]: 1", "exp.yaml:2: a key has to be a name"),
        ('hyperparameters:\n  "l\\nr": 1', "exp.yaml:2: a key has to be a name"),
        (
            "hyperparameters:\n\tlr: 1",
            r"exp.yaml:2: found character '\t' that cannot start any token; indent with spaces",
        ),
        ("hyperparameters: *x", "exp.yaml:1: found undefined alias 'x'"),
        ("hyperparameters: {}\n---\n{}", "exp.yaml:2: found another document"),
        ("hyperparameters:\n  lr: \x01", "exp.yaml:2: the character U+0001 is not allowed in YAML"),
        ("hyperparameters:\n  run_name: 2024-99-99", "exp.yaml:2: '2024-99-99' is not a valid timestamp"),
        ("hyperparameters:\n  lr: !!int x", "exp.yaml:2: 'x' is not a valid int"),
        ("hyperparameters: " + "[" * 2000, "exp.yaml: is nested too deeply"),
        ("hyperparameters:\n  lr: &a [*a]", "exp.yaml:2: lr: this is not a number > 0"),
    ],
)
def test_a_file_that_is_no_experiment_is_refused_with_the_line(source: str, problem: str, refusal: Refusal) -> None:
    assert refusal(source) == [problem]


def test_yaml_that_would_run_code_is_refused_and_runs_nothing(refusal: Refusal) -> None:
    assert refusal("hyperparameters:\n  prompt: !!python/object/apply:os.mkdir [pwned]\n") == [
        "exp.yaml:2: the tag !!python/object/apply:os.mkdir is not allowed; plain values are"
    ]
    assert not Path("pwned").exists()


def test_merged_and_repeated_yaml_is_named_where_it_was_written(refusal: Refusal) -> None:
    shared = "shared: &s\n  lr: -1\n  n_head: 2\n"
    problems = ["lr: -1 is not a number > 0", "n_head: no such hyperparameter; did you mean n_heads?"]
    expected = [f"exp.yaml:{line}: {problem}" for line, problem in enumerate(problems, start=2)]
    assert refusal(shared + "hyperparameters: *s\n") == expected
    assert refusal(shared + "hyperparameters:\n  <<: *s\n") == expected
    assert refusal(shared + "hyperparameters:\n  <<: *s\n  lr: 1\n") == expected[1:]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin1.yaml").write_bytes(b"name: caf\xe9")
    for path, problem in (
        (tmp_path / "none.yaml", "No such file or directory; --config names an experiment file such as config.yaml"),
        (tmp_path, "Is a directory; --config names an experiment file such as config.yaml"),
        (tmp_path / "latin1.yaml", "byte 9 is not UTF-8"),
    ):
        with pytest.raises(ConfigError) as refused:
            config.load(path, [])
        assert str(refused.value) == f"{path}: {problem}"


def test_nothing_below_hyperparameters_is_all_defaults() -> None:
    assert config.read({"hyperparameters": None}, [], "test") == config.Hyperparameters.model_validate({})


# ---- what Determined writes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("searcher", "hyperparameters", "steps"),
    [
        ({"max_length": 50}, {}, 50),
        ({"max_length": {"batches": 50}}, {}, 50),
        ({"max_length": 50}, {"max_steps": None}, 50),
        ({"max_length": 50}, {"max_steps": 7}, 7),
        ({"max_length": 50}, {"max_epochs": 2}, None),
        ({"name": "single"}, {}, None),
        (None, {}, None),
    ],
)
def test_the_searchers_length_is_that_of_the_run_unless_another_is_given(
    searcher: Any, hyperparameters: dict[str, Any], steps: int | None
) -> None:
    assert config.read({"searcher": searcher, "hyperparameters": hyperparameters}, [], "test").max_steps == steps


@pytest.mark.parametrize(
    ("length", "shown"), [("abc", '"abc"'), ("0", "0"), ("{epochs: 50}", '{"epochs": 50}'), ("{}", "{}")]
)
def test_a_searchers_length_that_is_no_number_of_steps_is_refused(length: str, shown: str, refusal: Refusal) -> None:
    assert refusal(f"searcher:\n  max_length: {length}\nhyperparameters: {{}}\n") == [
        f"exp.yaml:2: searcher.max_length: {shown} is not a whole number > 0 or null"
    ]


def test_a_constant_is_its_value_and_a_range_needs_a_cluster(refusal: Refusal) -> None:
    assert accept(lr={"type": "const", "val": "1e-3"}) == {"lr": 1e-3}
    searched = "hyperparameters:\n  lr: {type: log, base: 10, minval: -4, maxval: -2}\n"
    assert refusal(searched) == ["exp.yaml:2: lr: a range to search needs a cluster; off it, give one value: lr=VALUE"]
    assert accept("lr=0.1", **yaml.safe_load(searched)["hyperparameters"]) == {"lr": 0.1}


# ---- whatever is written ----------------------------------------------------------------------------------

NUMBERS = st.integers(-1_000_000, 1_000_000) | st.floats() | st.just(2**64)
SCALARS = (
    st.none() | st.booleans() | NUMBERS | st.text() | st.sampled_from([*PRESETS, "rope", "llama3", "auto", "type"])
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("factor"), inner), max_leaves=5
)
KEYS = st.sampled_from([*config.Hyperparameters.model_fields]) | st.text()


def problems(load: Callable[[], Any]) -> tuple[str, ...]:
    try:
        load()
    except ConfigError as error:
        return error.problems
    return ()


@settings(deadline=None)
@given(st.dictionaries(KEYS, VALUES), st.lists(st.text()))
def test_no_hyperparameters_give_anything_but_a_refusal(hyperparameters: dict[str, Any], overrides: list[str]) -> None:
    problems(lambda: config.read({"hyperparameters": hyperparameters}, overrides, "test"))


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["hyperparameters", "searcher"]), VALUES | st.dictionaries(KEYS, VALUES)))
def test_no_experiment_gives_anything_but_a_refusal(contents: dict[str, Any]) -> None:
    problems(lambda: config.read(contents, [], "test"))


@settings(deadline=None)
@given(st.lists(st.builds("{}={}".format, KEYS, SCALARS.map(str) | VALUES.map(json.dumps))))
def test_no_overrides_give_anything_but_a_line_per_problem(overrides: list[str]) -> None:
    lines = problems(lambda: config.read({"hyperparameters": {}}, overrides, "test"))
    assert not any("\n" in line for line in lines)


PIECES = [
    "\n",
    "  ",
    "lr",
    ": ",
    "- ",
    "[",
    "]",
    "{",
    "}",
    "&a ",
    "*a",
    "<<",
    "!!int ",
    "!!map ",
    "'",
    "|",
    "1e-4",
    "? ",
]


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3)).map("".join))
def test_no_file_gives_anything_but_a_line_per_problem(tmp_path_factory: pytest.TempPathFactory, source: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(f"hyperparameters:\n  {source}", encoding="utf-8", errors="replace")
    assert not any("\n" in line for line in problems(lambda: config.load(path, [])))


# ---- explaining -------------------------------------------------------------------------------------------


def test_every_hyperparameter_says_what_it_means() -> None:
    rows = [line.split(" | ") for line in config.table().splitlines()[2:] if not line.startswith("| **")]
    described = {key.strip("| `"): meaning for key, _, meaning, _ in rows}
    assert described.keys() == config.Hyperparameters.model_fields.keys()
    assert all(meaning not in ("", "None") for meaning in described.values())


def test_the_hyperparameters_are_those_of_the_parts_each_in_one() -> None:
    keys = [key for part in config.PARTS.values() for key in part.model_fields]
    assert len(keys) == len(set(keys))
    assert set(keys) == config.Hyperparameters.model_fields.keys()


# ---- whole runs -------------------------------------------------------------------------------------------


def test_every_rank_ends_with_2_and_one_of_them_says_why(tmp_path: Path) -> None:
    done = run(tmp_path, "n_heads=5", ranks=2, config=TINY | {"lr": "fast"})
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "argument n_heads: 5 does not divide d_model 32; nearest: [1, 2, 4, 8]",
        'test.yaml:1: lr: "fast" is not a number > 0',
    ]


@pytest.mark.parametrize(
    ("settings", "ranks", "problem"),
    [
        (
            {"batch_size": 2, "total_batch_size": 6},
            2,
            "total_batch_size: 6 is no multiple of batch_size 2 x 2 ranks; use 4 or 8",
        ),
        (
            {"batch_size": 4, "total_batch_size": 3},
            1,
            "total_batch_size: 3 is no multiple of batch_size 4 x 1 ranks; use 4",
        ),
        (
            {"batch_size": 2**62},
            4,
            "batch_size: 18446744073709551616 sequences a step are too many; 16777216 are the most",
        ),
    ],
)
def test_a_total_batch_that_cannot_be_divided_is_refused_with_the_nearest_that_can(
    settings: dict[str, Any], ranks: int, problem: str
) -> None:
    hp = config.read({"hyperparameters": settings}, [], "test")
    with pytest.raises(ConfigError) as refused:
        loader.derive_global_batch_size(hp, ranks)
    assert str(refused.value) == problem


def test_a_shard_group_that_does_not_divide_the_ranks_is_refused_with_those_that_do() -> None:
    hp = config.read({"hyperparameters": {"sharding": "hybrid-full-shard", "shard_group_size": 4}}, [], "test")
    with pytest.raises(ConfigError) as refused:
        parallelize.mesh_shape(hp, 6, 6)
    assert str(refused.value) == "shard_group_size: groups of 4 do not divide 6 ranks; choose from [1, 2, 3, 6]"


RUN = TINY | {"dataset": "text", "train_data": "text.txt", "vocab_size": 264, "max_steps": 2}


def digests(folder: Path) -> dict[Path, str]:
    """Of every file of a run, the lock excepted."""
    files = (path for path in (folder / "runs").rglob("*") if path.is_file() and path.name != "lock")
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_steps")
    (folder / "text.txt").write_text("All work and no play makes Jack a dull boy.\n" * 20)
    done = run(folder, config=RUN)
    assert done.returncode == 0, done.stderr
    assert sorted(checkpoints(folder)) == [2]
    return folder


def test_what_would_make_it_another_run_is_refused_with_the_changes_and_nothing_is_touched(two_steps: Path) -> None:
    before = digests(two_steps)
    done = run(two_steps, "max_steps=4", "d_model=64", "seed=7", "total_batch_size=2", "lr=1", config=RUN)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-4:] == [
        "d_model: 32 in the checkpoint, now 64",
        "total_batch_size: 1 in the checkpoint, now 2",
        "seed: 42 in the checkpoint, now 7",
        "this would be another run: undo the change (other ranks or batch_size: total_batch_size=1), or start it with"
        " another run_name or resume=fresh",
    ]
    assert digests(two_steps) == before


def test_changed_data_are_refused_and_nothing_is_touched(two_steps: Path) -> None:
    before = digests(two_steps)
    (two_steps / "other.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 20)
    done = run(two_steps, "max_steps=4", "train_data=other.txt", config=RUN)
    assert done.returncode == 2
    change, last = done.stderr.splitlines()[-2:]
    assert re.fullmatch(r'train_data: "837 tokens, sha256 \w+" in the checkpoint, now "856 tokens, sha256 \w+"', change)
    assert last == ("this would be another run: undo the change, or start it with another run_name or resume=fresh")
    assert digests(two_steps) == before


def test_more_steps_and_other_reports_are_the_same_run(two_steps: Path) -> None:
    done = run(two_steps, "max_steps=4", "report_rate=1", "lr=1e-3", config=RUN)
    assert done.returncode == 0, done.stderr
    assert "changed: lr: 0.0001 in the checkpoint, now 0.001" in done.stdout
    assert "report_rate" not in done.stdout
    assert sorted(reports(two_steps)) == [2, 3, 4]


def test_a_run_that_cannot_be_written_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("in the way")
    done = run(tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "runs/test: cannot be written and locked (File exists);"
        f" give this user write access to {tmp_path}/runs, or start from another folder"
    ]
