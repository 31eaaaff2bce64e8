"""Pairs of replies are read as they are published, and cut, packed and loaded as a whole."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data.json_lines import Record
from lm.data.loader import Loader, PairBatch
from lm.data.record_fields import RecordFields
from lm.data.rendering import RecordRenderer
from lm.data.run_data import Data, DataConfig, open_data
from lm.data.tokenizer.byte_tokenizer import ByteTokenizer
from lm.data.tokenizer.file_tokenizer import FileTokenizer
from lm.data.tokenizer.files import TOKENIZER_JSON
from lm.data.tokenizer.loading import load_tokenizer
from lm.errors import ConfigError
from model import IGNORE_INDEX
from tests.support.records import pack_files
from tests.support.tokenizer_files import byte_level_tokenizer, llama_tokenizer

BYTES = ByteTokenizer()
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}"
    "{{ message.tool_calls | tojson if message.tool_calls }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
CONFIG = json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}).encode()
LLAMA = FileTokenizer({TOKENIZER_JSON: llama_tokenizer(), "tokenizer_config.json": CONFIG}, "small")


def chat(*turns: str, start: str = "user") -> list[dict[str, Any]]:
    roles = ["user", "assistant"]
    first = roles.index(start)
    return [{"role": roles[(first + i) % 2], "content": text} for i, text in enumerate(turns)]


def write(path: Path, records: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


QA = ("[user] Q</s>[assistant] A</s>", "A</s>")
QB = ("[user] Q</s>[assistant] B</s>", "B</s>")
QA_REPLY, QB_REPLY = (chat(text, start="assistant")[0] for text in "AB")
JSON_REPLY = '{"role": "assistant", "content": "Hi"}'
TURNS = "[user] Q0</s>[assistant] A0</s>"

READ: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "texts": (
        {"prompt": "Q: ", "chosen": "A", "rejected": "B"},
        [("Q: A", "A"), ("Q: B", "B")],  # and the end of the text
    ),
    "messages": (
        {
            "prompt": chat("Q"),
            "chosen": chat("A", start="assistant"),
            "rejected": chat("B", start="assistant"),
        },
        [QA, QB],
    ),
    "text-replies": ({"prompt": chat("Q"), "chosen": "A", "rejected": "B"}, [QA, QB]),
    "dialogs": (
        {"prompt": None, "chosen": chat("Q", "A"), "rejected": chat("Q", "B"), "tools": []},
        [QA, QB],
    ),
    "several-turns": (
        {"chosen": chat("Q0", "A0", "Q", "A"), "rejected": chat("Q0", "A0", "Q", "B")},
        [(TURNS + QA[0], QA[1]), (TURNS + QB[0], QB[1])],
    ),
    "more turns after the common ones": (
        {"chosen": chat("Q", "A", "P", "A"), "rejected": chat("Q", "B")},
        [(QA[0] + "[user] P</s>[assistant] A</s>", "A</s>A</s>"), QB],
    ),
    "json-replies": (
        {"prompt": "Q: ", "chosen": '{"a": 1}', "rejected": "[]"},
        [('Q: {"a": 1}', '{"a": 1}'), ("Q: []", "[]")],
    ),
    "replies that are JSON text of messages": (
        {"prompt": chat("Q"), "chosen": JSON_REPLY, "rejected": '{"from": "Oslo", "from": "Rome"}'},
        [
            (f"[user] Q</s>[assistant] {JSON_REPLY}</s>", f"{JSON_REPLY}</s>"),
            (
                '[user] Q</s>[assistant] {"from": "Oslo", "from": "Rome"}</s>',
                '{"from": "Oslo", "from": "Rome"}</s>',
            ),
        ],
    ),
}


@pytest.mark.parametrize("name", READ)
def test_pairs_are_read(name: str) -> None:
    record, expected = READ[name]
    renderer = RecordRenderer(LLAMA, RecordFields(pairs=True), completion_only=True)
    found: list[tuple[str, str]] = []
    for text, spans, _ in renderer.render(Record("a:1", record, 0)):
        found.append((text, "".join(text[span.start : span.stop] for span in spans or ())))
    assert found == expected


TEMPLATES = ["qwen2_5", "qwen2_5_training", "qwen3", "qwen3_training", "llama3_1"]
TEMPLATES += ["gptoss_training", "nemotron_3_nano_training", "deepseekv3_training", "gemma4"]


@pytest.mark.slow
def test_replies_are_targets_as_in_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From where the tokens of the prompt, with the start of a reply, differ from either text."""
    import transformers
    from trl.data_utils import common_prefix_length

    monkeypatch.setattr("lm.data.chat_template.TODAY", datetime.date.today())
    end = "<|endoftext|>"
    config = {"bos_token": end, "eos_token": end, "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / TOKENIZER_JSON).write_bytes(byte_level_tokenizer())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    prompt = [{"role": "system", "content": "S"}, *chat("a", "b", "c")]
    replies = {key: chat(f"the {key}", start="assistant") for key in ("chosen", "rejected")}
    for template in TEMPLATES:
        ours = load_tokenizer(str(tmp_path), template)
        theirs.chat_template = ours.find_template().text
        options: Any = {"return_dict": False}
        before = theirs.apply_chat_template(prompt, add_generation_prompt=True, **options)
        whole = [
            theirs.apply_chat_template(prompt + reply, **options) for reply in replies.values()
        ]
        start = min(common_prefix_length(before, ids) for ids in whole)
        renderer = RecordRenderer(ours, RecordFields(pairs=True), completion_only=True)
        record = Record("a:1", {"prompt": prompt, **replies}, 0)
        for rendered, expected in zip(renderer.render(record), whole, strict=True):
            ids, ends = ours.encode_with_ends(rendered.text, with_start=False)
            assert ids.tolist() == expected, template
            assert rendered.target_spans is not None
            assert ids[ends > rendered.target_spans[0].start].tolist() == expected[start:], template


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one-reply": ({"prompt": "Q", "chosen": "A"}, "the line has the keys: prompt, chosen"),
    "empty": ({"prompt": "Q", "chosen": "", "rejected": "B"}, "chosen: the reply is empty"),
    "empty-message": (
        {"prompt": chat("Q"), "chosen": "A", "rejected": chat("", start="assistant")},
        "rejected: the reply is empty",
    ),
    "no-prompt": ({"chosen": "A", "rejected": "B"}, "the line has the keys: chosen, rejected"),
    "dialogs-as-json": (
        {"chosen": chat("Q", "A"), "rejected": json.dumps(chat("Q", "B"))},
        'rejected is "[{',
    ),
    "prompt-as-json": (
        {"prompt": json.dumps(chat("Q")), "chosen": "A", "rejected": "B"},
        "prompt: is a list of objects as JSON text",
    ),
    "equal": ({"prompt": "Q", "chosen": "A", "rejected": "A"}, "chosen and rejected: the replies"),
    "other-prompts": (
        {"chosen": chat("Q", "A"), "rejected": chat("P", "B")},
        "chosen and rejected: 0 of 2 and 2 messages",
    ),
    "ends-early": (
        {"chosen": chat("Q", "A"), "rejected": chat("Q")},
        "chosen and rejected: 1 of 2 and 1 messages",
    ),
    "other-question": (
        {"chosen": chat("Q", "A", "P", "A"), "rejected": chat("Q", "A", "O", "B")},
        'chosen: what differs starts with a message of role "user"',
    ),
    "a-prompt-and-dialogs": (
        {"prompt": chat("Q"), "chosen": chat("Q", "A"), "rejected": chat("Q", "B")},
        'chosen: what differs starts with a message of role "user"',
    ),
    "a-prompt-with-the-reply": (
        {"prompt": chat("Q", "A"), "chosen": "A", "rejected": "B"},
        "prompt[1]: the prompt ends with a reply",
    ),
    "generations": (
        {"prompt": "Q", "chosen": "A", "rejected": "B", "generations": ["A", "B", "C"]},
        "generations: not read",
    ),
    "number": ({"prompt": "Q", "chosen": 1, "rejected": "B"}, "'chosen' is 1"),
    "weight": (
        {"prompt": chat("Q"), "chosen": [QA_REPLY | {"weight": 0}], "rejected": "B"},
        "chosen[0]: weight is read only in messages",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_pair_is_refused_with_its_line(name: str, tmp_path: Path) -> None:
    record, start = REFUSED[name]
    file = write(tmp_path / "a.jsonl", [READ["texts"][0], record])
    with pytest.raises(ConfigError) as error:
        pack_files([file], LLAMA, 256, pairs=True)
    assert str(error.value).startswith(f"{file}:2: {start}")


def test_pairs_of_texts_are_counted_as_pairs(tmp_path: Path) -> None:
    record = READ["texts"][0]
    file = write(tmp_path / "a.jsonl", [record, record])
    note = pack_files([file], LLAMA, 256, pairs=True).note or ""
    assert note.startswith("2 pairs in 1 sequence, ")


JSON = st.sampled_from([None, True, 0, 1.5, "", "x", [], {}, [1], ["x"], [[]], [{}], {"role": 1}])


def replace_somewhere(draw: st.DrawFn, value: Any) -> Any:
    """A copy of a JSON value with one part of it replaced by another value."""
    if not value or not isinstance(value, dict | list) or draw(st.integers(0, 3)) == 0:
        return draw(JSON)
    copy = value.copy()
    keys = list(range(len(copy)))
    if isinstance(copy, dict):
        keys = list(copy)
    key = draw(st.sampled_from(keys))
    copy[key] = replace_somewhere(draw, copy[key])
    return copy


@st.composite
def damaged_records(draw: st.DrawFn) -> dict[str, Any]:
    record, _ = READ[draw(st.sampled_from(sorted(READ)))]
    key = draw(st.sampled_from(sorted(record)))
    return record | {key: replace_somewhere(draw, record[key])}


@pytest.mark.parametrize("has_template", [True, False])
@settings(max_examples=300)
@given(record=damaged_records())
def test_a_damaged_pair_is_read_or_refused_by_its_line(
    has_template: bool, record: dict[str, Any]
) -> None:
    tokenizer = BYTES
    if has_template:
        tokenizer = LLAMA
    renderer = RecordRenderer(tokenizer, RecordFields(pairs=True), completion_only=True)
    problem = "a:1: "
    try:
        renderer.render(Record("a:1", record, 0))
    except ConfigError as error:
        problem = str(error)
    assert problem.startswith("a:1: ")


replies = st.text(st.sampled_from("abc"), min_size=1, max_size=9)
records = st.lists(
    st.tuples(replies, replies, replies).filter(lambda texts: texts[1] != texts[2]),
    min_size=1,
    max_size=8,
)


@given(records, st.integers(8, 40), st.booleans())
def test_a_pair_is_packed_and_cut_as_a_whole(
    tmp_path_factory: pytest.TempPathFactory,
    records: list[tuple[str, str, str]],
    seq_len: int,
    packing: bool,
) -> None:
    expected: list[tuple[list[int], list[int]]] = []
    n_cut = 0
    for prompt, chosen, rejected in records:
        full = [len(prompt + reply) for reply in (chosen, rejected)]
        limit = max(seq_len // 2, seq_len - min(full))
        if limit < len(prompt):
            continue
        n_cut += sum(full) > seq_len
        for reply in (chosen, rejected):
            text = [*BYTES.encode(prompt + reply), BYTES.eos_id]
            inputs, targets = text[:-1][:limit], text[1:][:limit]
            expected.append((inputs, targets[len(prompt) - 1 :]))
    file = tmp_path_factory.mktemp("pairs") / "a.jsonl"
    keys = ("prompt", "chosen", "rejected")
    write(file, [dict(zip(keys, record, strict=True)) for record in records])
    if not expected:
        with pytest.raises(ConfigError, match="max_seq_len"):
            pack_files([file], BYTES, seq_len, packing=packing, pairs=True)
        return
    samples = pack_files([file], BYTES, seq_len, packing=packing, pairs=True)
    found: list[tuple[Any, Any]] = []
    for i in range(len(samples)):
        inputs, targets, document_ids, numbers = samples[i]
        assert document_ids is not None
        assert numbers is not None
        assert len(numbers) == 2 * samples.count_terms(i)
        assert packing or len(numbers) == 2
        for document in range(len(numbers)):
            here = document_ids == document
            learned = targets[here][targets[here] != IGNORE_INDEX]
            found.append((inputs[here].tolist(), learned.tolist()))
        assert (targets[document_ids >= len(numbers)] == IGNORE_INDEX).all()
    assert len(found) == samples.n_replies
    pairs = [(found[i], found[i + 1]) for i in range(0, len(found), 2)]
    assert sorted(pairs) == sorted(zip(expected[0::2], expected[1::2], strict=True))
    if not packing:
        assert found == expected
    note = samples.note or ""
    assert (f"; {n_cut} truncated" in note) == (n_cut > 0)


def open_pairs(folder: Path, n_pairs: int, **changes: Any) -> Data:
    lines = [
        {"prompt": f"{n}?", "chosen": "y" * (1 + n % 5), "rejected": "n" * (1 + n % 7)}
        for n in range(n_pairs)
    ]
    path = str(write(folder / "pairs.jsonl", lines))
    keys = {"dataset": "jsonl", "train_data": path, "val_data": path}
    config = DataConfig.model_validate(keys | changes)
    return open_data(config, 264, 32, 2, 0, pairs=True)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("ranks", [1, 3])
def test_all_pairs_of_all_ranks_are_all_replies_once(
    ranks: int, packing: bool, tmp_path: Path
) -> None:
    numbers: list[int] = []
    n_batches: set[int] = set()
    for rank in range(ranks):
        data = open_pairs(tmp_path, 17, packing=packing)
        config = DataConfig.model_validate({"batch_size": 2, "packing": packing})
        loader = Loader(config, data, 6, rank, ranks, torch.device("cpu"))
        batches = list(loader.all_pairs())
        n_batches |= {len(batches), loader.n_pair_batches}
        for pairs in batches:
            assert len(pairs.lengths) == len(pairs.replies)
            assert sum(pairs.lengths) == len(pairs.queries) == len(pairs.targets)
            assert min(pairs.lengths, default=1) > 0
            numbers += pairs.replies.tolist()
    assert sorted(numbers) == list(range(2 * 2 * 17))  # of the training and of the validation data
    assert len(n_batches) == 1


def test_queries_come_before_the_targets_of_each_reply(tmp_path: Path) -> None:
    data = open_pairs(tmp_path, 9)
    config = DataConfig.model_validate({"batch_size": 2})
    batch = next(Loader(config, data, 2, 0, 1, torch.device("cpu")).training(0))
    (pairs,) = batch.micro_batches
    assert isinstance(pairs, PairBatch)
    assert batch.n_global_terms == pairs.n_terms == len(pairs.lengths) // 2
    assert pairs.lengths_on_device.tolist() == pairs.lengths
    assert pairs.document_ids is not None
    inputs = pairs.inputs.flatten()
    documents = (pairs.document_ids + 100 * torch.arange(2)[:, None]).flatten()[pairs.queries]
    starts = np.cumsum([0, *pairs.lengths[:-1]])
    for reply, (start, length) in enumerate(zip(starts, pairs.lengths, strict=True)):
        part = slice(start, start + length)
        assert len(documents[part].unique()) == 1
        targets = pairs.targets[part]
        assert set(targets[:-1].tolist()) == {ord("yn"[reply % 2])}
        assert targets[-1] == BYTES.eos_id
        assert inputs[pairs.queries[part]][1:].tolist() == targets[:-1].tolist()
        assert inputs[pairs.queries[start]] == ord("?")
