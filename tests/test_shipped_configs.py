"""Every shipped YAML is a valid experiment, and the generated pages match the code."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from determined.common import context

from docs.hyperparameters import editor_schema, markdown_page
from lm.config.reading import load_hyperparameters, read_hyperparameters
from lm.data.tokenizer.files import TOKENIZER_JSON
from lm.model_config import ModelConfig
from lm.transformers_config import TransformersConfig
from tests.support import REPOSITORY
from tests.support.runs import read_reports, run_fsdp
from tests.support.tokenizer_files import CHAT_TEMPLATE, llama_tokenizer

SHIPPED = sorted(
    [
        REPOSITORY / "config.yaml",
        REPOSITORY / "distributed.yaml",
        *(REPOSITORY / "recipes").glob("*.yaml"),
    ]
)

ORIGINAL = {"batch_size", "lr", "d_model", "n_heads", "n_layers", "vocab_size", "max_seq_len"}
ORIGINAL |= {
    "report_rate",
    "checkpoint_rate",
    "validation_batches",
    "amp_dtype",
    "core_api_profiler",
    "torch_profiler",
}
"""The hyperparameters of Determined's FSDP example."""

SECTIONS = {
    "resources": {"slots_per_trial", "shm_size"},
    "environment": {"image", "environment_variables"},
    "checkpoint_storage": {"save_experiment_best", "save_trial_best", "save_trial_latest"},
}
SEARCHERS = {
    "single": {"max_length"},
    "adaptive_asha": {
        "max_trials",
        "time_metric",
        "max_time",
        "divisor",
        "max_rungs",
        "max_concurrent_trials",
    },
}
RANGES = {
    "int": {"minval", "maxval"},
    "double": {"minval", "maxval"},
    "log": {"minval", "maxval", "base"},
}
"""Keys of an experiment by the reference of Determined 0.38.1; its master refuses any other."""


def one_trial(hyperparameters: dict[str, Any]) -> dict[str, Any]:
    """Return a trial's hyperparameters in a search: the lowest value of every range."""

    def pick(value: Any) -> Any:
        match value:
            case {"type": "log", "base": base, "minval": exponent}:
                return base**exponent
            case {"type": "int" | "double", "minval": lowest}:
                return lowest
        return value

    return {key: pick(value) for key, value in hyperparameters.items()}


shipped = pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)


@shipped
def test_shipped_sections(path: Path) -> None:
    experiment = yaml.safe_load(path.read_text())
    others = {"name", "entrypoint", "searcher", "max_restarts", "log_policies", "hyperparameters"}
    assert experiment.keys() == SECTIONS.keys() | others
    for section, keys in SECTIONS.items():
        assert experiment[section].keys() == keys
    assert "# workspace:" in path.read_text()
    assert "# project:" in path.read_text()


@shipped
def test_shipped_entrypoint(path: Path) -> None:
    launcher = "python3 -m determined.launch.torch_distributed -- python3 fsdp.py"
    assert yaml.safe_load(path.read_text())["entrypoint"].startswith(launcher)


@shipped
def test_shipped_searcher_and_ranges(path: Path) -> None:
    experiment = yaml.safe_load(path.read_text())
    searcher = experiment["searcher"]
    assert searcher.keys() == {"name", "metric", "smaller_is_better"} | SEARCHERS[searcher["name"]]
    for value in experiment["hyperparameters"].values():
        if isinstance(value, dict) and "type" in value:
            assert value.keys() == {"type"} | RANGES[value["type"]]
            assert value["minval"] < value["maxval"]


@shipped
def test_shipped_resources_and_environment(path: Path) -> None:
    experiment = yaml.safe_load(path.read_text())
    assert isinstance(experiment["resources"]["slots_per_trial"], int)
    assert experiment["resources"]["shm_size"] >= 2**32
    image = experiment["environment"]["image"]["cuda"]
    assert re.fullmatch(r"pytorch/pytorch:2\.13\.\d-.*-devel", image)
    assert "PIP_BREAK_SYSTEM_PACKAGES=1" in experiment["environment"]["environment_variables"]


