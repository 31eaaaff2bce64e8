"""The file's values are what runs; invalid values are refused, all at once, by key and line."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lm import command_line, strict_yaml
from lm.config import __main__ as lm_config
from lm.config.combinations import check_combinations
from lm.config.draft import Draft
from lm.config.elsewhere import KEYS_ELSEWHERE
from lm.config.hyperparameters import FIELDS, PARTS, Hyperparameters
from lm.config.reading import load_hyperparameters, read_hyperparameters
from lm.config.wording import nearest_key
from lm.data.run_data import open_data
from lm.errors import ConfigError
from lm.fields import CHANGES, aliases_of, need_of
from lm.presets import PRESETS
from lm.search.experiment import Searcher
from lm.storage.folder import MANIFEST
from tests.support.hyperparameters import OF_TRANSFORMERS, TINY, named_keys
from tests.support.runs import checkpoints_by_step, read_reports, run_fsdp
from tests.support.tokenizer_files import byte_level_tokenizer

Refusal = Callable[..., ConfigError]


@pytest.fixture
def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refusal:
    """Loads a YAML text as `exp.yaml`, with overrides; returns the error."""
    monkeypatch.chdir(tmp_path)

    def load(source: str, *overrides: str) -> ConfigError:
        Path("exp.yaml").write_text(source)
        with pytest.raises(ConfigError) as refused:
            load_hyperparameters(Path("exp.yaml"), overrides)
        assert refused.value.exit_code == 2
        return refused.value

    return load


def accept(*overrides: str, **hyperparameters: Any) -> dict[str, Any]:
    """The hyperparameters that are set, without defaults."""
    hp = read_hyperparameters({"hyperparameters": hyperparameters}, overrides, "test")
    values: dict[str, Any] = {}
    for part in PARTS:
        values |= getattr(hp, part).model_dump(exclude_unset=True)
    return values


# ---- one key at a time


INVALID: list[tuple[str, list[Any], str]] = [
    ("n_layers", ["four", 2.5, "", "true", 1_000_000], "an integer > 0 and <= 4096"),
    ("lr", ["[1]", "false", ".nan", "'inf'", 0, "x" * 99], "a number > 0"),
    ("max_epochs", [".nan"], "a number <= 1000000 or null"),
    ("max_epochs", [0], "use -1"),
    ("torch_profiler_steps", ["[1]", 7, "[1, a, 2]"], "a list of 3 integers"),
    ("torch_profiler_steps", ["[1, 1, 0]", "[-1, 1, 2]"], "at least 1"),
    ("train_data", ["[a, b]"], "write their directory or a glob"),
    ("train_data", ["{a: 0, b: 1}", "{a: {b: 1}}"], "a number > 0"),
    ("train_data", ['"a\\0b"'], "a string or a mapping or null"),
    ("model", ["[gpt2]", 5], "a string or null"),
    ("model", ["gpt3"], "the nearest are gpt2"),
    ("prompt", [5], "put it in quotes"),
    ("prompt", ["''"], "a string or null"),
    ("warmup_steps", [2.5], "an integer nor a fraction below 1"),
    ("warmup_steps", [-1], "a number >= 0"),
    ("report_rate", [0], "an integer > 0"),
    ("validation_rate", [0], "an integer > 0 or null"),
    ("grad_clip", [0], "a number > 0 or null"),
    ("skip_nonfinite", [0], "an integer > 0"),
    ("skip_spikes", [0, "true"], "a number > 0 or null"),
    (
        "skip_steps",
        [3, "[3, 4]", "[[3]]", "[[0, 4]]", "[['3', 4]]", "[[true, 4]]"],
        "of 2 values, each an integer >= 1",
    ),
    ("skip_steps", ["[[4, 3]]"], "ends before it starts"),
    ("skip_steps", ["[[5, 6], [1, 2]]", "[[1, 5], [5, 6]]"], "sort the ranges, and merge"),
    ("weight_decay", [".inf"], "a number >= 0"),
    ("dropout", [1], "a number >= 0 and < 1"),
    ("checkpoint_rate", [-5], "an integer > 0"),
    ("norm", ["batchnorm"], "one of layernorm, rmsnorm"),
    ("beta2", [1], "a number >= 0 and < 1"),
    ("amp_dtype", ["fp8"], "one of auto, bfloat16, float16 or null"),
    ("compile", ["sometimes"], "auto or true or false"),
    ("tie_embeddings", [3], "true or false"),
    ("run_name", ["2024-01-01"], "put it in quotes"),
    ("d_model", [2**62], "<= 1048576"),
    ("max_seq_len", [2**62], "<= 16777216"),
    ("vocab_size", [2**62], "an integer > 1 and <= 16777216 or null"),
    ("seed", ["{}"], "an integer >= 0 or null"),
    ("seed", [99999999999999999999], "2^63"),
    ("collective_timeout", [0.5], "a number >= 1 and <= 604800"),
    ("rope_scaling", [3], "a mapping or null"),
    ("min_lr_ratio", [1.1], "a number >= 0 and <= 1"),
]


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [(key, value, accepted) for key, values, accepted in INVALID for value in values],
)
def test_invalid_value_error_has_line_and_what_is_accepted(
    key: str, value: Any, accepted: str, refusal: Refusal
) -> None:
    error = refusal(f"name: x\nhyperparameters:\n  batch_size: 1\n  {key}: {value}\n")
    assert str(error).startswith(f"exp.yaml:4: {key}")
    assert accepted in str(error)


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("n_layer", "did you mean n_layers?"),
        ("lerning_rate", "did you mean lr?"),
        ("max_setps", "did you mean max_steps?"),
        # By their letters these are other keys, or none.
        ("sharding_strategy", "did you mean sharding?"),
        ("resume_from_checkpoint", "did you mean resume?"),
        ("max_position_embeddings", "did you mean max_seq_len?"),
        ("assistant_only_loss", "did you mean loss_on?"),
        ("neftune_noise_alpha", "lm.config lists all"),
        (
            "tensor_parallel_degree",
            "remove tensor_parallel_degree: sharding divides the model over ranks",
        ),
        ("stage", "did you mean objective?"),
        ("global_batch_size", "did you mean total_batch_size?"),
        ("gradient_accumulation_steps", "batch_size x ranks x accumulation steps"),
        ("gradient_clipping", "did you mean grad_clip?"),
        ("checkpoint_interval", "did you mean checkpoint_rate?"),
        ("offload_optimizer", "cpu_offload: true, for parameters, gradients and optimizer state"),
        ("rl", "did you mean objective?"),
        ("datasets", "set train_data, and dataset to its format (text, tokens, jsonl, hf)"),
        ("min_lr", "set min_lr_ratio to the final rate / lr"),
        ("max_tokens", "set max_steps to tokens / (total_batch_size x max_seq_len)"),
        ("train_on_inputs", "set loss_on: all if it is true, else completion"),
        ("load_in_8bit", "set base_dtype: nf4, or remove load_in_8bit"),
        ("zero_optimization.stage", "grad-shard for ZeRO-2"),
        ("output_dir", "set run_name: its files are in runs/<run_name>/"),
        ("validation.steps", "did you mean validation_batches?"),
        ("rope_scaling.factor", "did you mean rope_scaling, a mapping?"),
        ("embedding_lr", "lm.config lists all"),
        ("searcher.max_length", "did you mean max_steps?"),
        ("hyperparameters.lr", "did you mean lr?"),
    ],
)
def test_unknown_key_error_names_the_nearest(key: str, advice: str, refusal: Refusal) -> None:
    error = refusal(f"hyperparameters:\n  {key}: 3\n")
    assert str(error).startswith(f"exp.yaml:2: {key}: ")
    assert str(error).endswith(advice)


def test_a_name_elsewhere_is_of_one_key_and_not_ours() -> None:
    names = [name for field in FIELDS.values() for name in aliases_of(field)]
    for group in KEYS_ELSEWHERE:
        names += group.split()
    assert sorted(set(names)) == sorted(names)
    assert not set(names) & set(FIELDS)
    for key, field in FIELDS.items():
        for name in aliases_of(field):
            assert nearest_key(name, FIELDS) == f"; did you mean {key}?"


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("n_heads: 7", r"n_heads: 7 .*d_model 512; .*\[1, 2, 4, 8\]"),
        ("n_kv_heads: 3", r"n_kv_heads: 3 .*n_heads 8; .*\[1, 2, 4, 8\]"),
        (
            "rope_scaling: {factor: 1, low_freq_factor: 4, high_freq_factor: 1, "
            "original_max_position_embeddings: 8}",
            "rope_scaling: high_freq_factor 1 .*low_freq_factor 4",
        ),
        (
            "{positions: rope, rope_scaling: {factor: 2, original_max_position_embeddings: 8}}",
            "rope_scaling.low_freq_factor: is missing",
        ),
        (
            "{positions: rope, rope_scaling: {rope_type: linear, factor: 2}}",
            'rope_scaling.*rope_type: "linear" is not llama3',
        ),
        (
            "{float8: rowwise, max_seq_len: 1000}",
            "float8: batch_size x max_seq_len is 1000, .*16; use batch_size=2,",
        ),
        (
            "{float8: rowwise, max_seq_len: 64, batch_size: 1, dataset: jsonl, train_data: x,"
            " tokenizer: bytes, packing: false}",
            "float8: .*packing.* 8 tokens is 8, .*16; use batch_size=2,",
        ),
        (
            "{float8: rowwise, max_seq_len: 128, batch_size: 1, dataset: jsonl, train_data: x,"
            " tokenizer: bytes, packing: false, context_parallel: 2}",
            "float8: .*packing.* 16 tokens / context_parallel is 8, .*16; use batch_size=2,",
        ),
        ("optim_dtype: bfloat16", r"optim_dtype: bfloat16 .*beta2 0\.999; .*0\.99,"),
    ],
)
def test_relation_error_carries_all_keys(source: str, part: str, refusal: Refusal) -> None:
    error = refusal(f"hyperparameters:\n  {source}\n")
    assert re.match(f"exp.yaml:2: {part}", str(error))


def test_error_names_keys_inside_a_mapping(refusal: Refusal) -> None:
    scaling = (
        "{factor: -2, low_freq_factor: a, low_freq_facter: 1, high_freq_factor: 4,"
        " original_max_position_embeddings: 8192}"
    )
    error = refusal(f"hyperparameters:\n  positions: rope\n  rope_scaling: {scaling}\n")
    parts = [
        "factor: -2 ",
        'low_freq_factor: "a"',
        "low_freq_facter: .*low_freq_factor[?]",
    ]
    for problem, part in zip(error.problems, parts, strict=True):
        assert re.match(f"exp.yaml:3: rope_scaling.{part}", problem)


def test_read_reports_all_problems_in_the_order_of_the_file(refusal: Refusal) -> None:
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
    starts = [
        'argument "oops"',
        "exp.yaml:2: report_rate",
        "exp.yaml:3: n_layers",
        "argument lr",
        "exp.yaml:5: n_head",
    ]
    starts += ["exp.yaml:7: norm", "argument dropout"]
    assert [
        line[: len(start)] for line, start in zip(error.problems, starts, strict=True)
    ] == starts


# ---- numbers and text


@pytest.mark.parametrize(
    ("argument", "advice"),
    [
        ("amp_dtype=bf16", "did you mean bfloat16?"),
        ("optimizer=AdamW", "did you mean adamw?"),
        ("objective=ipo", "set objective: dpo and dpo_loss: ipo"),
        ("amp_dtype=None", "did you mean null?"),
        ("optimizer=adam", "did you mean adamw?"),
        ("sharding=ZeRO-3", "did you mean full-shard?"),
        ("sharding=HYBRID_SHARD", "did you mean hybrid-full-shard?"),
        ("amp_dtype=float32", "did you mean null?"),
        ("amp_dtype=fp8", "set float8"),
        ("loss_on=assistant", "did you mean completion?"),
        ("objective=orpo", "no other is supported"),
        ("lora_targets=all-linear", "did you mean null?"),
        ("tracker=all", "name them"),
        ("activation_checkpointing=true", "did you mean full?"),
        ("tracker=tensorboard", "its files are always written, `make board` shows them"),
        ("lr=abc", ""),
    ],
)
def test_invalid_value_names_the_nearest(argument: str, advice: str, refusal: Refusal) -> None:
    error = str(refusal("hyperparameters: {}", argument))
    assert error.endswith(advice)
    assert ("did you mean" in error) == ("did you mean" in advice)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('"def f"', "def f"),
        ("'a \"b\"'", 'a "b"'),
        ("'null'", "null"),
        ('"', '"'),
        ('"a" or "b"', '"a" or "b"'),
        ("it's", "it's"),
    ],
)
def test_quotes_around_a_string_argument_are_not_its_own(text: str, value: str) -> None:
    hp = read_hyperparameters({"hyperparameters": {}}, [f"prompt={text}"], "exp.yaml")
    assert hp.run.prompt == value


@pytest.mark.parametrize("spelling", ["1e-4", "1.0e-4", "1E-4", "0.0001", "'1e-4'", "+1e-04"])
def test_number_formats(spelling: str, tmp_path: Path) -> None:
    (tmp_path / "exp.yaml").write_text(
        f"hyperparameters: {{lr: {spelling}, n_layers: '4', d_model: 1e3}}"
    )
    hp = load_hyperparameters(tmp_path / "exp.yaml", [])
    assert (hp.optim.lr, hp.own_model.n_layers, hp.own_model.d_model) == (1e-4, 4, 1000)


@pytest.mark.parametrize(
    ("spelling", "value"),
    [("on", True), ("Yes", True), ("true", True), ("off", False), ("no", False), ("'on'", True)],
)
def test_boolean_formats(spelling: str, value: bool, tmp_path: Path) -> None:
    (tmp_path / "exp.yaml").write_text(
        f"hyperparameters:\n  tie_embeddings: {spelling}\n  compile: {spelling}\n"
    )
    hp = load_hyperparameters(tmp_path / "exp.yaml", [])
    assert (hp.own_model.tie_embeddings, hp.parallel.compile) == (value, value)


def test_octal_integers_are_those_of_determined(tmp_path: Path) -> None:
    (tmp_path / "exp.yaml").write_text("hyperparameters:\n  max_steps: 010\n")
    assert load_hyperparameters(tmp_path / "exp.yaml", []).run.max_steps == 8


@pytest.mark.parametrize("text", ["1:30", "1:30.5", "-1:30:00"])
def test_numbers_in_base_60_are_text(text: str, refusal: Refusal) -> None:
    error = refusal(f"hyperparameters:\n  max_steps: {text}\n  prompt: {text}")
    assert error.problems == (f'exp.yaml:2: max_steps: "{text}" is not an integer > 0 or null',)


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
def test_override_is_yaml_or_the_literal_text(override: str, key: str, value: Any) -> None:
    others = ("lr=1", "dataset=tokens", "vocab_size=64", "torch_profiler=true")
    assert accept(*others, override, lr=2)[key] == value


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("lr", '"lr": is not key=value, without spaces'),
        ("=5", '"=5": is not key=value'),
        ("l\nr=5", r'"l\nr=5": is not key=value'),
        ("n_layers=", 'n_layers: ""'),
        ("lr=[1", 'lr: "[1"'),
        ("lr=nan", 'lr: "nan"'),
        ("lr=!!python/name:os.system", 'lr: "!!python/name:os.system"'),
        ("model.lr=5", "did you mean lr?"),
        ("prompt=\udcff", "prompt: "),
        ("exp.yaml", "did you mean --config exp.yaml?"),
        ("my exp.yaml", "did you mean --config 'my exp.yaml'?"),
        ("text.txt", "put quotes around a value with spaces"),
        ("confg=exp.yaml", "did you mean --config?"),
        ("dry_run=true", "did you mean --dry-run?"),
    ],
)
def test_invalid_override_is_named(override: str, part: str, refusal: Refusal) -> None:
    error = refusal("hyperparameters: {}", override)
    assert len(str(error).splitlines()) == 1
    assert str(error).startswith("argument ")
    assert part in str(error)


# ---- the file


@pytest.mark.parametrize(
    ("source", "line", "part"),
    [
        ("", None, "hyperparameters: is missing"),
        ("params: {}", None, "hyperparameters: is missing"),
        ("hyperparameters: [lr]", 1, 'hyperparameters: ["lr"] '),
        ("hyperparameters:\n  lr: 1\n  'lr': 2", 3, "lr: duplicate key, first on line 2"),
        ("hyperparameters:\n  [lr]: 1", 2, "a key must be a name"),
        ("hyperparameters:\n\tlr: 1", 2, "tabs"),
        ("hyperparameters: *x", 1, "alias 'x'"),
        ("hyperparameters: {}\n---\n{}", 2, "another document"),
        ("hyperparameters:\n  lr: \x01", 2, "U+0001"),
        ("hyperparameters:\n  run_name: 2024-99-99", 2, "'2024-99-99' is not a valid timestamp"),
        ("a: !!timestamp [1]\nhyperparameters: {}", 1, "sequence"),
        ("hyperparameters: " + "[" * 2000, None, "nested too deeply"),
        ("hyperparameters:\n  lr: &a [*a]", 2, "lr: "),
        (
            "hyperparameters:\n  prompt: !!python/object/apply:os.mkdir [pwned]\n",
            2,
            "!!python/object/apply:os.mkdir",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_invalid_yaml_error_has_the_line(
    source: str, line: int | None, part: str, refusal: Refusal
) -> None:
    error = refusal(source)
    assert len(error.problems) == 1
    assert str(error).startswith(f"exp.yaml:{line}: " if line else "exp.yaml: ")
    assert part in str(error)
    assert not Path("pwned").exists()


@pytest.mark.parametrize(
    ("mistake", "line", "parts"),
    [
        ("  lr:1e-4\n  n_layers: 2", 3, ["spaces after colons", "line before"]),
        ("  lr: 1\n    n_layers: 2", 3, ["indentation"]),
        ("  lr: 1\n n_layers: 2", 3, ["indentation"]),
        ("  lr:\u00a01", 1, [r"lr:\xa01", "mapping"]),
        ("  train_data: *.txt", 2, ["an alias", "'.'", "quotes"]),
        ("  prompt: 'it's", 2, ["quotes"]),
        ('  prompt: "a\n  lr: 1\n  seed: 1', 5, ["quoted", "from line 2"]),
        ("  torch_profiler_steps: [1, 1\n  lr: 1\n", 3, ["from line 2", "']'", "':'"]),
        ("  prompt: Answer: yes", 2, ["quotes"]),
        ("  prompt: |\n  hello\n  lr: 1", 4, ["from line 3", "':'", "indentation"]),
        ('  train_data: "C:\\Users"', 2, ["escape", "quotes"]),
        ("  lr: {{ lr }}", 2, ["name", "quotes"]),
        ("  lr: !env LR", 2, ["!env", "plain"]),
        ("  <<: *base\n  lr: 1", 2, ["'base'"]),
        ("<<<<<<< HEAD\n  lr: 1\n", 3, ["from line 2"]),
        ("  Lr: 1", 2, ["Lr", "did you mean lr?"]),
        ("  lr: 1,5", 2, ["lr", '"1,5"', "number > 0"]),
        ("  lr:", 2, ["lr", "null", "number > 0"]),
        ("  run_name: no", 2, ["run_name", "false", "quotes"]),
        ("  tie_embeddings: maybe", 2, ["tie_embeddings", '"maybe"', "true or false"]),
        ("lr: 1", 2, ["lr", "hyperparameters", "indent"]),
    ],
)
def test_yaml_mistake_is_explained_where_it_is(
    mistake: str, line: int, parts: list[str], refusal: Refusal
) -> None:
    (problem,) = refusal(f"hyperparameters:\n{mistake}\n").problems
    assert problem.startswith(f"exp.yaml:{line}: ")
    assert [part for part in parts if part not in problem] == []


def test_keys_outside_of_hyperparameters_are_named(refusal: Refusal) -> None:
    error = refusal("name: x\nmax_steps: 5\nhyperparameters:\nlr: 1\nd_model: 64\n")
    starts = ["exp.yaml:2: max_steps: ", "exp.yaml:4: lr: ", "exp.yaml:5: d_model: "]
    assert [
        problem[: len(start)] for problem, start in zip(error.problems, starts, strict=True)
    ] == starts


@pytest.mark.parametrize(
    ("source", "problems"),
    [
        (
            "resouces: {}\nmax_restart: 5\nhyperparameters: {}\n",
            ["1: resouces: .* resources", "2: max_restart: .* max_restarts"],
        ),
        (
            "resources: {slots_per_trail: 2}\nsearcher:\n  max_lenght: 5\n",
            ["1: resources.slots_per_trail: .* slots_per_trial", "3: searcher.max_lenght: .* max_"],
        ),
        ("hyperparameter: {lr: 1}\n", ["1: hyperparameter: .* hyperparameters"]),
    ],
)
def test_misspelled_keys_of_an_experiment_are_refused(
    source: str, problems: list[str], refusal: Refusal
) -> None:
    for found, problem in zip(refusal(source).problems, problems, strict=True):
        assert re.match(f"exp.yaml:{problem}", found)


def test_all_keys_of_an_experiment_are_accepted(tmp_path: Path) -> None:
    """Also those of this project, and a section that YAML's aliases share."""
    assert Searcher.model_fields.keys() - {"sampler"} <= set(strict_yaml.KEYS["searcher"].split())
    experiment: dict[str, Any] = dict.fromkeys(
        [*strict_yaml.KEYS[""].split(), "x-data", "defaults"]
    )
    for section in ("resources", "searcher"):
        experiment[section] = dict.fromkeys(strict_yaml.KEYS[section].split())
    (tmp_path / "exp.yaml").write_text(yaml.safe_dump(experiment))
    assert load_hyperparameters(tmp_path / "exp.yaml", []).run.max_steps is None


