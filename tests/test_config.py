"""Configuration: the file's values are what runs; invalid values are refused, all at once, by key and line."""

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
from lm.errors import ConfigError
from model import PRESETS, ModelConfig
from tests.conftest import Message
from tests.support import TINY, byte_level_tokenizer, checkpoints, reports, run

Refusal = Callable[..., ConfigError]


@pytest.fixture
def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refusal:
    """Loads a YAML text as `exp.yaml`, with overrides; returns the error."""
    monkeypatch.chdir(tmp_path)

    def load(source: str, *overrides: str) -> ConfigError:
        Path("exp.yaml").write_text(source)
        with pytest.raises(ConfigError) as refused:
            config.load(Path("exp.yaml"), overrides)
        assert refused.value.exit_code == 2
        return refused.value

    return load


def accept(*overrides: str, **hyperparameters: Any) -> dict[str, Any]:
    """The hyperparameters that are set, without defaults."""
    return config.read({"hyperparameters": hyperparameters}, overrides, "test").model_dump(exclude_unset=True)


# ---- one key at a time ------------------------------------------------------------------------------------


INVALID: dict[str, list[Any]] = {
    "n_layers": ["four", 2.5, "", "true", 1_000_000],
    "lr": ["[1]", "false", ".nan", "'inf'", 0, "x" * 99],
    "max_epochs": [".nan", 0],
    "torch_profiler_steps": ["[1]", 7, "[1, a, 2]", "[1, 1, 0]", "[-1, 1, 2]"],
    "train_data": ["{a: 0, b: 1}", "{a: {b: 1}}", '"a\\0b"'],
    "model": ["[gpt2]", 5, "gpt3"],
    "prompt": [5, "''"],
    "warmup_steps": [2.5, -1],
}
INVALID |= {key: [0] for key in ("report_rate", "validation_rate", "grad_clip", "skip_nonfinite")}
INVALID |= {"weight_decay": [".inf"], "dropout": [1], "checkpoint_rate": [-5], "norm": ["batchnorm"], "beta2": [1]}
INVALID |= {"amp_dtype": ["fp8"], "compile": ["sometimes"], "tie_embeddings": [3], "run_name": ["2024-01-01"]}
INVALID |= {key: [2**62] for key in ("d_model", "max_seq_len", "vocab_size")}
INVALID |= {
    "seed": ["{}", 99999999999999999999],
    "collective_timeout": [0.5],
    "rope_scaling": [3],
    "min_lr_ratio": [1.1],
}


@pytest.mark.parametrize("setting", [f"{key}: {value}".rstrip() for key, values in INVALID.items() for value in values])
def test_an_invalid_value_is_named_with_its_line_and_what_is_accepted(
    setting: str, refusal: Refusal, message: Message
) -> None:
    error = refusal(f"name: x\nhyperparameters:\n  batch_size: 1\n  {setting}\n")
    key = setting.partition(":")[0]
    assert str(error).startswith(f"exp.yaml:4: {key}")
    assert error.keys == {key}
    message(error)


@pytest.mark.parametrize("setting", ["n_layer: 3", "xyzzy: 3", "5: 3"])
def test_an_unknown_key_is_refused_with_the_nearest(setting: str, refusal: Refusal, message: Message) -> None:
    error = refusal(f"hyperparameters:\n  {setting}\n")
    assert error.keys == set()
    message(error)


@pytest.mark.parametrize(
    ("source", "keys"),
    [
        ("n_heads: 7", {"n_heads", "d_model"}),
        ("n_kv_heads: 3", {"n_kv_heads", "n_heads"}),
        ("rope_scaling: {factor: 1, low_freq_factor: 4, high_freq_factor: 1, original_max_position_embeddings: 8}", 0),
        ("{float8: rowwise, max_seq_len: 1000}", {"float8", "batch_size", "max_seq_len"}),
        ("optim_dtype: bfloat16", {"optim_dtype", "beta2"}),
    ],
)
def test_a_relation_between_keys_carries_all_of_them(
    source: str, keys: set[str] | int, refusal: Refusal, message: Message
) -> None:
    error = refusal(f"hyperparameters:\n  {source}\n")
    assert str(error).startswith("exp.yaml:2: ")
    assert error.keys == (keys or {"rope_scaling"})
    message(error)


