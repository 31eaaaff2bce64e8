"""What a stranger wrote is refused in a short line, soon, in little memory, following no links."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm import generate, strict_yaml
from lm.checkpoint.__main__ import check_listed, describe_at
from lm.checkpoint.locate import find_checkpoint
from lm.checkpoint.manifest import (
    DRAFT,
    MANIFEST,
)
from lm.checkpoint.store import LocalCheckpoints
from lm.data.tokenizer.files import TOKENIZER_JSON
from lm.data.tokenizer.loading import load_tokenizer
from lm.errors import ConfigError, RunError
from lm.fileio import write_durably
from lm.hf.base import load_model
from lm.hf.class_weights import open_weights
from lm.hf.export import export_model
from lm.hf.weights import read_structure
from lm.metrics.sinks import JSONL
from lm.prepare import main as prepare
from lm.runtime.run_dir import RunDir
from lm.runtime.run_state import STATE
from lm.storage.folder import drafted, record, writing
from tests.support import REPOSITORY
from tests.support.checkpoints import WEIGHTS_FILE, forge_manifest, rewrite_header, write_checkpoint
from tests.support.ranks import in_world

EVIL = "\x1b[2J\x1b]0;title\x07" + "x" * 100_000


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint."""
    folder = write_checkpoint(tmp_path / "checkpoint")
    assert load(folder)
    return folder


def forge_tokenizer(folder: Path, **changes: Any) -> None:
    content = json.dumps(json.loads((folder / TOKENIZER_JSON).read_text()) | changes).encode()
    (folder / TOKENIZER_JSON).write_bytes(content)
    forge_manifest(folder)


def forge_header(folder: Path, entries: dict[str, Any]) -> None:
    """Give the file of the weights a header with `entries` alone, and the bytes of these."""
    path = folder / WEIGHTS_FILE
    rewrite_header(path, lambda _: entries)
    (header_length,) = struct.unpack("<Q", path.read_bytes()[:8])
    n_bytes = max(entry["data_offsets"][1] for entry in entries.values())
    os.truncate(path, 8 + header_length + n_bytes)
    forge_manifest(folder)


def load(folder: Path) -> object:
    return load_model(folder, torch.device("cpu"))


def nested(levels: int) -> list[Any]:
    return [] if levels == 0 else [nested(levels - 1)]


def structure(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: forge_manifest(
        folder, model=json.loads((folder / MANIFEST).read_text())["model"] | changes
    )


def set_nan(folder: Path) -> None:
    path = folder / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-4] + struct.pack("<f", float("nan")))
    forge_manifest(folder)


def add_token(folder: Path) -> None:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    added = json.loads((folder / TOKENIZER_JSON).read_text())["added_tokens"]
    forge_tokenizer(folder, added_tokens=[*added, {"id": 300, "content": "To be", **flags}])
    forge_manifest(folder, tokenizer=load_tokenizer(str(folder)).identity)


BYTE = {"dtype": "U8", "shape": [1]}
ALL = {"all": {"dtype": "U8", "shape": [306_816], "data_offsets": [0, 306_816]}}
"""a header whose tensor has the bytes of the model"""
HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "100,000 files": (
        lambda folder: forge_manifest(
            folder,
            files={
                f"model-{i:05}-00000.safetensors": {"bytes": 1, "crc32c": 1} for i in range(100_000)
            },
        ),
        "has 310352 bytes, but 1 were",
    ),
    "a manifest of 9 MB": (
        lambda folder: forge_manifest(folder, hyperparameters={"x": [[]] * 1_500_000}),
        "at most 8,388,608",
    ),
    "a sparse manifest of a terabyte": (
        lambda folder: os.truncate(folder / MANIFEST, 1 << 40),
        "at most 8,388,608",
    ),
    "a nested manifest": (
        lambda folder: forge_manifest(folder, dataset_state=[{"a": nested(200)}]),
        "more than 32 levels",
    ),
    "10^7 layers": (
        structure(n_layers=10**7),
        "n_layers: Input should be less than or equal to 4096",
    ),
    "4096 layers": (structure(n_layers=4096), "117,721,888 parameters"),
    "a terabyte of embeddings": (
        structure(d_model=2**17, vocab_size=2**22),
        "1,511,963,361,280 parameters",
    ),
    "a model that does not exist": (structure(n_heads=5), "model: n_heads: 5 "),
    "a preset that does not exist": (structure(model=EVIL), "model: unknown preset '\\x1b[2J"),
    "adapters of a base of a terabyte": (
        lambda folder: forge_manifest(
            folder,
            base={
                "source": str(folder),
                "files": {"model.safetensors": {"bytes": 1 << 50, "crc32c": 1}},
            },
            model=json.loads((folder / MANIFEST).read_text())["model"] | {"n_layers": 2**12},
        ),
        "hyperparameters.lora_rank: null",
    ),
    "control characters in sharding": (
        lambda folder: forge_manifest(folder, sharding=EVIL),
        "damaged: sharding: ",
    ),
    "control characters in the tokenizer": (
        lambda folder: forge_manifest(folder, tokenizer=EVIL),
        "damaged: tokenizer: ",
    ),
    "control characters in a tensor's name": (
        lambda folder: forge_header(folder, {EVIL: ALL["all"]}),
        "damaged: model.",
    ),
    "no fingerprint of the data": (
        lambda folder: forge_manifest(folder, data={}),
        "damaged: data: ",
    ),
    "90,000 tensors": (
        lambda folder: forge_header(
            folder, {f"{i}": BYTE | {"data_offsets": [i, i + 1]} for i in range(90_000)}
        ),
        "more than 65,536 entries",
    ),
    "an empty tensor": (
        lambda folder: forge_header(
            folder, {"x": BYTE | {"shape": [0], "data_offsets": [0, 0]}} | ALL
        ),
        "damaged header: x: ",
    ),
    "NaN": (set_nan, "safetensors: contains inf or NaN"),
    "a tokenizer of another identity": (
        lambda folder: forge_manifest(folder, tokenizer="300 tokens, sha256 0"),
        "written with 300 tokens, sha256 0",
    ),
    "a tokenizer of 44 MB": (
        lambda folder: forge_tokenizer(folder, x=[[]] * 11_000_000),
        "at most 41,943,040",
    ),
    "a nested tokenizer": (
        lambda folder: forge_tokenizer(folder, normalizer=nested(400)),
        "transformers cannot use it: ",
    ),
}