@shipped
def test_shipped_log_policies(path: Path) -> None:
    policies = yaml.safe_load(path.read_text())["log_policies"]
    assert all(re.compile(policy["pattern"]) for policy in policies)
    assert {policy["name"]: policy["action"] for policy in policies} == {
        "CUDA OOM": "cancel_retries",
        "bad configuration": "cancel_retries",
        "ECC Error": "exclude_node",
    }


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_hyperparameters_are_valid(path: Path) -> None:
    experiment = yaml.safe_load(path.read_text())
    hyperparameters = one_trial(experiment["hyperparameters"])
    hp = read_hyperparameters(experiment | {"hyperparameters": hyperparameters}, [], path.name)
    if hyperparameters == experiment["hyperparameters"]:
        assert load_hyperparameters(path, []) == hp
    else:
        assert experiment["searcher"]["metric"] == "loss"
        assert experiment["searcher"]["time_metric"] == "batches"
        assert experiment["searcher"]["max_time"] == hp.run.max_steps
        rungs = [hp.run.max_steps // experiment["searcher"]["divisor"] ** n for n in range(3)]
        assert [
            step % (hp.metrics.validation_rate or hp.metrics.report_rate) for step in rungs
        ] == [0, 0, 0]


@shipped
def test_shipped_file_with_weights_leaves_the_structure_to_them(path: Path) -> None:
    keys = yaml.safe_load(path.read_text())["hyperparameters"].keys()
    if "init_from" in keys:
        refused = ModelConfig.model_fields.keys() - TransformersConfig.model_fields.keys()
        assert not keys & refused


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_file_names_its_schema(path: Path) -> None:
    first = path.read_text().partition("\n")[0]
    schema = path.parent / first.removeprefix("# yaml-language-server: $schema=")
    assert schema.resolve() == REPOSITORY / "docs" / "hyperparameters.schema.json"
    jsonschema.validate(yaml.safe_load(path.read_text()), json.loads(schema.read_text()))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(
            {"hyperparameters": {"lr": {"type": "logarithmic"}}}, json.loads(schema.read_text())
        )


@pytest.mark.slow
def test_text_recipe_runs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("To be, or not to be, that is the question.\n" * 100)
    recipe = [
        "--config",
        str(REPOSITORY / "recipes" / "own_text.yaml"),
        "train_data=a.txt",
        "max_steps=1",
    ]
    run_fsdp(
        tmp_path, *recipe, "d_model=32", "n_layers=1", "max_seq_len=32", "num_tokens=1", code=0
    )
    assert read_reports(tmp_path, "validation", name="own_text")[1]["bits_per_byte"] > 0


def save_chat_model(folder: Path) -> None:
    """Save a small model with a chat template, as transformers does."""
    transformers = pytest.importorskip("transformers")
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, vocab_size=256))
    model.save_pretrained(folder)
    (folder / TOKENIZER_JSON).write_bytes(llama_tokenizer())
    specials = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(specials))


@pytest.mark.slow
def test_chat_recipe_runs(tmp_path: Path) -> None:
    save_chat_model(tmp_path / "model")
    chat = {
        "messages": [
            {"role": "user", "content": "to be"},
            {"role": "assistant", "content": "or not to be"},
        ]
    }
    (tmp_path / "chat.jsonl").write_text((json.dumps(chat) + "\n") * 40)
    recipe = [
        "--config",
        str(REPOSITORY / "recipes" / "chat.yaml"),
        "init_from=model",
        "train_data=chat.jsonl",
    ]
    done = run_fsdp(tmp_path, *recipe, "max_steps=2", "max_seq_len=32", code=0)
    assert "held out" in done.stdout
    assert read_reports(tmp_path, "validation", name="chat")[2]["bits_per_byte"] > 0


@pytest.mark.slow
def test_dpo_recipe_trains_on_dialogs(tmp_path: Path) -> None:
    save_chat_model(tmp_path / "model")
    question = {"role": "user", "content": "to be"}
    pair = {}
    for key, reply in {"chosen": "or not to be", "rejected": "be"}.items():
        pair[key] = [question, {"role": "assistant", "content": reply}]
    (tmp_path / "pairs.jsonl").write_text((json.dumps(pair) + "\n") * 40)
    recipe = [
        "--config",
        str(REPOSITORY / "recipes" / "dpo.yaml"),
        "init_from=model",
        "train_data=pairs.jsonl",
    ]
    faster = ["max_steps=2", "max_seq_len=64", "lr=1e-3", "amp_dtype=null"]
    run_fsdp(tmp_path, *recipe, *faster, code=0)
    last = read_reports(tmp_path, "validation", name="dpo")[2]
    assert last["reward_margin"] > 0
    assert last["reward_accuracy"] == 1
    report = (tmp_path / "runs" / "dpo" / "report.md").read_text()
    assert "validation reward_accuracy | 1.0000" in report


def test_config_yaml_equals_the_original_example() -> None:
    hyperparameters = yaml.safe_load((REPOSITORY / "config.yaml").read_text())["hyperparameters"]
    assert hyperparameters.keys() == ORIGINAL
    assert load_hyperparameters(
        REPOSITORY / "config.yaml", ["max_steps=1"]
    ) == read_hyperparameters({}, ["max_steps=1"], "defaults")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("hyperparameters.md", markdown_page),
        ("hyperparameters.schema.json", editor_schema),
    ],
)
def test_generated_pages_match_the_code(file: str, text: Callable[[], str]) -> None:
    assert (REPOSITORY / "docs" / file).read_text() == text(), "`make docs` writes it"


def test_uploaded_folder_has_the_package_and_no_data_or_environments(tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / ".detignore", tmp_path)
    for name in ("data/own", "venv", ".venv", "runs", "lm/data"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text("")
    uploaded = context.read_v1_context(tmp_path)
    assert [file.path for file in uploaded if file.path.endswith("/file")] == ["lm/data/file"]