def test_keys_inside_a_mapping_are_named_one_by_one(refusal: Refusal, message: Message) -> None:
    scaling = "{factor: -2, low_freq_factor: a, low_freq: 1, original_max_position_embeddings: 8192}"
    error = refusal(f"hyperparameters:\n  positions: rope\n  rope_scaling: {scaling}\n")
    assert len(error.problems) == 4
    assert all(problem.startswith("exp.yaml:3: rope_scaling.") for problem in error.problems)
    message(error)


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
    error = refusal(source, "dropout=2", "oops", "lr=0")
    starts = ['argument "oops"', "exp.yaml:2: report_rate", "exp.yaml:3: n_layers", "argument lr", "exp.yaml:5: n_head"]
    starts += ["exp.yaml:7: norm", "argument dropout"]
    assert [line[: len(start)] for line, start in zip(error.problems, starts, strict=True)] == starts
    assert list(map(set, error.causes)) == [set(), {"report_rate"}, {"n_layers"}, {"lr"}, set(), {"norm"}, {"dropout"}]


def test_an_error_in_one_part_does_not_hide_those_in_others(refusal: Refusal) -> None:
    error = refusal("hyperparameters:\n  n_heads: 7\n  n_kv_heads: 2\n  warmup_steps: 1.5\n  lr_schedule: cosine\n")
    assert [set(keys) for keys in error.causes] == [{"n_heads", "d_model"}, {"n_kv_heads", "n_heads"}, {"warmup_steps"}]


# ---- numbers and text -------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["1e-4", "1.0e-4", "1E-4", "0.0001", "'1e-4'", "+1e-04"])
def test_a_number_may_be_written_in_any_form(spelling: str, tmp_path: Path) -> None:
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
def test_an_override_is_yaml_or_the_literal_text(override: str, key: str, value: Any) -> None:
    assert accept("lr=1", override, lr=2)[key] == value


@pytest.mark.parametrize(
    "override",
    [
        *("lr", "=5", "l\nr=5", "n_layers=", "lr=[1", "lr=nan", "lr=!!python/name:os.system", "model.lr=5"),
        *("prompt=\udcff", "exp.yaml"),
    ],
)
def test_an_invalid_override_is_named(override: str, refusal: Refusal, message: Message) -> None:
    error = refusal("hyperparameters: {}", override)
    assert len(str(error).splitlines()) == 1
    message(str(error).encode(errors="backslashreplace").decode())


# ---- the file ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("", None),
        ("- 1", None),
        ("hyperparameter: {}", None),
        ("hyperparameters: [lr]", None),
        ("hyperparameters:\n  lr: 1\n  'lr': 2", 3),
        ("name: a\nname: b\nhyperparameters: {}", 2),
        ("hyperparameters:\n  [lr]: 1", 2),
        ('hyperparameters:\n  "l\\nr": 1', 2),
        ("hyperparameters:\n\tlr: 1", 2),
        ("hyperparameters: *x", 1),
        ("hyperparameters: {}\n---\n{}", 2),
        ("hyperparameters:\n  lr: \x01", 2),
        ("hyperparameters:\n  run_name: 2024-99-99", 2),
        ("hyperparameters:\n  lr: !!int x", 2),
        ("hyperparameters: " + "[" * 2000, None),
        ("hyperparameters:\n  lr: &a [*a]", 2),
        ("hyperparameters:\n  prompt: !!python/object/apply:os.mkdir [pwned]\n", 2),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_an_invalid_file_is_refused_with_the_line_and_runs_no_code(
    source: str, line: int | None, refusal: Refusal, message: Message
) -> None:
    error = refusal(source)
    assert len(error.problems) == 1
    assert str(error).startswith(f"exp.yaml:{line}: " if line else "exp.yaml: ")
    assert not Path("pwned").exists()
    message(error)


