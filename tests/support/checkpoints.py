"""Checkpoints of small models, and forged ones."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import google_crc32c
from determined import core
from torch import nn
from torch.distributed.fsdp import fully_shard

from lm.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from lm.checkpoint.contents import describe_state
from lm.checkpoint.location import Location
from lm.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    Manifest,
    RunInfo,
    TrainingProgress,
    read_manifest,
    write_manifest,
)
from lm.checkpoint.store import LocalCheckpoints
from lm.checkpoint.tensor_files import State, write_tensors
from lm.data.tokenizer.file_tokenizer import FileTokenizer
from lm.data.tokenizer.files import TOKENIZER_JSON
from lm.determined.context import TorchDistributedContext
from lm.runtime.world import MeshShape, World
from lm.shards import Rows
from lm.storage.folder import record
from lm.training.lora import trained_parameters
from lm.training.optim import OptimConfig, Optimizer
from model import ModelConfig, Transformer
from tests.support.hyperparameters import TINY
from tests.support.tokenizer_files import byte_level_tokenizer

SHARDS = ["model-00000-00000.safetensors", "model-00001-00000.safetensors"]
"""Files of a model that two ranks saved."""

OPTIM_SHARDS = ["optim-00000-00000.safetensors", "optim-00001-00000.safetensors"]
"""Files of an optimizer that two ranks saved."""

WEIGHTS_FILE = SHARDS[0]
"""File of a model that one rank saved."""

TOY = ModelConfig.model_validate(
    {
        "d_model": 4,
        "n_heads": 1,
        "n_layers": 1,
        "vocab_size": 6,
        "d_ff": 4,
        "norm": "rmsnorm",
        "positions": "rope",
        "bias": "none",
    }
)
"""A model of 11 tensors and 156 parameters."""

RUN_INFO = RunInfo(
    sharding="full-shard",
    total_batch_size=2,
    hyperparameters={"lr": 1e-4},
    model=TOY.model_dump(),
    tokenizer=None,
    data={"train": "x", "validation": "y"},
    loss_scaled=False,
    trial_id=None,
)


# ---- saved by the checkpointer


def progress_at(step: int, loss: float | None = None) -> TrainingProgress:
    return TrainingProgress(step=step, tokens=0, validation_loss=loss)


def toy_model(value: float, config: ModelConfig = TOY) -> Transformer:
    """A model all of whose parameters are `value`."""
    model = Transformer(config)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def state_of(model: nn.Module, **settings: Any) -> State:
    """The state of a run that trains `model`, of which no step was done."""
    config = OptimConfig.model_validate(settings)
    optimizer = Optimizer(config, model)
    return {"model": trained_parameters(model), "optim": optimizer.state_dict(), "scaler": {}}


@contextmanager
def open_checkpointer(world: World, folder: Path, **settings: Any) -> Iterator[Checkpointer]:
    """A checkpointer of a run whose checkpoints are in `folder`."""
    os.umask(0o077)
    distributed = TorchDistributedContext(world.launch, world.saver, world.node)
    with core.init(distributed=distributed, checkpoint_storage=str(folder)) as context:
        config = CheckpointConfig.model_validate(settings)
        yield Checkpointer(config, LocalCheckpoints(folder, context.checkpoint), world, {})


def load_state(checkpointer: Checkpointer, location: Location, state: State) -> Manifest:
    """Load the checkpoint at `location` into `state`; return its manifest."""
    with checkpointer.open(location) as saved:
        saved.read_into(state)
        return saved.manifest


def save_state(
    checkpointer: Checkpointer,
    state: State,
    step: int,
    loss: float | None = None,
    info: RunInfo = RUN_INFO,
) -> str:
    """Save `state` and wait until it is written; return the name of the checkpoint's directory."""
    checkpointer.allocate(state)
    checkpointer.save(state, info, progress_at(step, loss))
    return checkpointer.commit()[1]


def save_toy(
    checkpointer: Checkpointer,
    world: World,
    step: int,
    value: float | None = None,
    loss: float | None = None,
) -> str:
    """Save a sharded `toy_model` whose values are `step`, or `value` on this rank.

    Returns:
        The name of the checkpoint's directory.
    """
    model = toy_model(step if value is None else value)
    fully_shard(model, mesh=world.device_mesh(MeshShape(1, world.size)))
    return save_state(checkpointer, state_of(model), step, loss)


# ---- written without a run, and forged


def write_checkpoint(folder: Path) -> Path:
    """Write a checkpoint of a small model with a tokenizer to `folder`."""
    folder.mkdir()
    llama = {"norm": "rmsnorm", "positions": "rope", "ffn": "swiglu", "bias": "none"}
    config = ModelConfig.model_validate(TINY | llama | {"vocab_size": 300})
    state = state_of(Transformer(config))
    for part, file in (("model", WEIGHTS_FILE), ("optim", OPTIM_SHARDS[0])):
        rows = {name: Rows(tensor, 0) for name, tensor in state[part].items()}
        write_tensors(folder / file, rows)
    (folder / TOKENIZER_JSON).write_bytes(byte_level_tokenizer())
    tokenizer = FileTokenizer({TOKENIZER_JSON: (folder / TOKENIZER_JSON).read_bytes()}, "")
    manifest = Manifest(
        sharding="full-shard",
        total_batch_size=1,
        hyperparameters={},
        model=config.model_dump(),
        tokenizer=tokenizer.identity,
        data={"train": "", "validation": ""},
        loss_scaled=False,
        trial_id=None,
        format=FORMAT,
        time=1.0,
        world_size=1,
        files={path.name: record(path) for path in folder.iterdir()},
        tensors=describe_state({"model": state["model"], "optim": state["optim"]}),
    )
    write_manifest(folder, manifest)
    return folder


def forge_manifest(folder: Path, **changes: Any) -> None:
    """Write a manifest that matches the files in `folder`, with `changes` and a right checksum."""
    fields = json.loads((folder / MANIFEST).read_text())
    del fields["checksum"]
    existing = [name for name in fields["files"] if (folder / name).exists()]
    fields["files"] = {name: record(folder / name).model_dump() for name in existing}
    text = json.dumps(fields | changes, indent=1).encode()
    checksum = b',\n "checksum": %d\n}' % google_crc32c.value(text)
    (folder / MANIFEST).write_bytes(text.removesuffix(b"\n}") + checksum)


def copy_with_hyperparameters(original: Path, folder: Path, changes: Mapping[str, Any]) -> Path:
    """Copy a checkpoint to `folder`, with other hyperparameters in its manifest; return it."""
    shutil.copytree(original, folder)
    known = read_manifest(folder).hyperparameters
    forge_manifest(folder, hyperparameters={**known, **changes})
    return folder


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Replace the header of a safetensors file by `change(header)`."""
    content = path.read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    text = json.dumps(change(json.loads(content[8:end]))).encode()
    text += b" " * (-len(text) % 8)  # tensors stay aligned
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[end:])
