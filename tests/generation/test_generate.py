"""`python -m lm.generate` needs only a checkpoint, written by any number of ranks."""

from __future__ import annotations

import functools
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lm import generate
from lm.checkpoint.locate import find_checkpoint
from lm.checkpoint.manifest import read_manifest, write_manifest
from lm.data.tokenizer.files import TOKENIZER_JSON
from lm.hf.base import load_model
from lm.hf.export import export_model
from tests.support import PATIENCE, REPOSITORY
from tests.support.hyperparameters import TINY
from tests.support.runs import run_fsdp
from tests.support.tokenizer_files import (
    CHAT_TEMPLATE,
    llama_tokenizer,
)

TEXT = "Grüße aus Köln, wo der Käse zäh und das Öl süß ist. "


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a two-rank run on text in which many letters take two bytes."""
    folder = tmp_path_factory.mktemp("generate")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text(TEXT * 40)
    config = TINY | {
        "dataset": "text",
        "train_data": "text",
        "vocab_size": 264,
        "max_seq_len": 64,
        "lr": 1e-2,
    }
    run_fsdp(
        folder, "max_steps=40", "batch_size=4", "report_rate=40", ranks=2, config=config, code=0
    )
    return folder / "runs" / "test"


@pytest.fixture(scope="module")
def checkpoint(run: Path) -> Path:
    (folder,) = (path.parent for path in (run / "checkpoints").glob("*/manifest.json"))
    return folder


def text_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    code = generate.main([str(argument) for argument in arguments])
    output, errors = capsys.readouterr()
    assert (code, errors) == (0, "")
    return output


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = generate.main([str(argument) for argument in arguments])
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.count("\n") == 1
    return code, errors.strip()


def test_generate_temperature_0_is_greedy(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = load_model(checkpoint, torch.device("cpu"))
    tokens = tokenizer.encode("Köln, ")
    start = len(tokens)
    for _ in range(30):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    text = text_of(
        capsys, checkpoint, "--prompt", "Köln, ", "--max-new-tokens", 30, "--temperature", 0
    )
    assert text == "Köln, " + tokenizer.decode(tokens[start:]) + "\n"


@pytest.mark.slow
def test_generate_prints_complete_characters_as_they_come(checkpoint: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "lm.generate",
        checkpoint,
        "--prompt",
        "ü",
        "--max-new-tokens",
        "1000000",
    ]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        received, characters = b"", 0
        try:
            while characters < 100:
                received += os.read(process.stdout.fileno(), 1 << 16)
                characters = len(received.decode())  # raises where it ends within a character
        finally:
            process.kill()
    assert len(received) > characters


@pytest.mark.parametrize(
    ("missing", "part"),
    [("directory", "No such file"), ("manifest", "neither"), ("checkpoint", "neither")],
)
def test_generate_needs_a_checkpoint(
    missing: str, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "none" if missing == "directory" else tmp_path
    if missing == "checkpoint":
        (tmp_path / "checkpoints").mkdir()
    code, text = refusal(capsys, where, "--prompt", "a")
    assert code == 2
    assert text.startswith(f"{where}: {part}")


def test_generate_needs_a_tokenizer(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(checkpoint, tmp_path / "copy")
    write_manifest(
        tmp_path / "copy", read_manifest(checkpoint).model_copy(update={"tokenizer": None})
    )
    code, message = refusal(capsys, tmp_path / "copy", "--prompt", "a")
    assert code == 2
    assert (
        "has no tokenizer: trained on random tokens, or on ids of an unknown tokenizer" in message
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--prompt", ""), "--prompt: is empty; it needs at least one character"),
        (("--max-new-tokens", "-1"), "--max-new-tokens: -1 must be 0 or more"),
        (("--temperature", "-0.5"), "--temperature: -0.5 must be 0 or more"),
        (("--seed", "-1"), "--seed: -1 must be from 0 to 9223372036854775807"),
        (("--top-k", "0"), "--top-k: 0 must be 1 or more"),
        (("--top-p", "nan"), "--top-p: nan must be from 1e-06 to 1"),
        (("--top-p", "0"), "--top-p: 0 must be from 1e-06 to 1"),
    ],
)
def test_generate_flag_out_of_range_is_refused(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, "anywhere", "--prompt", "a", *flags) == (2, message)


def test_generate_without_a_prompt_says_what_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["anywhere"]) == 2
    assert "--prompt: is missing; " in capsys.readouterr().err


def feed(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_generate_refuses_a_prompt_beyond_the_context(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text_of(capsys, checkpoint, "--prompt", "a" * 64, "--max-new-tokens", 1)
    code, message = refusal(capsys, checkpoint, "--prompt", "a" * 65)
    assert code == 2
    assert message.startswith("--prompt: 65 tokens exceed max_seq_len 64")


def test_generate_sends_a_terminal_no_control_characters(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    how = (checkpoint, "--prompt", "a\x1b[2J\r\x9b\tb\nü", "--max-new-tokens", 0)
    assert text_of(capsys, *how) == "a\x1b[2J\r\x9b\tb\nü\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert text_of(capsys, *how) == "a\\x1b[2J\\r\\x9b\tb\nü\n"


def test_generate_stdin_is_one_prompt(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = "Grüße \nK\r\n\nwo der Käse"
    how = ("--max-new-tokens", 30, "--seed", 3)
    expected = text_of(capsys, checkpoint, "--prompt", prompt, *how)
    feed(monkeypatch, prompt.encode())
    assert text_of(capsys, checkpoint, "--prompt", "-", *how) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "standard input: is empty; it needs at least one character"),
        (b"a\n\xff\n", "standard input: byte 2 is not UTF-8"),
    ],
)
def test_generate_stdin_that_is_invalid_is_refused(
    content: bytes,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feed(monkeypatch, content)
    assert refusal(capsys, "anywhere", "--prompt", "-") == (2, message)


# ---- chat

SYSTEM, HI, HO = (
    {"role": role, "content": text}
    for role, text in [("system", "0"), ("user", "hi"), ("assistant", "ho")]
)
CHATS = [
    [HI, HO],
    [HI, HO, HI, {"role": "assistant", "content": "to be"}],
    [SYSTEM, HI, {"role": "assistant", "content": "or not"}],
]


@pytest.fixture(scope="module")
def chat_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run that has learned `CHATS`."""
    folder = tmp_path_factory.mktemp("chat")
    (folder / TOKENIZER_JSON).write_bytes(llama_tokenizer())
    template = CHAT_TEMPLATE.replace(
        "] ", "]"
    )  # a space would be a part of the first token of the reply
    (folder / "set.jinja").write_text(template)
    specials = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ unused }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(specials))
    (folder / "chats.jsonl").write_text(
        "".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS)
    )
    data = {
        "dataset": "jsonl",
        "train_data": "chats.jsonl",
        "val_data": "chats.jsonl",
        "tokenizer": TOKENIZER_JSON,
        "chat_template": "set.jinja",
    }
    shape = {
        "vocab_size": 200,
        "max_seq_len": 64,
        "positions": "rope",
        "norm": "rmsnorm",
        "ffn": "swiglu",
        "bias": "none",
        "loss_on": "completion",
        "packing": False,
    }
    how = {
        "max_steps": 150,
        "batch_size": 3,
        "lr": 1e-2,
        "report_rate": 150,
        "validation_batches": 1,
    }
    run_fsdp(folder, config=TINY | data | shape | how, code=0)
    return folder / "runs" / "test"