def test_merged_and_repeated_yaml_is_named_with_its_own_line(refusal: Refusal) -> None:
    def lines(source: str) -> list[str]:
        shared = "shared: &s\n  lr: -1\n  n_head: 2\n"
        return [re.sub(r"(\w+:\d+: \w+):.*", r"\1", problem) for problem in refusal(shared + source).problems]

    expected = ["exp.yaml:2: lr", "exp.yaml:3: n_head"]
    assert lines("hyperparameters: *s\n") == expected
    assert lines("hyperparameters:\n  <<: *s\n") == expected
    assert lines("hyperparameters:\n  <<: *s\n  lr: 1\n") == expected[1:]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, message: Message) -> None:
    (tmp_path / "latin1.yaml").write_bytes(b"name: caf\xe9")
    for path in (tmp_path / "none.yaml", tmp_path, tmp_path / "latin1.yaml"):
        with pytest.raises(ConfigError) as refused:
            config.load(path, [])
        assert str(refused.value).startswith(f"{path}: ")
        message(refused.value)


def test_an_empty_hyperparameters_section_means_all_defaults() -> None:
    assert config.read({"hyperparameters": None}, [], "test") == config.Hyperparameters.model_validate({})


# ---- Determined's forms -------------------------------------------------------------------------------


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
def test_max_length_is_the_length_of_the_run_unless_steps_or_epochs_are_set(
    searcher: Any, hyperparameters: dict[str, Any], steps: int | None
) -> None:
    assert config.read({"searcher": searcher, "hyperparameters": hyperparameters}, [], "test").max_steps == steps


@pytest.mark.parametrize("length", ["abc", "0", "{epochs: 50}", "{}"])
def test_an_invalid_max_length_is_refused(length: str, refusal: Refusal, message: Message) -> None:
    error = refusal(f"searcher:\n  max_length: {length}\nhyperparameters: {{}}\n")
    assert str(error).startswith("exp.yaml:2: searcher.max_length: ")
    message(error)


def test_a_constant_is_its_value_and_a_range_needs_a_cluster(refusal: Refusal, message: Message) -> None:
    assert accept(lr={"type": "const", "val": "1e-3"}) == {"lr": 1e-3}
    searched = "hyperparameters:\n  lr: {type: log, base: 10, minval: -4, maxval: -2}\n"
    error = refusal(searched)
    assert error.keys == {"lr"}
    message(error)
    assert accept("lr=0.1", **yaml.safe_load(searched)["hyperparameters"]) == {"lr": 0.1}


# ---- any input ----------------------------------------------------------------------------------

NUMBERS = st.integers(-1_000_000, 1_000_000) | st.floats() | st.just(2**64)
SCALARS = (
    st.none() | st.booleans() | NUMBERS | st.text() | st.sampled_from([*PRESETS, "rope", "llama3", "auto", "type"])
)
NAMES = st.text().filter(str.isprintable)  # YAML with other keys is refused
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(NAMES | st.just("factor"), inner), max_leaves=5
)
KEYS = st.sampled_from([*config.Hyperparameters.model_fields]) | NAMES


def problems(load: Callable[[], Any]) -> tuple[str, ...]:
    try:
        load()
    except ConfigError as error:
        return error.problems
    return ()


SECTIONS = st.sampled_from(["hyperparameters", "searcher"])


@settings(deadline=None)
@given(
    st.dictionaries(SECTIONS, VALUES | st.dictionaries(KEYS, VALUES)),
    st.lists(st.text() | st.builds("{}={}".format, KEYS, SCALARS.map(str) | VALUES.map(json.dumps))),
)
def test_any_experiment_is_refused_with_one_line_per_problem(contents: dict[str, Any], overrides: list[str]) -> None:
    assert not any("\n" in line for line in problems(lambda: config.read(contents, overrides, "test")))


