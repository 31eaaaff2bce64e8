"""`objective: dpo` is its definition: on any ranks, packed or not, resumed or not, as in TRL."""

from __future__ import annotations

import json
import math
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from lm.checkpoint.tensor_files import write_tensors
from lm.config.hyperparameters import Hyperparameters
from lm.config.reading import read_hyperparameters
from lm.data.loader import Loader
from lm.data.run_data import open_data
from lm.determined.search import Searcher
from lm.errors import ConfigError, RunError
from lm.inputs import check_searcher
from lm.memory import Ranks
from lm.metrics.device import GIB
from lm.objectives.dpo import check_repeatable
from lm.plan.step import device_bytes, find_peak, measure_step
from lm.shards import Rows
from lm.transformers_model import NETWORK
from model import Transformer
from tests.support.checkpoints import forge_manifest
from tests.support.hf import (
    LLAMA,
    adapters_in_peft,
    add_tokenizer,
    make_reference,
    read_with_model_defaults,
    save_model,
    start_as_ours,
)
from tests.support.hyperparameters import LLAMA_STYLE, TINY, named_keys
from tests.support.parallelism import PARITY_RUN, train_each
from tests.support.ranks import run_ranks
from tests.support.runs import (
    SAVE_FIRST_GRADIENTS,
    checkpoints_by_step,
    read_reports,
    run_fsdp,
)
from tests.support.step_counts import COUNTED_RUN, count_steps_of_each

pytestmark = pytest.mark.usefixtures("shared_cache")

STEPS = 5
N_PAIRS = 16
TRAINING: dict[str, Any] = {
    "objective": "dpo",
    "dataset": "jsonl",
    "shuffle": False,
    "packing": False,
    "max_seq_len": 64,
    "max_steps": STEPS,
    "report_rate": 1,
    "validation_rate": STEPS,
    "checkpoint_rate": 100,
    "total_batch_size": 4,
    "batch_size": 1,
    "amp_dtype": None,
    "lr": 1e-2,
    "num_tokens": 0,
    "seed": 7,
}


def reward_metrics(line: dict[str, Any]) -> list[float]:
    return [value for key, value in line.items() if key.startswith(("loss", "reward", "log_prob"))]


@dataclass(frozen=True)
class Sources:
    model: Path
    """in transformers' format, with a tokenizer"""
    pairs: Path

    def settings(self, **changes: Any) -> dict[str, Any]:
        """Hyperparameters of a run."""
        data = {"train_data": str(self.pairs), "val_data": str(self.pairs)}
        return data | {"init_from": str(self.model)} | TRAINING | changes

    def lines(self) -> list[dict[str, str]]:
        return [json.loads(line) for line in self.pairs.read_text().splitlines()]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    folder = tmp_path_factory.mktemp("sources")
    raw = LLAMA | {"num_key_value_heads": 2, "vocab_size": 300}
    make_reference(raw).save_pretrained(folder / "llama")
    add_tokenizer(folder / "llama", 280)
    draw = random.Random(1)
    lines = []
    for _ in range(N_PAIRS):
        prompt, chosen, rejected = (
            "".join(draw.choices("abcd ", k=draw.randrange(1, 10))) + end for end in "?.!"
        )
        lines.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    pairs = folder / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Sources(folder / "llama", pairs)


# ---- the definition, with transformers


class Example(NamedTuple):
    ids: list[int]
    n_prompt: int


