"""The examples of docs/notebook.md run as they are printed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.errors import ConfigError
from lm.hf.base import open_model
from tests.support import REPOSITORY
from tests.support.hyperparameters import TINY
from tests.support.ranks import in_world
from tests.support.runs import train_in_world

PAGE = (REPOSITORY / "docs" / "notebook.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
RUN = TINY | {"vocab_size": 264, "dataset": "text", "train_data": "text.txt", "num_tokens": 0}
RUN |= {"max_steps": 2, "validation_batches": 1, "dropout": 0.5}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two runs in the working directory."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(tmp_path_factory.mktemp("runs"))
        Path("quick.gguf").touch()
        Path("text.txt").write_text("def main(self):\n    return 1\n" * 100)
        for name in ("quickstart", "other"):
            in_world(partial(train_in_world, hyperparameters=RUN | {"run_name": name}))
        yield


@pytest.mark.usefixtures("runs")
def test_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    capsys.readouterr()
    for example in EXAMPLES:
        exec(example, names)
    assert names["logits"].shape == (1, len("def main("), 264)
    assert list(names["validation"]["step"]) == [2, 2]
    assert "quickstart" in capsys.readouterr().out


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("source", "options", "problem"),
    [
        ("runs/quikstart", {}, "runs/quikstart: .* did you mean .*/runs/quickstart"),
        ("ruins/quickstart", {}, "ruins/quickstart: .* did you mean runs"),
        ("quickstart", {}, "quickstart: .* did you mean runs/quickstart[?]"),
        ("quick.gguf", {}, "quick.gguf: is a file"),
        ("runs/quickstart", {"dtype": "bf16"}, "dtype: bf16: use one of float32, "),
        ("runs/quickstart", {"device": "cuda:99"}, "device: cuda:99: "),
        ("runs/quickstart", {"device": "gpu"}, "device: gpu: "),
        ("text.txt", {}, "text.txt: is a file"),
    ],
)
def test_wrong_use_is_one_line(source: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        open_model(source, **options)
    assert len(refused.value.problems) == 1


@pytest.mark.usefixtures("runs")
def test_model_has_the_dtype_and_no_dropout() -> None:
    model, _ = open_model("runs/quickstart", dtype="bfloat16")
    ids = torch.arange(8)[None]
    assert model(ids).equal(model(ids))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
