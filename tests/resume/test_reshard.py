"""A checkpoint of any world size and strategy loads under any other, equal bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from fsdp import build_model
from lm.any_model import AnyModel
from lm.checkpoint.manifest import read_manifest
from lm.config.reading import read_hyperparameters
from lm.runtime.world import World
from lm.training import optim, parallelize
from model import ModelConfig
from tests.support.checkpoints import RUN_INFO, load_state, open_checkpointer, save_state
from tests.support.hyperparameters import TINY
from tests.support.parallelism import sharding_of
from tests.support.ranks import in_world, run_ranks

RANKS = (1, 3, 4)
LAYOUTS = ("full-shard", "no-shard", "hybrid-full-shard")
"""the strategies without those that differ from one of them in when they gather shards"""
WIDTH = {"d_model": 36, "vocab_size": 61, "n_layers": 1}  # no world size divides it evenly


def build(world: World, sharding: str, seed: int) -> tuple[AnyModel, optim.Optimizer]:
    """A sharded model initialized from `seed`, with moments twice its weights."""
    settings = TINY | WIDTH | sharding_of(sharding, world.size)
    hp = read_hyperparameters({"hyperparameters": settings}, [], "test")
    shape = parallelize.mesh_shape(hp.parallel, world.size, world.launch.local_size)
    model = build_model(hp, world.device_mesh(shape), None)
    parallelize.initialize_parameters(model, seed)
    optimizer = optim.Optimizer(hp.optim, model)
    for name, parameter in model.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            optimizer.state_dict()[f"{name}.{moment}"].copy_(parameter.detach() * 2)
    return model, optimizer


def write(world: World, folder: Path) -> list[str]:
    """Save a model under each of `LAYOUTS`; return the UUIDs."""
    uuids = []
    for sharding in LAYOUTS:
        with open_checkpointer(world, folder, keep_checkpoints=None) as saver:
            model, optimizer = build(world, sharding, seed=7)
            state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
            structure = model.config.model_dump(include=set(ModelConfig.model_fields))
            info = RUN_INFO.model_copy(update={"model": structure})
            uuids.append(save_state(saver, state, 1, info=info))
    return uuids


def weights(model: AnyModel) -> dict[str, Any]:
    """The weights without shards."""
    full = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        full[name] = tensor.detach().numpy()
    return full


def saved_weights(world: World) -> dict[str, Any]:
    return weights(build(world, "no-shard", seed=7)[0])


def local_state(model: AnyModel, optimizer: optim.Optimizer) -> dict[str, torch.Tensor]:
    """What this rank has of the weights and moments, by name."""
    state = dict(model.named_parameters()) | optimizer.state_dict()
    return {
        name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        for name, tensor in state.items()
    }


def differences(world: World, folder: Path, uuids: list[str]) -> list[str]:
    """Load each of `uuids` under each of `LAYOUTS` into another model; return what differs.

    Each rank compares what it has with its part of the model that was saved.
    """
    expected = saved_weights(world)
    wrong = []
    with open_checkpointer(world, folder) as reader:
        for sharding in LAYOUTS:
            model, optimizer = build(world, sharding, seed=7)
            for name, value in weights(model).items():
                wrong += [] if np.array_equal(value, expected[name]) else [f"{sharding}: {name}"]
            saved = local_state(model, optimizer)
            model, optimizer = build(world, sharding, seed=8)
            parts = {"model": model.state_dict(), "optim": optimizer.state_dict()}
            found = local_state(model, optimizer)
            assert found.keys() == saved.keys()
            for uuid in uuids:
                for tensor in found.values():
                    tensor.fill_(0.5)
                load_state(reader, reader.store.locate(uuid), parts)
                for name, tensor in saved.items():
                    same = torch.equal(found[name], tensor)
                    wrong += [] if same else [f"{uuid} as {sharding}: {name}"]
    return wrong


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Checkpoints of all `RANKS` in each of `LAYOUTS`; one of those whose files are equal."""
    folder = tmp_path_factory.mktemp("written")
    uuids = [uuid for ranks in RANKS for uuid in run_ranks(ranks, write, folder)[0]]
    assert len(uuids) == len(RANKS) * len(LAYOUTS)
    different: dict[str, str] = {}
    for uuid in uuids:
        manifest = read_manifest(folder / uuid)
        different[repr((sorted(manifest.files.items()), manifest.tensors))] = uuid
    return folder, list(different.values())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_checkpoint_loads_under_any_world_size_and_strategy(
    ranks: int, written: tuple[Path, list[str]]
) -> None:
    folder, uuids = written
    assert not [wrong for part in run_ranks(ranks, differences, folder, uuids) for wrong in part]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoint_weights_are_read_by_pytorch(
    written: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, uuids = written
    expected = in_world(saved_weights)
    for uuid in uuids:
        (tmp_path / uuid).mkdir()
        for path in (folder / uuid).glob("model-*.safetensors"):
            shutil.copy(path, tmp_path / uuid)
        read = {name: torch.zeros(value.shape) for name, value in expected.items()}
        dcp.load(
            read, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / uuid)), no_dist=True
        )
        assert all(np.array_equal(read[name].numpy(), value) for name, value in expected.items())