def examples_of(sources: Sources) -> list[Example]:
    """The chosen and the rejected reply of each pair, one after the other."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(sources.model)
    examples = []
    for line in sources.lines():
        n_prompt = len(tokenizer(line["prompt"])["input_ids"])
        for key in ("chosen", "rejected"):
            ids = tokenizer(line["prompt"] + line[key])["input_ids"]
            examples.append(Example([*ids, tokenizer.eos_token_id], n_prompt))
    return examples


def log_prob(model: nn.Module, example: Example) -> Tensor:
    ids = torch.tensor([example.ids])
    log_probs = F.log_softmax(model(ids).logits[0, :-1], dim=-1)
    of_tokens = log_probs.gather(-1, ids[0, 1:, None])[:, 0]
    return of_tokens[example.n_prompt - 1 :].sum()


def defined_steps(sources: Sources, hp: Hyperparameters) -> list[dict[str, float]]:
    """The loss and rewards of each step of DPO, one reply at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(sources.model)
    reference = AutoModelForCausalLM.from_pretrained(sources.model)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        lr=hp.optim.lr,
        weight_decay=hp.optim.weight_decay,
        betas=(hp.optim.beta1, hp.optim.beta2),
    )
    own = hp.objective
    examples = examples_of(sources)
    steps = []
    for step in range(hp.run.max_steps or 0):
        losses, chosen_rewards, rejected_rewards = [], [], []
        for pair in range(4 * step, 4 * step + 4):
            chosen, rejected = (examples[(2 * pair + i) % len(examples)] for i in range(2))
            policy = [log_prob(model, example) for example in (chosen, rejected)]
            with torch.no_grad():
                ref = [log_prob(reference, example) for example in (chosen, rejected)]
            ratios = [p - r for p, r in zip(policy, ref, strict=True)]
            n_tokens = [len(each.ids) - each.n_prompt for each in (chosen, rejected)]
            if own.dpo_loss == "ipo":
                difference = ratios[0] / n_tokens[0] - ratios[1] / n_tokens[1]
                loss = (difference - 1 / (2 * own.dpo_beta)) ** 2
            else:
                margin = own.dpo_beta * (ratios[0] - ratios[1])
                wrong = own.label_smoothing
                loss = -(1 - wrong) * F.logsigmoid(margin) - wrong * F.logsigmoid(-margin)
            losses.append(loss - own.sft_weight * policy[0] / n_tokens[0])
            chosen_rewards.append(own.dpo_beta * ratios[0].item())
            rejected_rewards.append(own.dpo_beta * ratios[1].item())
        mean = torch.stack(losses).mean()
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
        steps.append(
            {
                "loss": mean.item(),
                "reward_chosen": sum(chosen_rewards) / 4,
                "reward_rejected": sum(rejected_rewards) / 4,
            }
        )
    return steps


VARIANTS: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "smoothed": {"label_smoothing": 0.1, "dpo_beta": 0.3},
    "with-sft": {"sft_weight": 0.5, "dpo_loss": "ipo", "dpo_beta": 0.5},
}


@pytest.mark.parametrize(
    "name",
    [
        "sigmoid",
        *(pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS if name != "sigmoid"),
    ],
)
def test_dpo_is_its_definition(name: str, sources: Sources, tmp_path: Path) -> None:
    settings = sources.settings(**VARIANTS[name])
    hp = read_hyperparameters({"hyperparameters": settings}, [], "test")
    run_fsdp(tmp_path, config=settings, code=0)
    reports = read_reports(tmp_path)
    for number, expected in enumerate(defined_steps(sources, hp), start=1):
        found = {key: reports[number][key] for key in expected}
        assert found == pytest.approx(expected, rel=2e-5, abs=2e-6), number


# ---- TRL

TRL_STEPS = 8


TRL: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "ipo": {"dpo_loss": "ipo", "dpo_beta": 0.5},
    "adapters": {"lora_rank": 4, "lora_alpha": 8},
}


class TRLRun(NamedTuple):
    metrics: list[dict[str, float]]
    """of each step"""
    gradients: dict[str, Tensor]
    """of the first step, by our names"""


