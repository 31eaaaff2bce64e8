"""`python -m lm.generate` needs only a checkpoint, written by any number of ranks."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lm import generate
from lm.checkpoint.manifest import read_manifest, write_manifest
from lm.data.tokenizer import FILE
from tests import support
from tests.conftest import Message

TEXT = "Grüße aus Köln, wo der Käse zäh und das Öl süß ist. "


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a two-rank run on text in which many letters take two bytes."""
    folder = tmp_path_factory.mktemp("generate")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text(TEXT * 40)
    config = support.TINY | {"dataset": "text", "train_data": "text", "vocab_size": 264, "max_seq_len": 64, "lr": 1e-2}
    done = support.run(folder, "max_steps=40", "batch_size=4", "report_rate=40", ranks=2, config=config)
    assert done.returncode == 0, done.stderr
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


def test_temperature_0_is_greedy(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = generate.load_model(checkpoint, torch.device("cpu"))
    tokens = tokenizer.encode("Köln, ")
    start = len(tokens)
    for _ in range(30):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    text = text_of(capsys, checkpoint, "--prompt", "Köln, ", "--max-new-tokens", 30, "--temperature", 0)
    assert text == "Köln, " + tokenizer.decode(tokens[start:]) + "\n"


@pytest.mark.slow
def test_text_is_printed_while_it_is_generated_in_complete_characters(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "lm.generate", checkpoint, "--prompt", "ü", "--max-new-tokens", "1000000"]
    with subprocess.Popen(command, cwd=support.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        received, characters = b"", 0
        try:
            while characters < 100:
                received += os.read(process.stdout.fileno(), 1 << 16)
                characters = len(received.decode())  # raises where it ends within a character
        finally:
            process.kill()
    assert len(received) > characters


@pytest.mark.slow
def test_invalid_utf8_from_the_model_does_not_end_a_run(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(support.llama2_tokenizer())
    (tmp_path / "a.txt").write_text(TEXT * 40)
    how = {"dataset": "text", "train_data": "a.txt", "tokenizer": FILE, "vocab_size": 384, "prompt": "to be"}
    done = support.run(tmp_path, "max_steps=1", "num_tokens=300", config=support.TINY | how)
    assert done.returncode == 0, done.stderr
    assert "\ufffd" in done.stdout


@pytest.mark.parametrize("missing", ["directory", "manifest", "checkpoint"])
def test_a_directory_without_a_checkpoint_is_refused(
    missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], message: Message
) -> None:
    where = tmp_path / "none" if missing == "directory" else tmp_path
    if missing == "checkpoint":
        (tmp_path / "checkpoints").mkdir()
    code, text = refusal(capsys, where, "--prompt", "a")
    assert code == 2
    assert text.startswith(f"{where}: ")
    message(text)


def test_a_checkpoint_without_a_tokenizer_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(checkpoint, tmp_path / "copy")
    write_manifest(tmp_path / "copy", read_manifest(checkpoint).model_copy(update={"tokenizer": None}))
    code, message = refusal(capsys, tmp_path / "copy", "--prompt", "a")
    assert code == 2
    assert "has no tokenizer (dataset: synthetic)" in message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--prompt", ""), "--prompt: is empty; it needs at least one character"),
        (("--prompt", "\udcff"), "--prompt: is not UTF-8"),
        (("--max-new-tokens", "-1"), "--max-new-tokens: -1 must be 0 or more"),
        (("--temperature", "-0.5"), "--temperature: -0.5 must be 0 or more"),
        (("--temperature", "nan"), "--temperature: nan must be 0 or more"),
        (("--top-k", "0"), "--top-k: 0 must be 1 or more"),
        (("--top-p", "0"), "--top-p: 0 must be above 0 and at most 1"),
        (("--top-p", "1.5"), "--top-p: 1.5 must be above 0 and at most 1"),
        (("--batch-size", "0"), "--batch-size: 0 must be 1 or more"),
        (("--seed", "-1"), "--seed: -1 must be from 0 to 2^63 - 1"),
    ],
)
def test_a_flag_out_of_range_is_refused(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, "anywhere", "--prompt", "a", *flags) == (2, message)


def test_invalid_flags_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["anywhere"], ["anywhere", "--prompt", "a", "--top-k", "many"], ["--prompt", "a"]):
        with pytest.raises(SystemExit) as stopped:
            generate.main(flags)
        assert stopped.value.code == 2
        assert "error: " in capsys.readouterr().err


def feed(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_prompts_from_standard_input_continue_as_each_does_alone(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ["Grüße ", "K", "wo der Käse zäh und ", "ö" * 50]
    how = ("--max-new-tokens", 30, "--seed", 3)
    alone = "".join(text_of(capsys, checkpoint, "--prompt", prompt, *how) for prompt in prompts)
    for batch_size, end in ((1, "\n"), (3, "\r\n"), (16, "\n")):
        feed(monkeypatch, (end.join(prompts) + end).encode())
        assert text_of(capsys, checkpoint, "--prompt", "-", *how, "--batch-size", batch_size) == alone


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1 of standard input: is empty; it needs at least one character"),
        (b"a\n\nb\n", "line 2 of standard input: is empty; it needs at least one character"),
        (b"a\n\xff\n", "standard input: byte 2 is not UTF-8"),
    ],
)
def test_invalid_standard_input_is_refused(
    content: bytes, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, content)
    assert refusal(capsys, "anywhere", "--prompt", "-") == (2, message)