PIECES = [*"[]{}'|", "\n", "  ", "lr", ": ", "- ", "&a ", "*a", "<<", "!!int ", "!!map ", "1e-4", "? "]


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3)).map("".join))
def test_any_file_is_refused_with_one_line_per_problem(tmp_path_factory: pytest.TempPathFactory, source: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(f"hyperparameters:\n  {source}", encoding="utf-8", errors="replace")
    assert not any("\n" in line for line in problems(lambda: config.load(path, [])))


# ---- the keys ---------------------------------------------------------------------------------------------


def test_every_hyperparameter_belongs_to_one_part_and_has_a_description() -> None:
    fields = [(key, field) for part in config.PARTS for key, field in part.model_fields.items()]
    assert sorted(key for key, _ in fields) == sorted(config.Hyperparameters.model_fields)
    assert all(field.description for _, field in fields)


# ---- complete runs ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_rank_exits_with_2_and_one_prints_the_problems(tmp_path: Path, message: Message) -> None:
    done = run(tmp_path, "n_heads=5", ranks=2, config=TINY | {"lr": "fast"}, code=2)
    assert len(done.stderr.splitlines()) == 2
    message(done.stderr)


def test_a_shard_group_size_that_does_not_divide_the_ranks_is_refused_with_those_that_do(message: Message) -> None:
    hp = config.read({"hyperparameters": {"sharding": "hybrid-full-shard", "shard_group_size": 4}}, [], "test")
    with pytest.raises(ConfigError, match="shard_group_size") as refused:
        parallelize.mesh_dims(hp, 6, 6)
    message(refused.value)


RUN = TINY | {"dataset": "text", "train_data": "text.txt", "vocab_size": 264, "max_steps": 2}


def digests(folder: Path) -> dict[Path, str]:
    """SHA-256 of every file of a run except the lock."""
    files = (path for path in (folder / "runs").rglob("*") if path.is_file() and path.name != "lock")
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_steps")
    (folder / "text.txt").write_text("All work and no play makes Jack a dull boy.\n" * 20)
    (folder / "other.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 20)
    run(folder, config=RUN, code=0)
    assert sorted(checkpoints(folder)) == [2]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "changes"),
    [
        (
            ["d_model=64", "seed=7", "total_batch_size=2", "lr=1"],
            {"d_model": ("32", "64"), "seed": ("42", "7"), "total_batch_size": ("1", "2")},
        ),
        (["train_data=other.txt"], {"train_data": ("837 tokens", "856 tokens")}),
    ],
    ids=["hyperparameters", "data"],
)
def test_changes_that_would_make_it_a_different_run_are_refused_with_a_diff_and_no_file_changes(
    two_steps: Path, overrides: list[str], changes: dict[str, tuple[str, str]]
) -> None:
    before = digests(two_steps)
    done = run(two_steps, "max_steps=4", *overrides, config=RUN, code=2)
    for key, (old, new) in changes.items():
        assert re.search(rf"{key}: .*\b{old}\b.*\b{new}\b", done.stderr), done.stderr
    assert "resume=fresh" in done.stderr.splitlines()[-1]
    assert "lr:" not in done.stderr
    assert digests(two_steps) == before


@pytest.mark.slow
def test_a_longer_run_with_other_reports_resumes(two_steps: Path) -> None:
    done = run(two_steps, "max_steps=4", "report_rate=1", "lr=1e-3", config=RUN, code=0)
    assert re.search(r"lr: .*0\.0001.*0\.001", done.stdout)
    assert "report_rate" not in done.stdout
    assert "learning rate: 1.00e-04 in step 2, now 1.00e-03 in step 3" in done.stdout
    assert sorted(reports(two_steps)) == [2, 3, 4]


@pytest.mark.slow
def test_a_run_without_write_access_is_refused_before_the_model_is_built(tmp_path: Path, message: Message) -> None:
    (tmp_path / "runs").write_text("in the way")
    done = run(tmp_path, code=2)
    assert "building" not in done.stdout
    message(done.stderr)