def train_with_trl(sources: Sources, hp: Hyperparameters, folder: Path) -> TRLRun:
    """Train all weights, or adapters that start as ours do, with TRL."""
    import peft
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    model = AutoModelForCausalLM.from_pretrained(sources.model)
    adapted = None
    if hp.lora.lora_rank is not None:
        adapted = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=hp.lora.lora_rank,
            lora_alpha=int(hp.lora.lora_alpha),
            target_modules="all-linear",
        )
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": TRL_STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": hp.optim.lr,
        "lr_scheduler_type": "constant",
        "weight_decay": hp.optim.weight_decay,
        "adam_beta1": hp.optim.beta1,
        "adam_beta2": hp.optim.beta2,
        "max_grad_norm": 0.0,
        "beta": hp.objective.dpo_beta,
        "loss_type": [hp.objective.dpo_loss],
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "logging_strategy": "steps",
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    tokenizer = AutoTokenizer.from_pretrained(sources.model)
    tokenizer.pad_token = tokenizer.eos_token
    trainer = DPOTrainer(
        model,
        args=DPOConfig(**arguments),
        train_dataset=Dataset.from_list(sources.lines()),
        processing_class=tokenizer,
        peft_config=adapted,
    )
    if adapted is None:
        trained = {f"{NETWORK}.{name}": each for name, each in model.named_parameters()}
    else:
        assert isinstance(trainer.model, nn.Module)
        trained = adapters_in_peft(trainer.model)
        start_as_ours(trained, hp, hp.run.seed or 0)
    gradients: dict[str, Tensor] = {}

    class KeepFirstGradients(TrainerCallback):
        def on_pre_optimizer_step(self, *_args: Any, **_kwargs: Any) -> None:
            for name, parameter in trained.items():
                assert parameter.grad is not None
                gradients.setdefault(name, parameter.grad.clone())

    trainer.add_callback(KeepFirstGradients())
    trainer.train()
    metrics = [line for line in trainer.state.log_history if "rewards/chosen" in line]
    return TRLRun(metrics, gradients)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRL)
def test_dpo_trains_as_trl(name: str, sources: Sources, tmp_path: Path) -> None:
    changes = {"max_steps": TRL_STEPS, "validation_rate": TRL_STEPS, "lr": 1e-3}
    settings = sources.settings(**changes, **TRL[name])
    hp = read_with_model_defaults(settings)
    run_fsdp(tmp_path, config=settings, script=SAVE_FIRST_GRADIENTS, code=0)
    expected = train_with_trl(sources, hp, tmp_path / "trl")

    gradients = load_file(tmp_path / "gradients")
    assert gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert torch.dist(gradients[name], gradient) <= 1e-6 * gradient.norm(), name

    reports = read_reports(tmp_path)
    assert len(expected.metrics) == TRL_STEPS
    for step, line in enumerate(expected.metrics, start=1):
        assert reports[step]["loss"] == pytest.approx(line["loss"], abs=1e-6), step
        for reply in ("chosen", "rejected"):
            # TRL's log-probabilities are float32 sums of up to 64 nats, which are 4e-6 apart.
            found = reports[step][f"reward_{reply}"] / hp.objective.dpo_beta
            theirs = line[f"rewards/{reply}"] / hp.objective.dpo_beta
            assert found == pytest.approx(theirs, abs=8e-6), step


# ---- parallelism, accumulation and packing

# All pairs are one batch, so that each option has the same pairs in a step.
ONE_BATCH = {"total_batch_size": N_PAIRS, "batch_size": 4}
RUNS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}, "accumulated": {"batch_size": 1}},
    2: {
        "full-shard": {},
        "grad-shard": {"sharding": "grad-shard", "activation_checkpointing": "selective"},
        "no-shard": {"sharding": "no-shard", "activation_checkpointing": "full"},
        "offload": {"cpu_offload": True},
        "float16": {"amp_dtype": "float16"},
    },
    4: {
        "hybrid-grad-shard": {"sharding": "hybrid-grad-shard", "shard_group_size": 2}
        | {"batch_size": 1},
    },
}
"""by ranks"""