def test_merged_yaml_error_has_its_own_line(refusal: Refusal) -> None:
    def lines(source: str) -> list[str]:
        shared = "shared: &s\n  lr: -1\n  n_head: 2\n"
        return [
            re.sub(r"(\w+:\d+: \w+):.*", r"\1", problem)
            for problem in refusal(shared + source).problems
        ]

    expected = ["exp.yaml:2: lr", "exp.yaml:3: n_head"]
    assert lines("hyperparameters: *s\n") == expected
    assert lines("hyperparameters:\n  <<: *s\n") == expected
    assert lines("hyperparameters:\n  <<: *s\n  lr: 1\n") == expected[1:]


def test_config_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin1.yaml").write_bytes(b"name: caf\xe9")
    (tmp_path / "utf16.yaml").write_bytes("hyperparameters: {}".encode("utf-16"))
    (tmp_path / "data.yaml").write_text('{"text": "x"}\n' * 100_000)
    for path, part in (
        (tmp_path / "none.yaml", "No such file"),
        (tmp_path / "latin1.yaml", "byte 9 "),
        (tmp_path / "utf16.yaml", "byte 0 "),
        (tmp_path / "data.yaml", "has more than 131,072 bytes"),
        (tmp_path, "Is a directory"),
        (Path("/dev/zero"), "has more than 131,072 bytes"),
    ):
        with pytest.raises(ConfigError, match=f"^{path}: {part}"):
            load_hyperparameters(path, [])