LARGE = {"100,000 files", "90,000 tensors", "a manifest of 9 MB", "a tokenizer of 44 MB"}
"""cases of seconds"""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case in LARGE else ()) for case in HOSTILE],
)
def test_hostile_checkpoint_is_refused(case: str, saved: Path) -> None:
    forge, part = HOSTILE[case]
    forge(saved)
    memory, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(RunError) as refused:
        load(saved)
    assert time.process_time() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 1 << 20  # KiB
    assert all(len(problem) < 1100 for problem in refused.value.problems)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", str(refused.value))
    assert part in refused.value.problems[0]


def test_token_that_the_model_does_not_have_is_refused_where_it_occurs(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_token(saved)
    assert generate.main([str(saved), "--prompt", "or not", "--max-new-tokens", "2"]) == 0
    assert generate.main([str(saved), "--prompt", "To be", "--max-new-tokens", "2"]) == 2
    assert f'tokenizer: {saved}: "To be" is id 300, ' in capsys.readouterr().err


def irregular(path: Path, kind: str, target: Path) -> None:
    """Put a FIFO, a device or a link to `target` at `path`."""
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(target)
    else:
        try:
            os.mknod(path, 0o20666, os.makedev(1, 5))  # /dev/zero
        except PermissionError:
            pytest.skip("needs root")


@pytest.mark.parametrize("kind", ["fifo", "device", "link"])
@pytest.mark.parametrize("name", [MANIFEST, WEIGHTS_FILE, TOKENIZER_JSON])
def test_checkpoint_files_must_be_regular(
    kind: str, name: str, saved: Path, tmp_path: Path
) -> None:
    (saved / name).rename(tmp_path / "elsewhere")
    irregular(saved / name, kind, tmp_path / "elsewhere")
    for use in (load, lambda folder: export_model(folder, tmp_path / "out")):
        with pytest.raises(RunError, match=rf"^{saved}.*{name}: .*(not a regular|symbolic link)"):
            use(saved)


def test_find_checkpoint_is_not_blocked_by_a_fifo(saved: Path, tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "hung").mkdir(parents=True)
    os.mkfifo(checkpoints / "hung" / MANIFEST)
    saved.rename(checkpoints / "good")
    assert find_checkpoint(tmp_path / "run") == checkpoints / "good"


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file outside of the current folder, which stays as it is."""
    path = tmp_path / "private"
    path.write_text("private")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield path
    assert path.read_text() == "private"


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_run_writes_through_no_links_and_waits_for_no_fifos(kind: str, private: Path) -> None:
    run_dir = RunDir("x")
    in_world(run_dir.lock)
    for path in (
        run_dir.path / "config.yaml.draft",
        run_dir.path / "metrics.jsonl.draft",
        Path("file"),
    ):
        irregular(path, kind, private)
    run_dir.add_session({"lr": 1}, {"step": 0})
    JSONL(run_dir.path, 0, ()).close()
    write_durably(Path("file"), b"new")
    assert Path("file").read_bytes() == b"new"
    irregular(run_dir.path / f"{STATE}.draft", kind, private)
    LocalCheckpoints(run_dir.checkpoints).prune(1, ())
    irregular(run_dir.metrics, kind, private)
    with pytest.raises(OSError, match="not a regular file"):
        JSONL(run_dir.path, 0, ())


@pytest.mark.parametrize(
    "name", ["runs/x", "runs/x/checkpoints", "runs/x/traces", "runs/x/training"]
)
def test_run_dir_refuses_links(name: str, private: Path) -> None:
    Path(name).parent.mkdir(parents=True)
    Path(name).symlink_to(private.parent)
    with pytest.raises(ConfigError, match=f"^{name}: is a symbolic link"):
        in_world(RunDir("x").lock)


def test_checkpoints_through_a_link_are_not_used(private: Path, saved: Path) -> None:
    (private.parent / "others").mkdir()
    saved.rename(private.parent / "others" / "good")
    Path("run").mkdir()
    Path("run/checkpoints").symlink_to(private.parent / "others")
    for use in (lambda: find_checkpoint(Path("run")), lambda: describe_at("run", check_listed)):
        with pytest.raises(RunError, match="run/checkpoints: is a symbolic link"):
            use()


START = """
import os, sys
from lm.start import start_run

start_run()
assert "torch" not in sys.modules, "which would have set it"
print(os.environ["TORCHINDUCTOR_CACHE_DIR"])
"""


@pytest.mark.parametrize("kind", ["private", "link", "writable"])
def test_compiled_code_is_kept_where_no_other_user_can_write(kind: str, private: Path) -> None:
    cache = Path(f"torchinductor_{os.getuid()}").absolute()
    if kind == "link":
        cache.symlink_to(private.parent)
    elif kind == "writable":
        cache.mkdir()
        cache.chmod(0o777)
    command = [sys.executable, "-c", START, "--config", str(REPOSITORY / "config.yaml")]
    env = os.environ | {"TMPDIR": str(cache.parent), "PYTHONPATH": str(REPOSITORY)}
    env.pop("TORCHINDUCTOR_CACHE_DIR", None)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if kind != "private":
        assert done.returncode == 2
        assert f"{cache}: " in done.stderr
        assert "set TORCHINDUCTOR_CACHE_DIR" in done.stderr
        return
    assert done.stdout.split()[-1] == str(cache), done.stderr
    assert cache.stat().st_mode & 0o777 == 0o700


def test_compiler_cache_that_is_no_directory_is_one_line(tmp_path: Path) -> None:
    cache = tmp_path / "file"
    cache.touch()
    command = [sys.executable, "-c", START, "--config", str(REPOSITORY / "config.yaml")]
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(f"{cache}: ")


@pytest.mark.parametrize(
    "command",
    [
        ["lm.generate", "x", "--prompt", "a"],
        ["lm.evaluate", "x", "--tasks", "x"],
        ["lm.hf", "export", "x", "out"],
        ["lm.hf", "examine", "llama"],
    ],
    ids=" ".join,
)
def test_commands_execute_no_compiled_code_of_others(command: list[str], tmp_path: Path) -> None:
    cache = tmp_path / f"torchinductor_{os.getuid()}"
    cache.mkdir()
    cache.chmod(0o777)
    env = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    env.pop("TORCHINDUCTOR_CACHE_DIR", None)
    line = [sys.executable, "-m", *command]
    done = subprocess.run(line, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{cache}: ")


@pytest.mark.slow
def test_leftovers_of_killed_commands_are_removed(
    private: Path,  # noqa: ARG001
    saved: Path,
) -> None:
    out = Path("out")
    with writing(out), drafted(out, if_exists="keep") as draft:
        left = draft.with_name(f"{draft.name[:-8]}12345678")
        left.mkdir()
        (left / "model-00009-of-00009.safetensors").touch()
        with pytest.raises(RunError, match="out: in use by process "):
            export_model(saved, out)
    assert [path.name for path in left.iterdir()] == ["model-00009-of-00009.safetensors"]
    out.rmdir()
    export_model(saved, out)
    assert [path.name for path in Path().iterdir()] == ["out"]
    assert sorted(path.name for path in Path("out").glob("model*")) == ["model.safetensors"]
    checkpoints = Path("run/checkpoints")
    for name in ("killed", "damaged"):
        (checkpoints / name).mkdir(parents=True)
        (checkpoints / name / WEIGHTS_FILE).touch()
    (checkpoints / "killed" / DRAFT).touch()
    (checkpoints / "empty").mkdir()
    LocalCheckpoints(checkpoints).prune(1, ())
    assert sorted(path.name for path in checkpoints.iterdir()) == ["damaged"]


LIBRARY_FAILS = {
    "panic": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "no unknown token": {
        "model": {"type": "WordLevel", "vocab": {"<|endoftext|>": 0}, "unk_token": "?"},
        "added_tokens": [],
    },
}


@pytest.mark.parametrize("changes", LIBRARY_FAILS.values(), ids=LIBRARY_FAILS)
def test_tokenizer_that_fails_in_the_library_is_named(changes: dict[str, Any], saved: Path) -> None:
    forge_tokenizer(saved, **changes)
    tokenizer = load_tokenizer(str(saved))
    for encode in (
        lambda: tokenizer.encode("text"),
        lambda: tokenizer.encode_batch(["text"]),
        lambda: tokenizer.encode_with_ends("text", with_start=True),
        lambda: tokenizer.tells_bytes("text", np.array([0])),
    ):
        with pytest.raises(ConfigError, match=f"^tokenizer: {saved}: ") as failed:
            encode()
        copy = pickle.loads(pickle.dumps(failed.value))  # as from a worker process
        assert str(copy) == str(failed.value)


def test_prompt_without_chat_renders_no_template(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = "{% for i in range(99999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
    (saved / "chat_template.jinja").write_text(slow)
    paths = [path for path in saved.iterdir() if path.name != MANIFEST]
    forge_manifest(saved, files={path.name: record(path).model_dump() for path in paths})
    start = time.process_time()
    assert generate.main([str(saved), "--prompt", "a", "--max-new-tokens", "1"]) == 0
    assert time.process_time() - start < 10
    assert capsys.readouterr().out.startswith("a")


def test_metrics_jsonl_survives_a_line_that_no_run_wrote(private: Path) -> None:  # noqa: ARG001
    good = '{"group": "training", "step": 1, "time": 1.0}\n'
    Path("metrics.jsonl").write_text(good + "[" * 200_000 + "\n")
    JSONL(Path(), 2, ()).close()
    assert Path("metrics.jsonl").read_text() == good


def test_prepare_does_not_write_through_a_link(
    private: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("out").symlink_to(private.parent)
    Path("in.txt").write_text("text")
    assert prepare(["in.txt", "--tokenizer", "bytes", "--out", "out"]) == 2
    assert "--out: out: is a link" in capsys.readouterr().err


def test_export_copies_only_listed_tokenizer_files(saved: Path, private: Path) -> None:
    (saved / "chat_template.jinja").symlink_to(private)
    (saved / "tokenizer_config.json").write_text('{"chat_template": "unlisted"}')
    export_model(saved, Path("out"))
    assert not Path("out/chat_template.jinja").exists()
    assert "unlisted" not in Path("out/tokenizer_config.json").read_text()


def test_code_of_a_tokenizer_is_not_executed(saved: Path) -> None:
    config = {
        "auto_map": {"AutoTokenizer": ["code.Mine", "code.Mine"]},
        "tokenizer_class": "Mine",
        "vocab_file": str(saved / "code.py"),
    }
    (saved / "tokenizer_config.json").write_text(json.dumps(config))
    (saved / "code.py").write_text("open('executed', 'w')\nclass Mine: pass\n")
    with pytest.raises(ConfigError, match=f"^tokenizer: {saved}: .*trust_remote_code"):
        load_tokenizer(str(saved))
    assert not Path("executed").exists()
    config = config | {"auto_map": {}}
    (saved / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(str(saved)).encode("to be")
    assert not Path("executed").exists()


@pytest.mark.slow
def test_open_model_follows_links_only_to_the_cache(saved: Path, private: Path) -> None:
    """The Hub's cache consists of links; files of other links would be copied into checkpoints."""
    export_model(saved, Path("exported"))
    snapshot = Path("models--x/snapshots/1")
    (snapshot.parent.parent / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in list(Path("exported").iterdir()):
        name = hashlib.sha1(path.read_bytes()).hexdigest()
        path.rename(f"models--x/blobs/{name}")
        (snapshot / path.name).symlink_to(f"../../blobs/{name}")
    assert read_structure(snapshot).vocab_size == 300
    open_weights(snapshot)
    assert load_tokenizer(str(snapshot)).vocab_size == 300
    (snapshot / "chat_template.jinja").symlink_to(private)
    with pytest.raises(
        ConfigError, match=f"^tokenizer: {snapshot}/chat_template.jinja: is a link to {private};"
    ):
        load_tokenizer(str(snapshot))


def test_yaml_aliases_of_aliases_are_refused() -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    lines += [
        f"{name}: &{name} [{', '.join([f'*{last}'] * 10)}]" for last, name in pairwise("abcdefghi")
    ]
    with pytest.raises(ConfigError, match=r"^test\.yaml: .*100,000 values"):
        strict_yaml.parse_yaml("\n".join(lines), "test.yaml")


@pytest.mark.slow
def test_sweep_of_resume_and_export() -> None:
    command = [sys.executable, "-m", "tests.sweep", "resume", "export", "--count", "1"]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_fuzz_of_checkpoints() -> None:
    from tests import fuzz

    assert fuzz.main(["100"]) == 0