def without_model(run: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters of `run`, but what `init_from` says."""
    return {key: value for key, value in run.items() if key not in TINY}


def losses_on(ranks: int, folder: Path, runs: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    folder.mkdir()
    return run_ranks(ranks, train_each, str(folder), runs, without_model(PARITY_RUN))[0]


@pytest.mark.slow
def test_ranks_strategies_and_accumulation_change_nothing(sources: Sources, tmp_path: Path) -> None:
    base = sources.settings(**ONE_BATCH)
    expected: dict[str, list[float]] = {}
    for ranks, changes in RUNS.items():
        runs = {name: base | each for name, each in changes.items()}
        found = losses_on(ranks, tmp_path / str(ranks), runs)
        expected = expected or found
        for name, losses in found.items():
            if name == "float16":
                assert losses[0] == pytest.approx(math.log(2), abs=1e-4)
                assert losses == pytest.approx(expected["one"], rel=5e-2)
            else:
                assert losses == pytest.approx(expected["one"], rel=1e-6, abs=1e-6), (ranks, name)
    assert expected["one"][0] == pytest.approx(math.log(2), abs=1e-6)
    assert expected["one"][-1] < 0.6


@pytest.mark.slow
def test_a_compiled_run_trains_the_same_in_two_graphs(sources: Sources, tmp_path: Path) -> None:
    """Traced, without the code of PyTorch's compiler, which test_parity.py runs for blocks."""
    # One micro-batch, as each length is compiled.
    base = sources.settings(total_batch_size=N_PAIRS, batch_size=N_PAIRS)
    runs = {"eager": base, "compiled": base | {"compile": True}}
    read_with_model_defaults(base)  # examines the class, whose graphs are not to be counted
    counted = without_model(COUNTED_RUN)
    steps = run_ranks(1, count_steps_of_each, str(tmp_path), runs, counted)[0]
    # That of a block in the reference, and that in training.
    assert [step.graphs for step in steps["compiled"]] == [1, 2, 2, 2]
    eager, compiled = (
        [report["loss"] for report in read_reports(tmp_path, name=name).values()] for name in runs
    )
    assert len(eager) == STEPS
    assert compiled == pytest.approx(eager, rel=1e-6, abs=1e-6)


@pytest.mark.slow
def test_packing_changes_nothing(sources: Sources, tmp_path: Path) -> None:
    base = sources.settings(**ONE_BATCH)
    separate = losses_on(1, tmp_path / "separate", {"run": base})["run"]
    # Fewer sequences hold the same pairs.
    note = run_fsdp(tmp_path, "packing=true", "--dry-run", config=base | ONE_BATCH).stderr
    n_sequences = int(note.split(" sequences of max_seq_len")[0].split()[-1])
    assert n_sequences < N_PAIRS
    packed = base | {"packing": True, "batch_size": 1, "total_batch_size": n_sequences}
    found = losses_on(1, tmp_path / "packed", {"run": packed})["run"]
    assert found == pytest.approx(separate, rel=1e-6, abs=1e-6)


# ---- stopping and resuming


def exact(folder: Path) -> dict[int, list[float]]:
    lines = {group: read_reports(folder, group) for group in ("training", "validation")}
    return {
        step + 1000 * (group == "validation"): reward_metrics(line)
        for group, of_group in lines.items()
        for step, line in of_group.items()
    }


@pytest.mark.slow
def test_a_resumed_run_is_equal_bit_for_bit(sources: Sources, tmp_path: Path) -> None:
    settings = sources.settings(report_rate=2, validation_rate=2)
    run_fsdp(tmp_path / "one", config=settings, ranks=2, code=0)
    first = run_fsdp(tmp_path / "two", "stop_at_step=3", config=settings, ranks=2, code=0)
    assert "computed the log-probabilities" in first.stdout
    shutil.copytree(tmp_path / "two", tmp_path / "three")
    second = run_fsdp(tmp_path / "two", config=settings, ranks=2, code=0)
    assert "resumed from checkpoint" in second.stdout
    assert "log-probabilities" not in second.stdout
    assert exact(tmp_path / "two") == exact(tmp_path / "one")
    # On another number of ranks, sums of an unfinished report are continued, too.
    run_fsdp(tmp_path / "three", config=settings, ranks=1, code=0)
    for step, values in exact(tmp_path / "three").items():
        assert values == pytest.approx(exact(tmp_path / "one")[step], rel=1e-5, abs=1e-6)


STOP_IN_REFERENCE = """
import signal
from lm.objectives.dpo import DPO
compute = DPO.compute_reference
calls = 0
def compute_and_end(self, model, pairs):
    global calls
    calls += 1
    compute(self, model, pairs)
    if calls == {calls} and rank == 0:
        os.kill(os.getpid(), signal.{signal})
DPO.compute_reference = compute_and_end
"""
COUNT = """
from lm.objectives.dpo import DPO
compute = DPO.compute_reference
def compute_and_print(self, model, pairs):
    print("batch", len(pairs.replies), flush=True)
    compute(self, model, pairs)
DPO.compute_reference = compute_and_print
"""

SHOW_BAR = """
from lm.data import progress
progress.LOG_SECONDS = 0.0
"""


@pytest.mark.slow
def test_the_reference_is_resumed_inside(sources: Sources, tmp_path: Path) -> None:
    # 16 pairs to train on and 16 to validate on, 4 in a batch on two ranks with 2 each: 8 batches.
    settings = sources.settings(batch_size=2, checkpoint_rate=2)
    run_fsdp(tmp_path / "one", config=settings, ranks=2, code=0)
    for signal, calls in (("SIGTERM", 2), ("SIGKILL", 3)):
        folder = tmp_path / signal
        script = STOP_IN_REFERENCE.format(calls=calls, signal=signal)
        ended = run_fsdp(folder, config=settings, ranks=2, script=script)
        assert (ended.returncode == 0) == (signal == "SIGTERM")
        assert list(checkpoints_by_step(folder)) == [0]
        assert len(list((folder / "runs" / "test" / "checkpoints").iterdir())) == 1
        again = run_fsdp(folder, config=settings, ranks=2, script=COUNT + SHOW_BAR, code=0)
        assert again.stdout.count("batch 4\n") == 12
        assert again.stderr.count("| 0/8 [") == 1
        assert "| 8/8 [" in again.stderr
        assert exact(folder) == exact(tmp_path / "one")


@pytest.mark.slow
def test_other_validation_data_are_another_run(sources: Sources, tmp_path: Path) -> None:
    settings = sources.settings()
    run_fsdp(tmp_path, "stop_at_step=2", config=settings, code=0)
    other = tmp_path / "other.jsonl"
    other.write_text("".join(sources.pairs.read_text().splitlines(keepends=True)[::-1]))
    refused = run_fsdp(tmp_path, f"val_data={other}", config=settings, code=2)
    assert "val_data" in refused.stderr
    assert "different run" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shift", "changes"),
    [
        ("-0.1", {}),
        ("10 * (pairs.replies[0::2] // 2 % 2) - 5", {}),
        ("-0.1", {"skip_steps": [[1, 2]]}),
    ],
)
def test_a_wrong_reference_is_refused(
    shift: str, changes: dict[str, Any], sources: Sources, tmp_path: Path
) -> None:
    script = f"""
from lm.objectives.dpo import DPO
compute = DPO.compute_reference
def compute_wrongly(self, model, pairs):
    compute(self, model, pairs)
    self.reference[pairs.replies[0::2]] += {shift}
DPO.compute_reference = compute_wrongly
"""
    settings = sources.settings(**changes)
    if "skip_steps" in changes:  # also if it is resumed in them
        run_fsdp(tmp_path, "stop_at_step=1", config=settings, script=script, code=0)
    refused = run_fsdp(tmp_path, config=settings, script=script, code=1)
    assert "differs from its reference" in refused.stderr


