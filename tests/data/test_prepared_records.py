"""Records that `lm.prepare` writes beforehand are trained on as those that a run tokenizes."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet

from lm import prepare
from lm.data import records
from lm.data.run_data import Data, DataConfig, open_data, record_options
from lm.data.token_file import SPLITS, read_index
from lm.data.tokenized import describe_making
from lm.data.tokenizer.files import TOKENIZER_JSON
from lm.data.tokenizer.loading import load_tokenizer
from lm.errors import ConfigError
from lm.storage.folder import write_manifest
from tests.support.hyperparameters import TINY
from tests.support.tokenizer_files import CHAT_TEMPLATE, llama_tokenizer

SEQ_LEN = 64


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Chats, a tokenizer with a template for them, and the file of a run on both."""
    monkeypatch.chdir(tmp_path)
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    Path("tokenizer").mkdir()
    Path("tokenizer", TOKENIZER_JSON).write_bytes(llama_tokenizer())
    Path("tokenizer", "tokenizer_config.json").write_text(json.dumps(tokens))
    lines: list[str] = []
    for i in range(50):
        question = {"role": "user", "content": f"to be {i}?"}
        reply = {"role": "assistant", "content": "or not " * (i % 7)}
        lines.append(json.dumps({"messages": [question, reply]}))
    Path("chats.jsonl").write_text("\n".join(lines))
    Path("run.yaml").write_text(
        yaml.safe_dump({"hyperparameters": TINY | {"vocab_size": 320} | KEYS})
    )
    return tmp_path


KEYS = {
    "dataset": "jsonl",
    "train_data": "chats.jsonl",
    "tokenizer": "tokenizer",
    "loss_on": "completion",
    "max_seq_len": SEQ_LEN,
}


def opened(*, pairs: bool = False, **changes: Any) -> Data:
    named = {key: value for key, value in KEYS.items() if key != "max_seq_len"}
    config = DataConfig.model_validate(named | changes)
    return open_data(config, 320, SEQ_LEN, 2, 0, pairs=pairs)


def assert_equal(ours: Data, theirs: Data) -> None:
    assert ours.fingerprints() == theirs.fingerprints()
    assert ours.notes == theirs.notes
    for one, other in zip(ours.datasets, theirs.datasets, strict=True):
        for index in range(len(one)):
            for found, expected in zip(one[index], other[index], strict=True):
                assert np.array_equal(np.asarray(found), np.asarray(expected))
    assert ours.tokenizer is not None
    assert theirs.tokenizer is not None
    assert ours.tokenizer.chat_stop_ids == theirs.tokenizer.chat_stop_ids


def test_prepared_chats_are_those_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", "run.yaml", "--out", "out"]
    assert prepare.main(arguments) == 0
    assert "48 documents" in capsys.readouterr().out
    for packing in (True, False):
        ours = opened(train_data="out", packing=packing)
        assert_equal(ours, opened(packing=packing))
    assert_equal(opened(train_data="out", tokenizer="out"), opened())
    named = opened(train_data="out", val_data="out")
    assert named.fingerprints() == opened().fingerprints()
    assert not [note for note in named.notes if "trained on" in note]
    assert prepare.main(arguments) == 0
    assert "already exists" in capsys.readouterr().out
    assert prepare.main([*arguments, "loss_on=all"]) == 2
    assert "(different: loss_on)" in capsys.readouterr().err
    assert prepare.main([*arguments, "loss_on=all", "--overwrite"]) == 0
    assert_equal(opened(train_data="out", loss_on="all"), opened(loss_on="all"))


def test_prepared_pairs_are_those_of_the_run() -> None:
    record = {"prompt": "to be ", "chosen": "or not", "rejected": "to be"}
    Path("pairs.jsonl").write_text((json.dumps(record) + "\n") * 9)
    Path("out").mkdir()
    named = {"dataset": "jsonl", "train_data": "pairs.jsonl", "tokenizer": "tokenizer"}
    options = record_options(DataConfig.model_validate(named), pairs=True, holds_out=True)
    tokenizer = load_tokenizer("tokenizer")
    records.write(Path("out"), [Path("pairs.jsonl")], tokenizer, options)
    write_manifest(Path("out"), describe_making(tokenizer, options))
    theirs = opened(pairs=True, train_data="pairs.jsonl", loss_on="all")
    assert theirs.n_replies == 18
    assert_equal(opened(pairs=True, train_data="out", loss_on="all"), theirs)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"loss_on": "all"}, 'loss_on: "completion"'),
        ({"fields": {"messages": "messages"}}, "fields: null"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs: {}"),
        ({"tokenizer": "bytes"}, "tokenizer: out"),
        ({"chat_template": "other.jinja"}, "tokenizer: out"),
        ({"pairs": True}, 'objective: "next-token"'),
        ({"dataset": "tokens", "loss_on": "all"}, "dataset: jsonl"),
    ],
    ids=["loss_on", "fields", "kwargs", "tokenizer", "template", "pairs", "tokens"],
)
def test_records_that_were_prepared_otherwise_are_refused(
    changes: dict[str, Any], remedy: str
) -> None:
    Path("other.jinja").write_text(CHAT_TEMPLATE)
    template = CHAT_TEMPLATE + "{{ x }}"
    Path("tokenizer", "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": template})
    )
    assert prepare.main(["--config", "run.yaml", "--out", "out"]) == 0
    with pytest.raises(ConfigError) as refused:
        opened(train_data="out", **changes)
    assert f"; set {remedy}" in str(refused.value)
    key, _, value = remedy.partition(": ")
    if key in changes | {"tokenizer": ""} and key != "dataset":
        changes = {name: changed for name, changed in changes.items() if name != "chat_template"}
        assert_equal(opened(train_data="out", **changes | {key: yaml.safe_load(value)}), opened())