def test_the_vocabulary_is_the_tokenizers_unless_it_is_set(tmp_path: Path) -> None:
    def size(*overrides: str, **keys: Any) -> int:
        return accept(*overrides, **keys).get("vocab_size", 32000)

    (tmp_path / "tokenizer.json").write_bytes(byte_level_tokenizer(300))
    index = {"format": 1, "tokenizer": None, "tokens": 1, "documents": 1, "dtype": "uint16", "sources": []}
    for name, ids in (("a", 900), ("b", 1025)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.bin").write_bytes(bytes(2))
        (tmp_path / name / "train.json").write_text(
            json.dumps(index | {"vocab_size": ids, "crc32c": 0, "ends_crc32c": 0})
        )
    assert size() == size("vocab_size=null") == ModelConfig.model_validate({}).vocab_size == 32000
    assert size(dataset="text") == size(dataset="jsonl") == size("vocab_size=null", dataset="text", vocab_size=9) == 320
    assert size(dataset="text", tokenizer=str(tmp_path)) == 320
    assert size(dataset="text", vocab_size=257) == 257
    assert accept(dataset="text", model="gpt2") == {"dataset": "text", "model": "gpt2"} | PRESETS["gpt2"]
    assert size(dataset="text", model="mistral") == 320  # an architecture, without sizes
    assert size(dataset="tokens", train_data=str(tmp_path / "a")) == 960
    assert size(dataset="tokens", train_data={str(tmp_path / "a"): 1, str(tmp_path / "b"): 1}) == 1088
    with pytest.raises(ConfigError) as refused:
        accept(dataset="tokens", train_data=str(tmp_path))
    assert refused.value.keys == {"train_data"}


def test_hyperparameters_may_be_given_as_flags() -> None:
    arguments = ["--config", "a.yaml", "--lr=1e-3", "--max-steps", "5", "seed=1", "--prompt", "a b", "--", "--help"]
    expected = ["--config", "a.yaml", "lr=1e-3", "max_steps=5", "seed=1", "prompt=a b", "--", "--help"]
    assert config.as_overrides(arguments) == expected


def test_a_preset_on_the_command_line_replaces_the_shape_in_the_file(
    capsys: pytest.CaptureFixture[str], message: Message
) -> None:
    def read(*overrides: str) -> config.Hyperparameters:
        shape = {"d_model": 64, "n_kv_heads": 2, "dropout": 0.1, "lr": 1e-3}
        return config.read({"hyperparameters": shape}, overrides, "exp.yaml")

    small = read("model=gpt2", "n_layers=2")
    message(capsys.readouterr().out, mask=r" *\d+\.\d s")
    assert (small.d_model, small.n_kv_heads, small.n_layers, small.dropout, small.lr) == (768, None, 2, 0.1, 1e-3)
    assert read("model=mistral").d_model == 64  # a preset without sizes
    assert read("model=gpt2", "d_model=96").d_model == 96
    capsys.readouterr()
    read("n_layers=2")
    assert capsys.readouterr().out == ""


def test_no_adapters_on_the_command_line_override_those_in_the_file(
    capsys: pytest.CaptureFixture[str], message: Message
) -> None:
    file = {"hyperparameters": {"init_from": "weights", "lora_rank": 8, "lora_alpha": 32, "lora_dropout": 0.1}}
    hp = config.read(file, ["lora_rank=null"], "exp.yaml")
    message(capsys.readouterr().out, mask=r" *\d+\.\d s")
    assert (hp.lora_rank, hp.lora_alpha, hp.lora_dropout) == (None, 16.0, 0.0)
    with pytest.raises(ConfigError) as refused:
        config.read(file, ["lora_rank=null", "lora_alpha=8"], "exp.yaml")
    assert refused.value.keys == {"lora_alpha", "lora_rank"}


def test_the_command_lists_and_describes_keys_and_presets_in_lines_that_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], message: Message
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for arguments in ([], ["--presets"], ["lr", "rope_scaling"]):
        assert config.main(arguments) == 0
        output = capsys.readouterr().out
        assert max(map(len, output.splitlines())) <= 100
        assert all(key in output for key in (PRESETS if "--presets" in arguments else arguments or TINY))
    message(output)
    assert config.main(["learning_rate"]) == 2
    message(capsys.readouterr().err)


def test_names_of_other_trainers_are_answered(message: Message) -> None:
    with pytest.raises(ConfigError) as refused:
        config.read({"hyperparameters": {}}, ["learning_rate=1", "per_device_train_batch_size=2"], "test")
    message(refused.value)
