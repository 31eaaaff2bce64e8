"""`benchmarks.growth` measures on real ranks what its formulas predict."""

from __future__ import annotations

import pytest

from benchmarks.growth import PARTS, STRATEGIES, gathered_bytes, memory_bytes, run_ranks
from lm.config import Hyperparameters
from lm.parallelize import mesh_dims
from tests.support import TINY


@pytest.mark.slow
def test_the_memory_of_a_rank_equals_the_formulas() -> None:
    shape = TINY | {"max_seq_len": 64, "batch_size": 4, "amp_dtype": "bfloat16", "shard_group_size": 1}
    points = [shape | {"sharding": name} for name in STRATEGIES]
    for point, found in zip(points, run_ranks(2, points, 1), strict=True):
        hp = Hyperparameters.model_validate(point)
        shards = mesh_dims(hp, 2, 2)["shard"]
        expected = memory_bytes(hp, shards)
        assert [found[part] for part in PARTS] == [4 * hp.n_parameters // shards * times for times in (1, 1, 2)]
        assert sum(found[part] for part in PARTS) == expected["state"]
        assert found["gathered"] == gathered_bytes(hp, shards), hp.sharding
        peak = found["parameters"] + found["moments"] + min(found["transient"])
        assert 0.75 < peak / sum(expected.values()) < 1.05, hp.sharding
        assert len(found["seconds"]) == 1