def test_prepared_records_have_the_same_fields_in_any_order() -> None:
    fields = {"messages": "messages", "role": "role", "content": "content"}
    named = "{messages: messages, role: role, content: content}"
    assert prepare.main(["--config", "run.yaml", "--out", "out", f"fields={named}"]) == 0
    in_order = opened(train_data="out", fields=fields)
    assert_equal(opened(train_data="out", fields=dict(reversed(fields.items()))), in_order)


def test_prepared_records_without_a_validation_part_need_val_data() -> None:
    assert prepare.main(["--config", "run.yaml", "--out", "out", "val_data=chats.jsonl"]) == 0
    with pytest.raises(ConfigError, match=r"^train_data: out: .*no validation.bin; set val_data"):
        opened(train_data="out")
    data = opened(train_data="out", val_data="out")  # which is one without a validation part
    assert [note for note in data.notes if "trained on" in note]
    data = opened(train_data="out", val_data="chats.jsonl")
    assert data.fingerprints() == opened(val_data="chats.jsonl").fingerprints()


def test_prepared_records_that_a_kill_has_left_aside_are_put_back() -> None:
    """Between the two renames by which --overwrite replaces a directory."""
    assert prepare.main(["--config", "run.yaml", "--out", "out"]) == 0
    expected = opened(train_data="out").fingerprints()
    Path("out").rename(".out.replaced")
    assert opened(train_data="out").fingerprints() == expected


def test_damaged_records_are_refused_before_they_are_packed() -> None:
    """Else the packing would be that of other masks, also of the file when it is restored."""
    assert prepare.main(["--config", "run.yaml", "--out", "out"]) == 0
    mask = Path("out/train.mask")
    intact = mask.read_bytes()
    mask.write_bytes(b"\xff" * len(intact))
    with pytest.raises(ConfigError, match=r"^train_data: out/train.mask: damaged"):
        opened(train_data="out")
    mask.write_bytes(intact)
    assert_equal(opened(train_data="out"), opened())


@pytest.mark.parametrize("val_data", [None, "chats.jsonl"])
def test_token_files_of_text_are_no_records(val_data: str | None) -> None:
    Path("a.txt").write_text("to be or not to be")
    assert prepare.main(["a.txt", "--tokenizer", "tokenizer", "--out", "out"]) == 0
    with pytest.raises(ConfigError, match=r"^train_data: out has token files of text; "):
        opened(train_data="out", val_data=val_data)


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["--tokenizer", "bytes"], "--tokenizer: is not read with --config"),
        (["dataset=text", "loss_on=all"], "dataset: text: --config prepares records"),
        (["train_data=none.jsonl"], "train_data: no file found"),
    ],
    ids=["option", "text", "missing"],
)
def test_what_config_does_not_prepare_is_refused(
    arguments: list[str], start: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare.main(["--config", "run.yaml", "--out", "out", *arguments]) == 2
    assert capsys.readouterr().err.startswith(start)


@pytest.mark.slow
def test_records_of_a_dataset_are_those_of_its_files() -> None:
    arguments = ["--config", "run.yaml"]
    assert prepare.main([*arguments, "--out", "files"]) == 0
    assert prepare.main([*arguments, "--split", "train", "--out", "stream"]) == 0
    for name in ("train.bin", "train.ends", "train.mask", "validation.bin"):
        assert Path("stream", name).read_bytes() == Path("files", name).read_bytes()
    assert_equal(opened(train_data="stream"), opened())


@pytest.mark.slow
def test_dates_in_a_dataset_that_are_not_read_do_not_matter() -> None:
    chats = [json.loads(line) for line in Path("chats.jsonl").read_text().splitlines()]
    for chat in chats:
        for message in chat["messages"]:
            message["day"] = date(2026, 1, 31)
    parquet.write_table(pa.Table.from_pylist(chats), "chats.parquet")
    arguments = ["--config", "run.yaml", "train_data=chats.parquet", "--split", "train"]
    arguments.append("fields={messages: messages, role: role, content: content}")
    assert prepare.main([*arguments, "--out", "out"]) == 0
    documents = [read_index(Path("out", f"{name}.json")).documents for name in SPLITS]
    assert sum(documents) == 50