def test_misspelt_config_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").touch()
    with pytest.raises(ConfigError) as refused:
        load_hyperparameters(tmp_path / "quikstart.yaml", [])
    assert str(refused.value).endswith(f"did you mean {tmp_path / 'quickstart.yaml'}?")
    (tmp_path / "my chats.yaml").touch()
    with pytest.raises(ConfigError) as refused:
        load_hyperparameters(tmp_path / "my chat.yaml", [])
    assert str(refused.value).endswith(f"did you mean '{tmp_path / 'my chats.yaml'}'?")


def test_unknown_keys_are_refused_soon_and_in_few_lines(tmp_path: Path) -> None:
    path = tmp_path / "exp.yaml"
    path.write_text("hyperparameters:\n" + "".join(f"  k{i}: 1\n" for i in range(8000)))
    started = time.process_time()
    with pytest.raises(ConfigError) as refused:
        load_hyperparameters(path, [])
    assert time.process_time() - started < 5
    assert len(refused.value.problems) == 21
    assert "7,980" in refused.value.problems[-1]


def test_empty_hyperparameters_are_all_defaults() -> None:
    assert read_hyperparameters({"hyperparameters": None}, [], "test") == Hyperparameters.from_flat(
        {}
    )


# ---- Determined's forms


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
def test_max_length_is_the_default_length_of_a_run(
    searcher: Any, hyperparameters: dict[str, Any], steps: int | None
) -> None:
    assert (
        read_hyperparameters(
            {"searcher": searcher, "hyperparameters": hyperparameters}, [], "test"
        ).run.max_steps
        == steps
    )