RANDOM = {
    "granite": {"attention_dropout": 0.1},
    "phimoe": {"input_jitter_noise": 0.01, "router_jitter_noise": 0.01},
}
"""rates of random changes in training, as models are published with"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", RANDOM)
def test_what_config_json_lets_be_random_is_not(
    kind: str, sources: Sources, tmp_path: Path
) -> None:
    save_model(kind, tmp_path / kind, RANDOM[kind])
    files = {"train_data": str(sources.pairs), "val_data": str(sources.pairs)}
    settings = TRAINING | files | {"init_from": str(tmp_path / kind), "lr": 1e-12}
    run = run_fsdp(tmp_path, config=settings, code=0)
    for key, rate in RANDOM[kind].items():
        assert f"{key} {rate}" in run.stdout
    # The reference is computed in other batches, whose kernels can round otherwise.
    for report in read_reports(tmp_path).values():
        assert report["reward_chosen"] == pytest.approx(0, abs=1e-6)
        assert report["reward_rejected"] == pytest.approx(0, abs=1e-6)
        assert report["loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_a_random_model_has_no_reference(sources: Sources) -> None:
    settings = TINY | {"dataset": "jsonl", "tokenizer": "bytes", "vocab_size": 300}
    files = {"train_data": str(sources.pairs), "val_data": str(sources.pairs)}
    hp = read_hyperparameters({"hyperparameters": settings | files}, [], "test")
    data = open_data(hp.data, 300, hp.model.max_seq_len, 4, seed=1, pairs=True)
    loader = Loader(hp.data, data, 4, 0, 1, torch.device("cpu"))
    pairs = next(iter(loader.all_pairs()))
    check_repeatable(Transformer(hp.own_model), pairs)
    random_model = Transformer(hp.own_model.model_copy(update={"dropout": 0.1}))
    with pytest.raises(RunError, match="no reference"):
        check_repeatable(random_model, pairs)


@pytest.mark.slow
def test_a_reference_that_is_lost_is_not_computed_again(sources: Sources, tmp_path: Path) -> None:
    """It would be that of trained weights."""
    settings = sources.settings()
    run_fsdp(tmp_path, "stop_at_step=2", config=settings, code=0)
    checkpoint = checkpoints_by_step(tmp_path)[2]
    (file,) = checkpoint.glob("reference-*")
    content = load_file(file)["log_probs"]
    content[3] = 1.0
    file.unlink()
    write_tensors(file, {"log_probs": Rows(content, 0)})
    forge_manifest(checkpoint)
    refused = run_fsdp(tmp_path, config=settings, code=2)
    assert "the checkpoint of step 2 lacks 1 log-probabilities" in refused.stderr


# ---- adapters


@pytest.mark.slow
def test_adapters_start_at_their_base(sources: Sources, tmp_path: Path) -> None:
    settings = sources.settings(lora_rank=4, validation_rate=1)
    run_fsdp(tmp_path, "stop_at_step=1", config=settings, code=0)
    first = read_reports(tmp_path)[1]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["reward_chosen"] == first["reward_rejected"] == 0
    run_fsdp(tmp_path, config=settings, code=0)
    validations = read_reports(tmp_path, "validation")
    assert validations[STEPS]["loss"] < validations[1]["loss"] < math.log(2)


# ---- learning


def write_preferences(path: Path, seed: int, n_pairs: int) -> None:
    """Pairs in which the reply that repeats the prompt's letter is preferred."""
    draw = random.Random(seed)
    with path.open("w") as file:
        for _ in range(n_pairs):
            right, wrong = draw.sample("ab", 2)
            prompt = "".join(draw.choices("xyz", k=draw.randrange(1, 6)))
            line = {
                "prompt": f"{prompt}{right}",
                "chosen": right * draw.randrange(1, 4),
                "rejected": wrong * draw.randrange(1, 4),
            }
            file.write(json.dumps(line) + "\n")


