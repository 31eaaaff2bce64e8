"""Records are read by their own keys, or by `fields`; whatever else they have is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm.data.json_lines import Record
from lm.data.record_fields import RecordFields
from lm.data.rendering import RecordRenderer
from lm.data.run_data import DataConfig
from lm.data.tokenizer.byte_tokenizer import ByteTokenizer
from lm.data.tokenizer.file_tokenizer import FileTokenizer
from lm.data.tokenizer.files import TOKENIZER_JSON
from lm.errors import ConfigError
from tests.support import REPOSITORY
from tests.support.records import pack_files
from tests.support.tokenizer_files import llama_tokenizer

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "[{{ message.role }}] {{ message.content }}{{ message.tool_calls | tojson if message.tool_calls"
    " }}</s>{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


DAY = date(2026, 1, 31)
"""which a dataset of the Hub can have, and JSON has not"""


def tokenizer_of(template: str) -> FileTokenizer:
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    files = {
        TOKENIZER_JSON: llama_tokenizer(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }
    return FileTokenizer(files, "small")


TOKENIZER = tokenizer_of(TEMPLATE)

Chat = list[tuple[str, str]]
CHAT: Chat = [("user", "Q"), ("assistant", "A")]
REJECTED: Chat = [("user", "Q"), ("assistant", "B")]
WITH_SYSTEM: Chat = [("system", "S"), *CHAT]
TURNS: Chat = [("user", "Q0"), ("assistant", "A0"), *CHAT]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d"}}]


def chat(turns: Chat = CHAT, role: str = "role", content: str = "content") -> list[dict[str, Any]]:
    return [{role: name, content: text} for name, text in turns]


def sharegpt(turns: Chat = CHAT) -> list[dict[str, Any]]:
    names = {"user": "human", "assistant": "gpt"}
    return chat([(names.get(role, role), text) for role, text in turns], "from", "value")


def render(
    record: dict[str, Any],
    fields: Mapping[str, str] | None = None,
    *,
    pairs: bool = False,
    completion_only: bool = True,
) -> list[tuple[str, str]]:
    """Return each text of a record, and that of its targets."""
    renderer = RecordRenderer(TOKENIZER, RecordFields(fields, pairs), completion_only)
    found: list[tuple[str, str]] = []
    for text, spans, _ in renderer.render(Record("file:1", record, 0)):
        learned = text
        if spans is not None:
            learned = "".join(text[span.start : span.stop] for span in spans)
        found.append((text, learned))
    return found


def rendered(turns: Chat) -> tuple[str, str]:
    """The text of a chat, and that of its targets."""
    text = "".join(f"[{role}] {content}</s>" for role, content in turns)
    learned = "".join(f"{content}</s>" for role, content in turns if role == "assistant")
    return text, learned


# ---- well-known data sets


def sets_of_docs() -> dict[str, dict[str, str]]:
    """The data sets in the table of docs/datasets.md, with their `fields`."""
    sets: dict[str, dict[str, str]] = {}
    for row in (REPOSITORY / "docs/datasets.md").read_text().splitlines():
        found = re.fullmatch(r"\| (.*`[\w.-]+/[\w.-]+`) \| `(\{.+\})` \|", row)
        if found is not None:
            for name in re.findall(r"`([\w.-]+/[\w.-]+)`", found[1]):
                sets[name] = yaml.safe_load(found[2])
    return sets


SETS = sets_of_docs()
QA = [CHAT]
PAIR = [CHAT, REJECTED]
SYSTEM_PAIR = [[("system", "S"), *each] for each in PAIR]
DIALOGS = {"chosen": chat(CHAT), "rejected": chat(REJECTED)}
VISITOR = {"country": "Peru", "hashed_ip": "9f1c", "toxic": False, "timestamp": None}

# What users see of a set of each kind: the columns of its card, with short values.
RECORDS: dict[str, tuple[dict[str, Any], list[Chat]]] = {
    "HuggingFaceH4/ultrachat_200k": (
        {"prompt": "Q", "prompt_id": "f0e1", "messages": chat()},
        QA,
    ),
    "HuggingFaceTB/smoltalk": ({"messages": chat(TURNS), "source": "smol-magpie-ultra"}, [TURNS]),
    "open-r1/OpenR1-Math-220k": (
        {"problem": "Q", "answer": "4", "generations": ["A", "B"], "messages": chat()},
        QA,
    ),
    "mlabonne/FineTome-100k": ({"conversations": sharegpt(), "source": "x", "score": 5.2}, QA),
    "NousResearch/hermes-function-calling-v1": (
        {"id": "85", "conversations": sharegpt(), "tools": json.dumps(TOOLS), "task": "Locks"},
        [[("tools", json.dumps(TOOLS)), *CHAT]],
    ),
    "lmsys/lmsys-chat-1m": (
        {"conversation_id": "f0", "model": "m", "conversation": chat(), "redacted": False},
        QA,
    ),
    "allenai/WildChat-1M": (
        {"conversation_hash": "c", "conversation": [turn | VISITOR for turn in chat()], "turn": 1},
        QA,
    ),
    "tatsu-lab/alpaca": (
        {"instruction": "Q", "input": "I", "output": "A", "text": "Below ... Q ... I ... A"},
        [[("user", "Q\n\nI"), ("assistant", "A")]],
    ),
    "yahma/alpaca-cleaned": ({"output": "A", "input": "", "instruction": "Q"}, QA),
    "databricks/databricks-dolly-15k": (
        {"instruction": "Q", "context": "C", "response": "A", "category": "closed_qa"},
        [[("user", "Q\n\nC"), ("assistant", "A")]],
    ),
    "Open-Orca/OpenOrca": (
        {"id": "n", "system_prompt": "S", "question": "Q", "response": "A"},
        [WITH_SYSTEM],
    ),
    "openai/gsm8k": ({"question": "Q", "answer": "A"}, QA),
    "FreedomIntelligence/medical-o1-reasoning-SFT": (
        {"Question": "Q", "Complex_CoT": "T", "Response": "A"},
        [[("user", "Q"), ("assistant", "<think>\nT\n</think>\n\nA")]],
    ),
    "b-mc2/sql-create-context": (
        {"answer": "A", "question": "Q", "context": "CREATE TABLE"},
        [[("user", "Q\n\nCREATE TABLE"), ("assistant", "A")]],
    ),
    "bigcode/the-stack-smol": ({"content": "C", "lang": "Python", "size": 9}, [[("text", "C")]]),
    "HuggingFaceH4/ultrafeedback_binarized": (
        {"prompt": "Q", "prompt_id": "f", "messages": chat(), "score_chosen": 8.5} | DIALOGS,
        PAIR,
    ),
    "mlabonne/orpo-dpo-mix-40k": ({"source": "x", "prompt": "Q", "question": "Q"} | DIALOGS, PAIR),
    "Intel/orca_dpo_pairs": (
        {"system": "S", "question": "Q", "chosen": "A", "rejected": "B"},
        SYSTEM_PAIR,
    ),
    "argilla/distilabel-intel-orca-dpo-pairs": (
        {"system": "", "input": "Q", "chosen": "A", "rejected": "B", "generations": ["A", "B"]},
        PAIR,
    ),
    "hiyouga/DPO-En-Zh-20k": (
        {
            "conversations": sharegpt([("user", "Q")]),
            "chosen": {"from": "gpt", "value": "A"},
            "rejected": {"from": "gpt", "value": "B"},
        },
        PAIR,
    ),
}


def test_docs_name_the_fields_of_each_kind_of_set() -> None:
    kinds = {frozenset(fields) for fields in SETS.values()}
    assert kinds == {frozenset(SETS[name]) for name in RECORDS}
    assert len(SETS) >= 30


@pytest.mark.parametrize("name", RECORDS)
def test_fields_of_docs_read_a_record_of_the_set(name: str) -> None:
    record, chats = RECORDS[name]
    expected = [rendered(turns) for turns in chats]
    (role, text), *turns = chats[0]
    if role == "tools":
        _, learned = rendered(turns)
        expected = [(text + rendered(turns)[0], learned)]
    elif role == "text":
        expected = [(text, text)]
    pairs = "chosen" in SETS[name]
    found = render(record, SETS[name], pairs=pairs, completion_only=role != "text")
    assert found == expected


# ---- without `fields`

READ: dict[str, tuple[dict[str, Any], Chat]] = {
    "messages": ({"messages": chat(TURNS)}, TURNS),
    "a table's nulls": (
        {"messages": [turn | {"name": None, "weight": None} for turn in chat()], "text": None},
        CHAT,
    ),
    "conversations": ({"conversations": sharegpt(TURNS)}, TURNS),
    "weights": (
        {
            "conversations": [
                {"from": "system", "value": "S", "weight": None},
                {"from": "human", "value": "Q", "weight": 0.0},
                {"from": "gpt", "value": "A", "weight": 1.0},
            ]
        },
        WITH_SYSTEM,
    ),
    "a system message": ({"messages": chat(), "system": "S"}, WITH_SYSTEM),
    "tools as JSON text": ({"messages": chat(), "tools": "[]"}, CHAT),
    "messages to complete": (
        {"prompt": chat([("user", "Q")]), "completion": chat([("assistant", "A")])},
        CHAT,
    ),
    "a text that completes messages": ({"prompt": chat([("user", "Q")]), "completion": "A"}, CHAT),
    "parts of text": (
        {"messages": [{"role": r, "content": [{"type": "text", "text": t}]} for r, t in CHAT]},
        CHAT,
    ),
}


@pytest.mark.parametrize("name", READ)
def test_records_are_known_by_their_keys(name: str) -> None:
    record, turns = READ[name]
    assert render(record) == [rendered(turns)]


def test_texts_are_no_chats() -> None:
    assert render({"prompt": "Q: ", "completion": "A"}) == [("Q: A", "A")]
    assert render({"text": "T"}, completion_only=False) == [("T", "T")]


def loads(line: str) -> Any:
    """What `fields: ...` at the end of an error sets."""
    return yaml.safe_load(line.rpartition("fields: ")[2])


# What the error prints to type.
OTHER_KEYS: dict[str, tuple[dict[str, Any], str, dict[str, str]]] = {
    "metadata": (
        {"messages": chat(), "id": 1, "source": "x"},
        "id, source",
        {"messages": "messages"},
    ),
    "conversations": (
        {"conversations": sharegpt(), "idx": 7},
        "idx",
        {"messages": "conversations"},
    ),
    "tools": (
        {"messages": chat(), "tools": [], "id": 1},
        "id",
        {"messages": "messages", "tools": "tools"},
    ),
    "system": (
        {"messages": chat(), "system": "S", "id": 1},
        "id",
        {"messages": "messages", "system": "system"},
    ),
    "empty": ({"messages": chat(), "history": []}, "history", {"messages": "messages"}),
    "messages and a question": (
        {"messages": chat(), "prompt": "Q", "text": "T"},
        "prompt, text",
        {"messages": "messages"},
    ),
    "completion": (
        {"prompt": "Q", "completion": "A", "label": True},
        "label",
        {"prompt": "prompt", "completion": "completion"},
    ),
}
# Marks of what is learned, which other trainers read of a record.
for key in ("loss_mask", "weight", "label"):
    OTHER_KEYS[key] = ({"messages": chat(), key: 0}, key, {"messages": "messages"})


@pytest.mark.parametrize("name", OTHER_KEYS)
def test_another_key_is_refused_with_the_fields_to_set(name: str) -> None:
    record, named, fields = OTHER_KEYS[name]
    with pytest.raises(ConfigError) as error:
        render(record)
    assert str(error.value).startswith(f"file:1: {named}")
    assert loads(str(error.value)) == fields
    assert render(record, fields, completion_only=False)


@pytest.mark.parametrize(
    ("record", "pairs"),
    [
        ({"instruction": "Q", "input": "", "output": "A"}, False),
        ({"question": "Q", "answer": "A"}, False),
        ({"prompt": "Q", "response": "A"}, False),
        ({"chosen": "A", "rejected": "B"}, False),
        ({"data": [{"text": "a"}]}, False),
        ({"question": "Q", "chosen": "A", "rejected": "B"}, True),
        ({"prompt": "Q", "accepted": "A", "rejected": "B"}, True),
        ({"prompt": "Q", "completion": "A"}, True),
        ({}, False),
    ],
    ids=str,
)
def test_a_record_of_other_keys_is_refused_by_them(record: dict[str, Any], pairs: bool) -> None:
    keys = ", ".join(record) or "none"
    with pytest.raises(ConfigError, match=f"^file:1: the line has the keys: {keys}; .*fields: "):
        render(record, pairs=pairs)


# ---- keys of messages


def with_key(key: str, value: Any) -> dict[str, Any]:
    messages = chat(TURNS)
    messages[1][key] = value
    return {"messages": messages}


def test_another_key_of_a_message_is_refused_with_the_fields_to_set() -> None:
    for key in ("country", "skip", "supervised", "is_label", "reward", "function_call", "refusal"):
        with pytest.raises(ConfigError, match=rf"^file:1: messages\[1\]: {key}: not read") as error:
            render(with_key(key, 1))
        assert render(with_key(key, 1), loads(str(error.value))) == [rendered(TURNS)]


def test_a_message_has_its_content_once() -> None:
    turns = sharegpt()
    turns[0]["content"] = "Q, too"
    with pytest.raises(
        ConfigError, match=r"^file:1: conversations\[0\]: content: not read"
    ) as error:
        render({"conversations": turns})
    assert render({"conversations": turns}, loads(str(error.value))) == [rendered(CHAT)]


def test_the_fields_to_set_lose_nothing_of_other_messages() -> None:
    """The message that is refused may be the only one without tool_calls, reasoning or weight."""
    template = tokenizer_of(
        "{% for m in messages %}[{{ m.role }}] {{ m.thinking }} {{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}</s>{% endfor %}"
    )
    call = {"function": {"name": "look", "arguments": {}}}
    read = {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call], "weight": 0}
    messages = [
        {"role": "user", "content": "Q", "id": 1},
        read,
        {"role": "assistant", "content": "A"},
    ]

    def texts(fields: Mapping[str, str] | None) -> list[str]:
        renderer = RecordRenderer(template, RecordFields(fields), completion_only=True)
        record = Record("file:1", {"messages": messages}, 0)
        return [rendered.text for rendered in renderer.render(record)]

    with pytest.raises(ConfigError, match="id: not read") as error:
        texts(None)
    (text,) = texts(loads(str(error.value)))
    assert "[assistant] hm look</s>" in text
    few = {"messages": "messages", "role": "role", "content": "content"}
    with pytest.raises(ConfigError, match="add weight: weight to fields"):
        texts(few)


def test_the_fields_to_set_are_those_of_the_kind() -> None:
    prompt = [{"role": "user", "content": "Q", "id": 1}]
    record = {"prompt": prompt, "completion": "A"}
    with pytest.raises(ConfigError, match=r"prompt\[0\]: id: not read") as error:
        render(record)
    assert render(record, loads(str(error.value))) == [rendered(CHAT)]
    record = {"prompt": prompt, "chosen": "A", "rejected": "B"}
    with pytest.raises(ConfigError, match=r"prompt\[0\]: id: not read") as error:
        render(record, pairs=True)
    found = render(record, loads(str(error.value)), pairs=True)
    assert found == [rendered(CHAT), rendered(REJECTED)]


MASKS = ["train", "loss_weight", "step_loss_mask", "masked", "weights", "Train_On"]


@pytest.mark.parametrize("key", MASKS)
def test_marks_of_what_is_learned_are_read_as_weight_or_refused(key: str) -> None:
    named = {"messages": "messages", "role": "role", "content": "content"}
    for fields in (None, named):
        with pytest.raises(
            ConfigError, match=rf"messages\[1\]: {key} is not read; write weight: 0"
        ):
            render(with_key(key, False), fields)
    found = render(with_key(key, 0), named | {"weight": key})
    assert found == [(rendered(TURNS)[0], "A</s>")]


def test_keys_of_messages_can_have_other_names() -> None:
    turns = [{"speaker": "user", "says": "Q", "id": 1}, {"speaker": "assistant", "says": "A"}]
    fields = {"messages": "dialog", "role": "speaker", "content": "says"}
    assert render({"dialog": turns, "id": 1}, fields) == [rendered(CHAT)]


def test_what_a_template_reads_of_messages_is_kept() -> None:
    reads = tokenizer_of(
        "{% for m in messages %}{{ m.country }}: {{ m['content'] }}</s>{% endfor %}"
    )
    renderer = RecordRenderer(reads, RecordFields(), completion_only=False)
    messages = [{"role": "user", "content": "Q", "country": "Peru"}]
    (found,) = renderer.render(Record("file:1", {"messages": messages}, 0))
    assert found.text == "Peru: Q</s>"
    prose = tokenizer_of("A loss of country.{% for m in messages %}{{ m.content }}{% endfor %}")
    renderer = RecordRenderer(prose, RecordFields(), completion_only=False)
    with pytest.raises(ConfigError, match="country: not read"):
        renderer.render(Record("file:1", {"messages": messages}, 0))


def test_roles_that_the_template_does_not_name_are_refused() -> None:
    messages = chat([("user", "Q0"), ("asistant", "A0"), *CHAT])
    with pytest.raises(ConfigError, match=r'messages\[1\]: role is "asistant", not one of'):
        render({"messages": messages})
    named = tokenizer_of("{% set known = ['asistant'] %}" + TEMPLATE)
    renderer = RecordRenderer(named, RecordFields(), completion_only=True)
    assert renderer.render(Record("file:1", {"messages": messages}, 0))


# ---- what `fields` can say


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({}, "is no kind of record"),
        ({"question": "q"}, "is no kind of record"),
        ({"messages": "m", "tool": "t"}, "is no kind of record; .*tools"),
        ({"prompt": "q"}, "is no kind of record"),
        ({"chosen": "c"}, "is no kind of record"),
        ({"user": "q", "completion": "a"}, "is no kind of record"),
        ({"messages": "m", "text": "t"}, "is no kind of record"),
        ({"text": "t", "system": "s"}, "text is not a chat"),
        ({"messages": "m", "role": "r"}, "name role and content"),
        ({"text": "{a"}, "no template"),
        ({"text": "{}"}, "no template"),
        ({"text": "{a!r}"}, "no template"),
        ({"text": "{a:3}"}, "no template"),
        ({"messages": "{m}"}, "name a key"),
    ],
    ids=str,
)
def test_fields_are_checked_at_the_start(fields: dict[str, str], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        DataConfig.model_validate({"dataset": "jsonl", "fields": fields})


@pytest.mark.parametrize(
    ("fields", "record", "text"),
    [
        ("{a}{b}", {"a": "A", "b": "B"}, "AB"),
        ("{{{a}}}: {b}.", {"a": "A", "b": "B"}, "{A}: B."),
        ("Q: {a}\nC: {b}\nA:", {"a": "A", "b": ""}, "Q: A\nA:"),
        ("Q: {a}\nC: {b}\nA:", {"a": "A", "b": None}, "Q: A\nA:"),
        ("le texte", {"le texte": "T"}, "T"),
    ],
)
def test_a_template_fills_in_texts(fields: str, record: dict[str, Any], text: str) -> None:
    assert render(record, {"text": fields}, completion_only=False) == [(text, text)]


@pytest.mark.parametrize(
    ("record", "part"),
    [
        ({"b": "B"}, "has no a, only b; name another key"),
        ({"a": 1}, "a is 1, not text"),
        ({"a": 0}, "a is 0, not text"),
        ({"a": ["A"]}, r"a is \[\"A\"\], not text"),
    ],
)
def test_a_record_that_fields_do_not_fit_is_refused(record: dict[str, Any], part: str) -> None:
    for source in ("{a}", "a"):
        match = part.replace("a is", "'a' is") if source == "a" else part
        with pytest.raises(ConfigError, match=f"^file:1: {match}"):
            render(record, {"text": source}, completion_only=False)
    with pytest.raises(ConfigError, match=r"^file:1: a is null"):
        render({"a": None}, {"text": "a"}, completion_only=False)


@pytest.mark.parametrize(
    "messages",
    [
        DAY,
        [DAY],
        [{"role": DAY, "content": "A"}],
        [{"role": "user", "content": DAY}],
        [{"role": "user", "content": [DAY]}],
        [{"role": "assistant", "tool_calls": DAY}],
        [{"role": "assistant", "tool_calls": [DAY]}],
        [{"role": "user", "content": "A", "weight": DAY}],
    ],
    ids=["messages", "message", "role", "content", "part", "calls", "call", "weight"],
)
def test_values_of_a_dataset_that_json_has_not_are_refused(messages: Any) -> None:
    with pytest.raises(ConfigError, match=r"^file:1: messages.* \[?\"2026-01-31\""):
        render({"messages": messages})
    with pytest.raises(ConfigError, match=r"tools: .*2026-01-31"):
        render({"messages": chat(), "tools": [DAY]})
    with pytest.raises(ConfigError, match='a is "2026-01-31", not text'):
        render({"a": DAY}, {"text": "{a}"})


def test_a_record_needs_every_key_that_fields_name() -> None:
    fields = {"messages": "messages", "tools": "functions"}
    assert render({"messages": chat(), "functions": None}, fields) == [rendered(CHAT)]
    with pytest.raises(ConfigError, match="has no functions"):
        render({"messages": chat()}, fields)


def test_a_system_prompt_needs_a_place() -> None:
    fields = {"messages": "messages", "system": "s"}
    with pytest.raises(ConfigError, match="s: the messages start with a system message, too"):
        render({"messages": chat(WITH_SYSTEM), "s": "T"}, fields)
    fields = {"prompt": "q", "completion": "a", "system": "s"}
    assert render({"q": "Q: ", "a": "A", "s": ""}, fields) == [("Q: A", "A")]
    with pytest.raises(ConfigError, match="s: a prompt that is a text has no place for it"):
        render({"q": "Q: ", "a": "A", "s": "S"}, fields)


def test_messages_as_json_text_are_no_prompt() -> None:
    record = {"prompt": json.dumps(chat([("user", "Q")])), "completion": "A"}
    with pytest.raises(ConfigError, match="prompt: is a list of objects as JSON text"):
        render(record)
    fields = {"prompt": "{prompt}", "completion": "completion"}
    assert render(record, fields) == [(record["prompt"] + "A", "A")]
    record = {"prompt": "Write JSON: ", "completion": '[{"role": "user"}]'}
    assert render(record)[0][1] == record["completion"]


def test_a_prompt_does_not_end_with_a_reply() -> None:
    record = {"prompt": chat(CHAT), "completion": "A"}
    with pytest.raises(ConfigError, match=r"prompt\[1\]: the prompt ends with a reply"):
        render(record)


def test_without_a_chat_template_only_texts_are_read() -> None:
    fields = RecordFields({"prompt": "{q}\n", "completion": "a"})
    renderer = RecordRenderer(ByteTokenizer(), fields, completion_only=True)
    (found,) = renderer.render(Record("file:1", {"q": "Q", "a": "A"}, 0))
    assert (found.text, found.target_spans) == ("Q\nA", [(2, 3)])
    renderer = RecordRenderer(ByteTokenizer(), RecordFields(), completion_only=True)
    with pytest.raises(ConfigError, match="no chat template"):
        renderer.render(Record("file:1", {"messages": chat()}, 0))


def test_fields_are_part_of_what_tokens_depend_on(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"a": "to be", "b": "or not"}) + "\n")
    found = [
        pack_files([file], ByteTokenizer(), 32, {"text": source}).fingerprint()
        for source in ("a", "b", "{a}")
    ]
    assert found[0] != found[1]
    assert found[0] == found[2]