@pytest.mark.parametrize(
    ("argument", "left"),
    [
        ("max_steps=500", (500, None)),  # not as many as fit into one epoch
        ("max_epochs=3", (None, 3)),
        ("max_steps=null", (None, 1)),
        ("max_epochs=null", (50, None)),
        ("lr=0.1", (50, 1)),
    ],
)
def test_argument_alone_says_the_length_of_a_run(
    argument: str, left: tuple[int | None, float | None]
) -> None:
    both = {"hyperparameters": {"max_steps": 50, "max_epochs": 1}}  # as config.yaml of a run
    run = read_hyperparameters(both, [argument], "test").run
    assert (run.max_steps, run.max_epochs) == left


@pytest.mark.parametrize("length", ["abc", "0", "{epochs: 50}", "{}"])
def test_max_length_that_is_invalid_is_refused(length: str, refusal: Refusal) -> None:
    error = refusal(f"searcher:\n  max_length: {length}\nhyperparameters: {{}}\n")
    assert str(error).startswith("exp.yaml:2: searcher.max_length: ")
    assert str(error).endswith("an integer > 0 or null")


def test_search_range_needs_a_search(refusal: Refusal) -> None:
    assert accept(lr={"type": "const", "val": "1e-3"}) == {"lr": 1e-3}
    searched = "hyperparameters:\n  lr: {type: log, base: 10, minval: -4, maxval: -2}\n"
    error = refusal(searched)
    assert re.match("exp.yaml:2: lr: .*lm.search.*lr=VALUE", str(error))
    assert accept("lr=0.1", **yaml.safe_load(searched)["hyperparameters"]) == {"lr": 0.1}