@pytest.mark.slow
def test_a_random_model_learns_which_reply_is_preferred(tmp_path: Path) -> None:
    shape = TINY | LLAMA_STYLE | {"vocab_size": 264, "max_seq_len": 32, "amp_dtype": None}
    base = shape | {"dataset": "text", "max_steps": 1, "lr": 1e-9, "num_tokens": 0}
    text = tmp_path / "text.txt"
    text.write_text("abc " * 200)
    run_fsdp(tmp_path, f"train_data={text}", "run_name=base", config=base, code=0)
    write_preferences(tmp_path / "train.jsonl", 1, 600)
    write_preferences(tmp_path / "held_out.jsonl", 2, 100)
    settings = shape | {
        "objective": "dpo",
        "init_from": "runs/base",
        "dataset": "jsonl",
        "train_data": "train.jsonl",
        "val_data": "held_out.jsonl",
        "max_steps": 150,
        "lr": 3e-3,
        "total_batch_size": 8,
        "batch_size": 8,
        "validation_rate": 150,
        "num_tokens": 0,
    }
    run_fsdp(tmp_path, config=settings, code=0)
    last = read_reports(tmp_path, "validation")[150]
    assert last["reward_accuracy"] > 0.95
    assert last["reward_margin"] == pytest.approx(last["reward_chosen"] - last["reward_rejected"])
    assert "perplexity" not in last


