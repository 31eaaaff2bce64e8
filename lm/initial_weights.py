"""What `init_from` names: the weights of a run that resumes from no checkpoint.

A run enters lm.hf here alone, and without `init_from` it does not import it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm.any_model import AnyModel
from lm.checkpoint.manifest import Base
from lm.config.hyperparameters import Hyperparameters
from lm.runtime.world import World
from lm.transformers_config import Kernels


@dataclass(frozen=True)
class InitialWeights:
    """What `init_from` names; nothing of it is set without the key."""

    model: str | None = None
    """a Hugging Face model; or the base of adapters, which is loaded at every start"""
    checkpoint: str | None = None
    """where a checkpoint is"""
    base: Base | None = None
    """what identifies the weights under adapters"""

    def load_model(
        self, model: AnyModel, world: World, log: Callable[[str], None], *, to_be_exported: bool
    ) -> None:
        """Fill this rank's shards of `model`, on all ranks together, if `self.model` is set."""
        if self.model is None:
            return
        from lm.hf.weights import load_into

        load_into(model, self.model, world, log, to_be_exported=to_be_exported)


def model_defaults(source: str, kernels: Kernels | None) -> Mapping[str, Any]:
    """Return the hyperparameters that the model `source` sets; see `model_defaults` of lm.hf."""
    from lm.hf import weights

    return weights.model_defaults(source, kernels)


def find_initial_weights(
    hp: Hyperparameters, world: World, downloads: bool = True
) -> InitialWeights:
    """Return what `init_from` names, on all ranks together.

    Args:
        downloads: False = without the `base` of adapters if it is on the Hub.
    """
    source = hp.checkpoint.init_from
    if source is None:
        return InitialWeights()
    from lm.hf import base, weights

    is_model = weights.is_model(source)
    if hp.lora.lora_rank is None:
        if is_model:
            return InitialWeights(model=source)
        return InitialWeights(checkpoint=source)
    is_on_hub = is_model and not Path(source).is_dir()
    if is_on_hub and not downloads:
        return InitialWeights(model=source)
    found = base.find_base(source, world)
    return InitialWeights(model=found.source, base=found)