# ---- any input

NUMBERS = st.integers(-1_000_000, 1_000_000) | st.floats() | st.just(2**64)
SCALARS = (
    st.none()
    | st.booleans()
    | NUMBERS
    | st.text()
    | st.sampled_from([*PRESETS, "rope", "llama3", "auto", "type"])
)
NAMES = st.text().filter(str.isprintable)  # YAML with other keys is refused
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.dictionaries(NAMES | st.just("factor"), inner),
    max_leaves=5,
)
KEYS = st.sampled_from([*FIELDS]) | NAMES


def problems(load: Callable[[], Any]) -> tuple[str, ...]:
    try:
        load()
    except ConfigError as error:
        return error.problems
    return ()


SECTIONS = st.sampled_from(["hyperparameters", "searcher"])


@given(
    st.dictionaries(SECTIONS, VALUES | st.dictionaries(KEYS, VALUES)),
    st.lists(
        st.text() | st.builds("{}={}".format, KEYS, SCALARS.map(str) | VALUES.map(json.dumps))
    ),
)
def test_any_experiment_gives_one_line_per_problem(
    contents: dict[str, Any], overrides: list[str]
) -> None:
    assert not any(
        "\n" in line for line in problems(lambda: read_hyperparameters(contents, overrides, "test"))
    )