# ---- plans and searches


@pytest.mark.slow
def test_a_step_takes_the_memory_of_fine_tuning_on_as_many_tokens() -> None:
    shape = {"model": "llama3.2-1b", "n_layers": 4, "max_seq_len": 2048, "batch_size": 2}
    ranks = Ranks(torch.bfloat16, "cuda", size=2, per_node=2, memory=80 * GIB)
    peaks: list[int] = []
    for changes in ({}, {"objective": "dpo", "init_from": "x"}):
        values = shape | {"dataset": "jsonl", "vocab_size": 128256} | changes
        hp = read_hyperparameters({"hyperparameters": values}, [], "test")
        phases = measure_step(hp, ranks)
        peaks.append(device_bytes(phases[find_peak(phases)]))
    fine_tuning, dpo = peaks
    assert dpo == pytest.approx(fine_tuning, rel=0.05)


@pytest.mark.parametrize(
    ("metric", "smaller"),
    [("reward_accuracy", False), ("reward_margin_b", False), ("loss_a", True)],
)
def test_a_search_compares_metrics_of_preferences(
    metric: str, smaller: bool, sources: Sources
) -> None:
    settings = sources.settings(val_data={"a": str(sources.pairs), "b": str(sources.pairs)})
    hp = read_hyperparameters({"hyperparameters": settings}, [], "test")
    data = open_data(hp.data, hp.model.vocab_size, hp.model.max_seq_len, 4, 7, pairs=True)
    for smaller_is_better in (False, True):
        experiment = {"name": "random", "metric": metric, "smaller_is_better": smaller_is_better}
        searcher = Searcher.from_config({"searcher": experiment}, STEPS, STEPS)
        if smaller_is_better == smaller:
            check_searcher(searcher, hp.tasks, [], data)
        else:
            with pytest.raises(ConfigError, match="smaller_is_better"):
                check_searcher(searcher, hp.tasks, [], data)
    perplexity = Searcher.from_config({"searcher": experiment | {"metric": "perplexity"}}, 5, 5)
    with pytest.raises(ConfigError, match=r"searcher\.metric"):
        check_searcher(perplexity, hp.tasks, [], data)


# ---- bad input

REFUSED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "no-weights": ({"init_from": None}, {"objective", "init_from"}),
    "text": ({"dataset": "text"}, {"objective", "dataset"}),
    "dropout": ({"dropout": 0.1}, {"dropout", "objective"}),
    "adapters-dropout": ({"lora_rank": 2, "lora_dropout": 0.1}, {"lora_dropout", "objective"}),
    "smoothed-ipo": ({"dpo_loss": "ipo", "label_smoothing": 0.1}, {"label_smoothing", "dpo_loss"}),
    "smoothing": ({"label_smoothing": 0.5}, {"label_smoothing"}),
    "beta": ({"dpo_beta": 0}, {"dpo_beta"}),
    "next-token": ({"objective": "next-token", "dpo_beta": 0.2}, {"dpo_beta", "objective"}),
    "alias": ({"loss_type": "ipo"}, {"dpo_loss"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_to_dpo_is_refused(name: str) -> None:
    changes, keys = REFUSED[name]
    values = TINY | {"objective": "dpo", "dataset": "jsonl", "init_from": "x"} | changes
    with pytest.raises(ConfigError) as error:
        read_hyperparameters({"hyperparameters": values}, [], "test")
    assert keys <= named_keys(error.value)
