"""Downloads from the Hub contain only the files needed, and every error of the Hub has a remedy.

The Hub is a local server that implements the part of the protocol that a download needs.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from huggingface_hub import constants

from lm import prepare
from lm.errors import ConfigError
from lm.hf.base import find_base
from lm.hf.weights import (
    find_complete_source,
    find_source,
    is_model,
    load_model,
    model_defaults,
    read_structure,
)
from lm.plan import __main__ as plan
from lm.units import format_parameters
from tests.support.hf import LLAMA, make_reference, read_with_model_defaults
from tests.support.hyperparameters import named_keys
from tests.support.ranks import in_world
from tests.support.runs import run_fsdp
from tests.support.tokenizer_files import byte_level_tokenizer

pytestmark = pytest.mark.usefixtures("shared_cache")

COMMIT = "c" * 40
OTHER_WEIGHTS = ("consolidated.safetensors", "model.gguf", "pytorch_model.bin")
OTHER_FILES = ("README.md", "modeling.py", "tokens.tiktoken")


class Hub(BaseHTTPRequestHandler):
    """Serves the folder `files` as someone/llama and, gated, as someone/gated.

    someone/broken gets no answer.
    """

    files: ClassVar[Path]
    sent: ClassVar[list[str]] = []
    cut_short: ClassVar[set[str]] = set()
    """files whose next response ends half-way"""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        owner, name, *rest = path.removeprefix("/api/models").strip("/").split("/")
        if name == "broken":
            self.close_connection = True
        elif (owner, name) not in (("someone", "llama"), ("someone", "gated")):
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif path.startswith("/api/"):
            names = sorted(file.name for file in self.files.iterdir())
            files = [
                {
                    "type": "file",
                    "path": name,
                    "size": (self.files / name).stat().st_size,
                    "oid": "",
                }
                for name in names
            ]
            about = {
                "id": f"{owner}/{name}",
                "sha": COMMIT,
                "siblings": [{"rfilename": name} for name in names],
            }
            if rest and rest[0] == "revision" and rest[1] not in ("main", COMMIT):
                self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
            else:
                self.answer(
                    200, json.dumps(files if rest and rest[0] == "tree" else about).encode(), {}
                )
        elif name == "gated":
            self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
        else:
            self.send_file(rest[-1])

    def send_file(self, name: str) -> None:
        content = (self.files / name).read_bytes()
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if self.command == "GET":
            self.sent.append(name)
            if name in self.cut_short:
                self.cut_short.remove(name)
                return self.answer(200, content, headers, len(content) // 2)
        return self.answer(200, content, headers)

    def answer(
        self, status: int, content: bytes, headers: dict[str, str], upto: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:upto])
        self.close_connection = upto is not None

    def log_message(self, format: str, *_: object) -> None:  # noqa: A002
        pass


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a hub."""
    Hub.files = tmp_path_factory.mktemp("hub")
    make_reference(LLAMA).save_pretrained(Hub.files)
    for name in (*OTHER_WEIGHTS, *OTHER_FILES):
        (Hub.files / name).write_text("not needed")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def cache(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Direct downloads to `hub` and an empty cache; returned for further changes."""
    monkeypatch.setattr(constants, "ENDPOINT", hub)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    return monkeypatch


def refusal(source: str) -> str:
    with pytest.raises(ConfigError) as refused:
        find_source(source)
    (problem,) = refused.value.problems
    assert problem.startswith(f"init_from: {source}: ")
    assert named_keys(refused.value) >= {"init_from"}
    assert "\n" not in problem
    return problem


@pytest.fixture
def downloaded(cache: pytest.MonkeyPatch) -> Path:
    """A model's folder in the cache, after a download that was interrupted once."""
    del cache
    Hub.sent.clear()
    Hub.cut_short.add("model.safetensors")
    return find_source("someone/llama")


@pytest.mark.slow
def test_find_source_downloads_only_needed_files(downloaded: Path) -> None:
    needed = ["config.json", "generation_config.json", "model.safetensors"]
    assert sorted(path.name for path in downloaded.iterdir()) == needed
    assert sorted(Hub.sent) == [*needed, "model.safetensors"], "requested again where it was cut"
    original = (Hub.files / "model.safetensors").read_bytes()
    assert (downloaded / "model.safetensors").read_bytes() == original


@pytest.mark.slow
def test_source_of_an_export_has_all_files_but_other_weights(downloaded: Path) -> None:
    before = {path.name for path in downloaded.iterdir()}
    assert find_complete_source("someone/llama") == downloaded
    assert {path.name for path in downloaded.iterdir()} == before | set(OTHER_FILES)


@pytest.mark.slow
def test_find_source_in_the_cache_needs_no_hub(downloaded: Path, cache: pytest.MonkeyPatch) -> None:
    cache.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_source("someone/llama") == downloaded
    assert find_source(f"someone/llama@{COMMIT}") == downloaded
    assert is_model("someone/llama@main")
    assert model_defaults("someone/llama")["vocab_size"] == LLAMA["vocab_size"]


@pytest.mark.slow
def test_find_base_names_the_revision(downloaded: Path) -> None:
    del downloaded
    base = in_world(lambda world: find_base("someone/llama", world))
    assert (base.source, base.files.keys()) == (f"someone/llama@{COMMIT}", {"model.safetensors"})


@pytest.mark.slow
def test_load_model_follows_the_links_of_the_cache(downloaded: Path) -> None:
    config = read_structure(downloaded)
    model = load_model(downloaded, config, torch.device("cpu"), torch.float32)
    expected = make_reference(LLAMA).state_dict()
    assert all(each.equal(expected[name]) for name, each in model.network.state_dict().items())


@pytest.mark.usefixtures("cache")
def test_weights_are_not_downloaded_before_keys_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Hub.sent.clear()
    with pytest.raises(ConfigError, match="lrr: no such hyperparameter"):
        read_with_model_defaults({"init_from": "someone/llama", "lrr": 1})
    experiment = tmp_path / "a.yaml"
    experiment.write_text("hyperparameters: {init_from: someone/llama, batch_size: 1}")
    assert plan.main(["--config", str(experiment)]) == 0
    n_parameters = sum(each.numel() for each in make_reference(LLAMA).parameters())
    assert format_parameters(n_parameters) in capsys.readouterr().out
    assert set(Hub.sent) == {"config.json", "generation_config.json"}


USE_HUB = """
from huggingface_hub import constants

constants.ENDPOINT = "{hub}"
constants.HUGGINGFACE_CO_URL_TEMPLATE = "{hub}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
constants.HF_HUB_CACHE = "{cache}"
"""
"""What HF_ENDPOINT and HF_HOME do before the import, which a forked process has done."""


@pytest.mark.slow
def test_dry_run_downloads_no_weights(hub: str, tmp_path: Path) -> None:
    """Nor those of a base, of which a run takes the checksums."""
    Hub.sent.clear()
    script = USE_HUB.format(hub=hub, cache=tmp_path / "cache")
    config = {"init_from": "someone/llama", "lora_rank": 2, "max_steps": 1, "batch_size": 1}
    run_fsdp(tmp_path, "--dry-run", config=config, script=script, code=0)
    assert set(Hub.sent) == {"config.json", "generation_config.json"}
    run_fsdp(tmp_path, config=config, script=script, code=0)
    assert "model.safetensors" in Hub.sent


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("someone/gated", "gated repo"),
        ("someone/else", "Repository Not Found"),
        ("someone/llama@none", "Revision Not Found"),
        ("some--one/llama", "repo_id: 'some--one/llama'"),
        ("someone/broken", "Server disconnected"),
    ],
)
@pytest.mark.usefixtures("cache")
def test_find_source_error_has_a_remedy(source: str, part: str) -> None:
    problem = refusal(source)
    name = source.partition("@")[0]
    assert part in problem
    assert f"request access at https://huggingface.co/{name} and run `hf auth login`" in problem