PIECES = [
    *"[]{}'|",
    "\n",
    "  ",
    "lr",
    ": ",
    "- ",
    "&a ",
    "*a",
    "<<",
    "!!int ",
    "!!map ",
    "1e-4",
    "? ",
]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3)).map("".join))
def test_any_file_gives_one_line_per_problem(
    tmp_path_factory: pytest.TempPathFactory, source: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(f"hyperparameters:\n  {source}", encoding="utf-8", errors="replace")
    assert not any("\n" in line for line in problems(lambda: load_hyperparameters(path, [])))


# ---- the keys


def test_hyperparameters_have_one_part_and_a_description() -> None:
    fields = [(key, field) for part in PARTS.values() for key, field in part.model_fields.items()]
    assert sorted(key for key, _ in fields) == sorted(FIELDS)
    assert all(field.description for _, field in fields)


LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
READ_WITH: dict[str, tuple[Any, dict[str, Any]]] = {
    "train_data": ("x", {"dataset": "text"}),
    "val_data": ("x", {"dataset": "text"}),
    "tokenizer": ("bytes", {"dataset": "jsonl"}),
    "fields": ({"text": "x"}, {"dataset": "hf"}),
    "loss_on": ("completion", {"dataset": "jsonl"}),
    "chat_template": ("x", {"dataset": "jsonl"}),
    "chat_template_kwargs": ({"x": 1}, {"dataset": "jsonl"}),
    "packing": (False, {"dataset": "jsonl"}),
    "data_workers": (2, {"dataset": "hf"}),
    "hf_config": ("x", {"dataset": "hf"}),
    "attend_across_documents": (False, {"dataset": "tokens"}),
    "dpo_beta": (0.2, {"objective": "dpo"}),
    "dpo_loss": ("ipo", {"objective": "dpo"}),
    "label_smoothing": (0.2, {"objective": "dpo"}),
    "sft_weight": (0.2, {"objective": "dpo"}),
    "lora_alpha": (8.0, {"lora_rank": 1}),
    "use_rslora": (True, {"lora_rank": 1}),
    "lora_dropout": (0.5, {"lora_rank": 1}),
    "lora_targets": (["q_proj"], {"lora_rank": 1}),
    "base_dtype": ("nf4", {"lora_rank": 1}),
    "rope_theta": (500000.0, {"positions": "rope"}),
    "rope_scaling": (LLAMA3_SCALING, {"positions": "rope"}),
    "decay_steps": (0.5, {"lr_schedule": "wsd"}),
    "muon_momentum": (0.5, {"optimizer": "muon"}),
    "min_lr_ratio": (0.5, {"lr_schedule": "cosine"}),
    "shard_group_size": (2, {"sharding": "hybrid-grad-shard"}),
    "eval_rate": (10, {"eval_tasks": ["x"]}),
    "eval_limit": (10, {"eval_tasks": ["x"]}),
    "torch_profiler_steps": ([0, 1, 3], {"torch_profiler": True}),
    "experts_per_token": (1, {"n_experts": 2}),
    "n_shared_experts": (1, {"n_experts": 2}),
    "router": ("sigmoid", {"n_experts": 2}),
    "norm_topk_prob": (False, {"n_experts": 2}),
    "router_balance": ("none", {"n_experts": 2}),
    "router_balance_rate": (0.5, {"n_experts": 2}),
}
"""Keys that are read with another one only: a value, and a value of the other one."""


def test_all_keys_that_need_another_one_are_tested() -> None:
    keys = {key for key, info in FIELDS.items() if need_of(info)}
    assert READ_WITH.keys() == keys, "add a key with `Needs` to READ_WITH, with a value of both"


@pytest.mark.parametrize("key", READ_WITH)
def test_key_that_nothing_reads_is_refused_or_dropped(
    key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    value, other = READ_WITH[key]
    (needed,) = other
    common = {"dataset": "jsonl", "init_from": "x", "vocab_size": 64}
    common |= {"ffn": "swiglu", "bias": "none"}
    both = {"hyperparameters": common | other | {key: value}}
    read_hyperparameters(both, [], "exp.yaml")
    with pytest.raises(ConfigError, match=f"^exp.yaml: {key}: needs {needed}") as refused:
        read_hyperparameters({"hyperparameters": {key: value}}, [], "exp.yaml")
    assert len(refused.value.problems) == 1
    default = FIELDS[needed].default
    default_text = json.dumps(default).strip('"')
    hp = read_hyperparameters(both, [f"{needed}={default_text}"], "exp.yaml")
    assert hp.to_flat()[key] == json.loads(json.dumps(FIELDS[key].default))
    assert f"overrides {key}: " in capsys.readouterr().err, "what is dropped is said"


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("n_positions", 10, "max_seq_len: 2048 exceeds n_positions 10"),
        ("d_model", 100, "n_heads: 8 does not divide d_model 100"),
        ("n_experts", 4, "ffn: relu has no experts"),
    ],
)
def test_a_default_that_does_not_fit_to_a_key_is_said_at_its_line(
    key: str, value: int, problem: str, refusal: Refusal
) -> None:
    error = refusal(f"hyperparameters:\n  seed: 1\n  {key}: {value}\n")
    assert error.problems[0].startswith(f"exp.yaml:3: {key}: {problem}")


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"dataset": "text"}, "train_data"),
        ({"dataset": "tokens", "vocab_size": 300}, "train_data"),
        ({"dataset": "jsonl", "train_data": "x"}, "chat_template"),
    ],
)
def test_homes_that_do_not_exist_are_refused(keys: dict[str, Any], key: str) -> None:
    path = "~a user who does not exist/x"
    hp = read_hyperparameters({"hyperparameters": keys | {key: path}}, [], "exp.yaml")
    with pytest.raises(ConfigError, match=path):
        open_data(hp.data, 300, 8, 1, seed=1)


