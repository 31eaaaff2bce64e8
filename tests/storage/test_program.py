"""What is kept of a computation is named by the sources of all modules that computed it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from lm.data.tokenizer.files import TOKENIZER_JSON
from lm.model_config import ModelConfig
from lm.program import describe_program
from lm.training import parallelize
from model import Transformer
from tests.support import REPOSITORY
from tests.support.hf import complete_values
from tests.support.tokenizer_files import byte_level_tokenizer

COMPUTE = {
    "lm.data.records": """
from lm.data import records
from lm.data.tokenized import RecordOptions
from lm.data.tokenizer.loading import load_tokenizer
chat = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]}
pair = {"prompt": "Who?", "chosen": "I.", "rejected": "You."}
template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|endoftext|>{% endfor %}"
template += "{% if add_generation_prompt %}[assistant]{% endif %}"
Path("template.jinja").write_text(template)
for record, objective in ((chat, "next-token"), (pair, "dpo")):
    Path("a.jsonl").write_text(json.dumps(record))
    tokenizer = load_tokenizer("tokenizer", "template.jinja")
    records.write(Path(), [Path("a.jsonl")], tokenizer, RecordOptions(objective=objective))
""",
    "lm.data.text": """
from lm.data import text
from lm.data.tokenized import TextOptions
from lm.data.tokenizer.loading import load_tokenizer
Path("a.txt").write_text("to be")
text.write(Path(), [Path("a.txt")], load_tokenizer("tokenizer"), TextOptions("text"))
""",
    "lm.hf.examine": """
from lm.hf.examine import examine
examine(json.loads(Path("llama.json").read_text()))
""",
    "lm.flops": """
from lm.flops import count_flops_per_token
from lm.model_config import ModelConfig
from lm.training.config import LoraConfig
model = ModelConfig(d_model=32, n_heads=2, n_layers=1, vocab_size=64, max_seq_len=8)
count_flops_per_token(LoraConfig(lora_rank=2), model)
""",
}
"""Scripts that compute what these modules keep."""
CHANGE = """
import importlib
import json
import os
import sys
from pathlib import Path

import torch

def change(module, compute):
    exec(compute, globals())
    from lm import program

    before = program.describe_program(module, ())["sources"]
    used = []
    for name, imported in sys.modules.items():
        if name in ("lm.program", "lm.launch.requirements"):  # which all that runs here imports
            continue
        if name == "model" or name.startswith("lm."):
            path = Path(imported.__file__)
            if path.name != "__init__.py":
                used.append(name)
                path.write_bytes(path.read_bytes() + b"#")
    after = importlib.reload(program).describe_program(module, ())["sources"]
    same = [name for name in used if before.get(name) == after.get(name)]
    print(json.dumps([module, len(used), same]), flush=True)

for module, compute in json.loads(sys.argv[1]).items():
    child = os.fork()  # which need not import PyTorch again
    if child == 0:
        change(module, compute)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.parametrize(
    "modules",
    [
        ["lm.data.text"],
        pytest.param(["lm.data.records", "lm.hf.examine", "lm.flops"], marks=pytest.mark.slow),
    ],
    ids=len,
)
def test_change_of_any_module_that_computes_is_another_program(
    modules: list[str], tmp_path: Path
) -> None:
    shutil.copytree(REPOSITORY / "lm", tmp_path / "lm")
    shutil.copy(REPOSITORY / "model.py", tmp_path)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / TOKENIZER_JSON).write_bytes(byte_level_tokenizer())
    (tmp_path / "llama.json").write_text(json.dumps(complete_values("llama")))
    done = subprocess.run(
        [sys.executable, "-c", CHANGE, json.dumps({each: COMPUTE[each] for each in modules})],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [module for module, _, _ in found] == modules, done.stderr
    for _, n_used, not_in_program in found:
        assert n_used > 10
        assert not_in_program == []


def test_a_program_is_described_alike_in_all_processes() -> None:
    """What is kept is found by this text."""
    script = "from lm.program import describe_program; print(describe_program('lm.flops', ()))"
    described: set[str] = set()
    for seed in "12":  # which orders sets
        env = os.environ | {"PYTHONHASHSEED": seed}
        described.add(
            subprocess.check_output(
                [sys.executable, "-c", script], cwd=REPOSITORY, env=env, text=True
            )
        )
    assert len(described) == 1


def test_module_that_computes_something_else_is_not_in_the_program() -> None:
    assert "lm.training.optim" not in describe_program("lm.data.records", ())["sources"]


def test_compiled_graphs_that_are_kept_are_of_the_code_of_our_operators() -> None:
    """A graph calls an operator by its name, also after its derivative has other arguments."""
    model = Transformer(ModelConfig.model_validate({"d_model": 8, "n_heads": 2}))
    parallelize.compile_blocks(model, lambda forward: forward)
    sources = json.loads(torch.compiler.config.cache_key_tag)["sources"]
    paths = list((REPOSITORY / "lm").rglob("*.py"))
    with_operators = [path for path in paths if "custom_op(" in path.read_text()]
    assert len(with_operators) > 1
    for path in with_operators:
        module = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        assert sources[module] == sha256(path.read_bytes()).hexdigest()
