"""What a run imports of transformers for a model, imported without what torchao logs meanwhile."""

from __future__ import annotations

import importlib

from lm.transformers_model import quiet

with quiet():
    importlib.import_module("lm.hf.base")
    importlib.import_module("transformers.modeling_layers")
    importlib.import_module("transformers.models.auto.modeling_auto")