@pytest.mark.parametrize(("key", "value"), [("sample_rate", 2), ("prompt", "x")])
def test_keys_of_samples_are_refused_without_samples(key: str, value: Any) -> None:
    keys = {"dataset": "text", key: value}
    read_hyperparameters({"hyperparameters": keys}, [], "exp.yaml")
    with pytest.raises(ConfigError, match=f"^exp.yaml: {key}: needs num_tokens"):
        read_hyperparameters({"hyperparameters": keys | {"num_tokens": 0}}, [], "exp.yaml")


def test_all_problems_of_a_combination_are_listed() -> None:
    five = {"float8": "rowwise", "max_seq_len": 100, "optimizer": "muon", "cpu_offload": True}
    with pytest.raises(ConfigError) as refused:
        read_hyperparameters({"hyperparameters": five | {"lora_rank": 4}}, [], "exp.yaml")
    keys = [problem.split(": ")[1] for problem in refused.value.problems]
    assert keys == ["float8", "optimizer", "optimizer", "lora_rank", "float8"]


@pytest.mark.parametrize("key", FIELDS)
def test_hyperparameters_say_what_a_change_means(key: str) -> None:
    field = FIELDS[key]
    marks = [mark for mark in field.metadata if mark in CHANGES]
    assert len(marks) == 1, f"{key}: mark its type as Fixed, Logged or Unlogged (lm/fields.py)"


# ---- complete runs


@pytest.mark.slow
def test_invalid_config_exits_with_2_on_every_rank(tmp_path: Path) -> None:
    done = run_fsdp(tmp_path, "n_heads=5", ranks=2, config=TINY | {"lr": "fast"}, code=2)
    assert re.fullmatch('argument n_heads: 5 .*\ntest.yaml:1: lr: "fast" .*\n', done.stderr)


RUN = TINY | {"dataset": "text", "train_data": "text.txt", "vocab_size": 264, "max_steps": 2}