def test_plan_without_a_network_needs_nothing_but_a_cached_config_json(
    cache: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find_source("someone/llama", ["config.json"])
    cache.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    experiment = tmp_path / "a.yaml"
    experiment.write_text("hyperparameters: {init_from: someone/llama, batch_size: 1}")
    assert plan.main(["--config", str(experiment)]) == 0
    with pytest.raises(ConfigError, match="is incomplete"):
        model_defaults("someone/llama")


def test_records_are_prepared_with_the_tokenizer_of_the_model_or_not_at_all(
    cache: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": 300}))
    (model / "tokenizer.json").write_bytes(byte_level_tokenizer())
    cache.setattr(Hub, "files", model)
    (tmp_path / "a.jsonl").write_text('{"text": "Hello"}\n' * 100)
    keys = {
        "init_from": "someone/llama",
        "dataset": "jsonl",
        "train_data": str(tmp_path / "a.jsonl"),
        "max_seq_len": 32,
    }
    experiment = tmp_path / "a.yaml"
    experiment.write_text(json.dumps({"hyperparameters": keys}))
    out = tmp_path / "out"
    assert prepare.main(["--config", str(experiment), "--out", str(out)]) == 0
    assert (out / "tokenizer.json").read_bytes() == byte_level_tokenizer()

    (model / "tokenizer.json").unlink()
    experiment.write_text(json.dumps({"hyperparameters": keys | {"init_from": str(model)}}))
    assert prepare.main(["--config", str(experiment), "--out", str(tmp_path / "new")]) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err


def test_find_source_without_a_network(cache: pytest.MonkeyPatch) -> None:
    download = "run `hf download someone/llama --local-dir DIRECTORY` "
    cache.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    problem = refusal("someone/llama")
    assert "Connection refused" in problem
    assert download in problem
    cache.setattr(constants, "HF_HUB_OFFLINE", True)
    problem = refusal("someone/llama")
    assert "HF_HUB_OFFLINE" in problem
    assert download in problem