@pytest.mark.slow
def test_export_has_the_chat_template_of_the_run(chat_run: Path, tmp_path: Path) -> None:
    import transformers

    export_model(chat_run, tmp_path / "out")
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert exported.chat_template == (chat_run.parent.parent / "set.jinja").read_text()


@pytest.mark.slow
def test_chat_remembers_earlier_lines(
    chat_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    how = (chat_run, "--chat", "--temperature", 0)
    feed(monkeypatch, b"hi\n\nhi\n")
    assert text_of(capsys, *how) == "ho\nto be\n"
    assert text_of(capsys, *how, "--prompt", "hi") == "ho\n"
    feed(monkeypatch, b"hi\n" * 8)
    answers = text_of(capsys, *how).splitlines()
    assert len(answers) == 8  # the oldest messages have made room
    feed(monkeypatch, b"hi " * 30)
    assert generate.main([str(argument) for argument in how]) == 0
    assert "max_seq_len 64" in capsys.readouterr().err
    code, message = refusal(capsys, *how, "--prompt", "hi " * 30)
    assert code == 2
    assert message.startswith("--prompt: too long: ")


@pytest.mark.slow
def test_chat_answers_have_different_seeds(
    chat_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, b"hi\nhi\n")
    uniform = ("--temperature", 1e9, "--max-new-tokens", 8)
    output = text_of(capsys, chat_run, "--chat", *uniform)
    feed(monkeypatch, b"hi\n")
    first = text_of(capsys, chat_run, "--chat", *uniform)
    assert output.removeprefix(first) not in (output, first)


@pytest.mark.slow
def test_chat_ctrl_c_ends_the_answer(chat_run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(find_checkpoint(chat_run), tmp_path / "copy"))
    manifest = read_manifest(folder)
    write_manifest(
        folder, manifest.model_copy(update={"model": manifest.model | {"max_seq_len": 10**5}})
    )
    endless = (
        "from lm import generate\n"
        "from lm.data.tokenizer.file_tokenizer import FileTokenizer\n"
        "FileTokenizer.chat_stop_ids = frozenset()"
    )
    script = f"import sys; {endless}; sys.exit(generate.main())"
    command = [sys.executable, "-c", script, folder, "--chat", "--temperature", "100"]
    streams: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    # A shell's background jobs, and their children, ignore SIGINT.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, cwd=REPOSITORY, preexec_fn=heed, **streams) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(2):
            process.stdin.write(b"hi\n")
            process.stdin.flush()
            received = b""
            while len(received) < 50 and (block := os.read(process.stdout.fileno(), 1 << 16)):
                received += block
            process.send_signal(signal.SIGINT)
            while not received.endswith(b"\n") and (
                block := os.read(process.stdout.fileno(), 1 << 16)
            ):
                received += block
        output, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, output, errors) == (0, b"", b"")


def test_chat_needs_a_chat_template(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = refusal(capsys, checkpoint, "--chat")
    assert code == 2
    assert text.startswith("tokenizer: bytes: has no chat template")