def digests(folder: Path) -> dict[Path, str]:
    """SHA-256 of every file of a run except the lock."""
    files = (
        path for path in (folder / "runs").rglob("*") if path.is_file() and path.name != "lock"
    )
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_steps")
    (folder / "text.txt").write_text("All work and no play makes Jack a dull boy.\n" * 20)
    (folder / "other.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 20)
    run_fsdp(folder, config=RUN, code=0)
    assert sorted(checkpoints_by_step(folder)) == [2]
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
def test_resume_refuses_changes_that_make_another_run(
    two_steps: Path, overrides: list[str], changes: dict[str, tuple[str, str]]
) -> None:
    before = digests(two_steps)
    done = run_fsdp(two_steps, "max_steps=4", *overrides, config=RUN, code=2)
    for key, (old, new) in changes.items():
        assert re.search(rf"{key}: .*\b{old}\b.*\b{new}\b", done.stderr), done.stderr
    remedy = done.stderr.splitlines()[-1]
    assert "resume=fresh" in remedy
    assert ("init_from" in remedy) == ("train_data" in changes)
    assert "lr:" not in done.stderr
    assert digests(two_steps) == before


@pytest.mark.slow
def test_resume_accepts_a_longer_run_with_other_reports(two_steps: Path) -> None:
    done = run_fsdp(two_steps, "max_steps=4", "report_rate=1", "lr=1e-3", config=RUN, code=0)
    assert re.search(r"lr: .*0\.0001.*0\.001", done.stdout)
    assert "report_rate" not in done.stdout
    assert "learning rate: 1.00e-04 in step 2, now 1.00e-03 in step 3" in done.stdout
    assert sorted(read_reports(two_steps)) == [2, 3, 4]


@pytest.mark.slow
def test_run_without_write_access_is_refused_early(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("in the way")
    done = run_fsdp(tmp_path, code=2)
    assert "building" not in done.stdout
    assert done.stderr.startswith("runs/test: ")


def vocab_size(*overrides: str, **hyperparameters: Any) -> int:
    return accept(*overrides, **hyperparameters).get("vocab_size", 32000)


def test_vocab_size_of_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(byte_level_tokenizer(300))
    assert vocab_size(dataset="text") == vocab_size(dataset="jsonl") == 320
    assert vocab_size("vocab_size=null", dataset="text", vocab_size=9) == 320
    assert vocab_size(dataset="text", tokenizer=str(tmp_path)) == 320
    assert vocab_size(dataset="text", model="mistral") == 320  # an architecture, without sizes


def test_vocab_size_that_is_set() -> None:
    assert vocab_size(dataset="text", vocab_size=257) == 257
    preset = {"dataset": "text", "model": "gpt2"} | PRESETS["gpt2"]
    assert accept(dataset="text", model="gpt2") == preset


def test_vocab_size_of_token_files(tmp_path: Path) -> None:
    index = {
        "format": 1,
        "tokenizer": "bytes",
        "max_id": 0,
        "tokens": 1,
        "documents": 1,
        "dtype": "uint16",
    }
    a, b = tmp_path / "a", tmp_path / "b"
    for folder, n_ids in ((a, 900), (b, 1025)):
        folder.mkdir()
        (folder / "train.bin").write_bytes(bytes(2))
        (folder / "train.json").write_text(json.dumps(index | {"vocab_size": n_ids}))
        (folder / MANIFEST).touch()
    assert vocab_size(dataset="tokens", train_data=str(a)) == 960
    assert vocab_size(dataset="tokens", train_data={str(a): 1, str(b): 1}) == 1088
    with pytest.raises(ConfigError) as refused:
        accept(dataset="tokens", train_data=str(tmp_path))
    assert named_keys(refused.value) >= {"train_data"}


def test_hyperparameters_as_flags() -> None:
    arguments = [
        "--config",
        "a.yaml",
        "--lr=1e-3",
        "--max-steps",
        "5",
        "seed=1",
        "--prompt",
        "a b",
        "--",
        "--help",
    ]
    expected = [
        "--config",
        "a.yaml",
        "lr=1e-3",
        "max_steps=5",
        "seed=1",
        "prompt=a b",
        "--",
        "--help",
    ]
    assert command_line.as_overrides(arguments) == expected


def test_model_override_replaces_the_shape_in_the_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def read(*overrides: str) -> Hyperparameters:
        shape = {"d_model": 64, "n_kv_heads": 2, "dropout": 0.1, "lr": 1e-3, "max_seq_len": 512}
        return read_hyperparameters({"hyperparameters": shape}, overrides, "exp.yaml")

    small = read("model=gpt2", "n_layers=2")
    shown = capsys.readouterr()
    assert (
        shown.err
        == "model=gpt2 overrides d_model: 64, n_kv_heads: 2, max_seq_len: 512 of exp.yaml\n"
    )
    assert shown.out == "", "which may be the JSON of a command"
    assert (small.own_model.d_model, small.own_model.n_kv_heads, small.own_model.n_layers) == (
        768,
        None,
        2,
    )
    assert (small.own_model.dropout, small.optim.lr) == (0.1, 1e-3)
    assert read("model=smollm2-1.7b").own_model.max_seq_len == 512
    assert read("model=mistral").own_model.d_model == 64  # a preset without sizes
    assert read("model=gpt2", "d_model=96").own_model.d_model == 96
    capsys.readouterr()
    read("n_layers=2")
    assert capsys.readouterr().err == ""


def test_lora_rank_override_turns_adapters_off(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = {
        "hyperparameters": {
            "init_from": "weights",
            "lora_rank": 8,
            "lora_alpha": 32,
            "lora_dropout": 0.1,
        }
    }
    hp = read_hyperparameters(file, ["lora_rank=null"], "exp.yaml")
    assert (hp.lora.lora_rank, hp.lora.lora_alpha, hp.lora.lora_dropout) == (None, 16.0, 0.0)
    assert (
        "lora_rank=null overrides lora_alpha: 32, lora_dropout: 0.1 of exp.yaml\n"
        in capsys.readouterr().err
    )
    with pytest.raises(ConfigError) as refused:
        read_hyperparameters(file, ["lora_rank=null", "lora_alpha=8"], "exp.yaml")
    assert named_keys(refused.value) >= {"lora_alpha", "lora_rank"}


def test_config_command_describes_keys_and_presets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for arguments in ([], ["--presets"], ["lr", "rope_scaling"]):
        assert lm_config.main(arguments) == 0
        output = capsys.readouterr().out
        assert max(map(len, output.splitlines())) <= 100
        assert all(
            key in output for key in (PRESETS if "--presets" in arguments else arguments or TINY)
        )
    monkeypatch.setenv("COLUMNS", "5")
    assert lm_config.main(["lr"]) == 0
    assert "learning rate" in capsys.readouterr().out
    assert lm_config.main(["learning_rate"]) == 2
    assert capsys.readouterr().err.endswith("did you mean lr?\n")


def test_config_command_groups_keys_by_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert lm_config.main([]) == 0
    blocks = capsys.readouterr().out.split("\n\n")
    for part, heading, keys in zip(PARTS.values(), blocks[::2], blocks[1::2], strict=True):
        assert heading == (part.__doc__ or "").splitlines()[0]
        listed = [line.split()[0] for line in keys.splitlines() if not line.startswith(" ")]
        assert [key for key in listed if "." not in key] == list(part.model_fields)


@pytest.mark.parametrize("argument", ["--local-rank=1", "--local_rank=1"])
def test_rank_that_a_launcher_adds_is_no_hyperparameter(argument: str) -> None:
    args = command_line.parse_arguments([argument, "--config", "x.yaml", "--lr=1e-3"])
    assert args.overrides == ["lr=1e-3"]


@pytest.mark.parametrize(
    ("name", "asked"),
    [("lora", {"lora_rank": 4}), ("nf4", {"base_dtype": "nf4"}), ("float8", {"float8": "rowwise"})],
)
def test_key_that_a_class_does_not_compute_is_refused_with_what_was_found(
    name: str, asked: dict[str, Any]
) -> None:
    answers = {"lora": True, "nf4": True, "float8": True, name: False}
    examined = OF_TRANSFORMERS.examined.model_copy(
        update={**answers, "details": {name: "1.5 apart"}}
    )
    model = OF_TRANSFORMERS.model_copy(update={"examined": examined})
    flat = TINY | {"init_from": "x", "lora_rank": 4} | asked
    hp = replace(Hyperparameters.from_flat(flat), model=model)
    with pytest.raises(ConfigError) as refused:
        check_combinations(hp, Draft())
    (key,) = asked
    assert any(
        problem.startswith(f"{key}: ") and f"(1.5 apart); remove {key}" in problem
        for problem in refused.value.problems
    )
