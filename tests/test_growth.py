"""What `benchmarks.growth` measures on real ranks is what its closed forms say."""

from __future__ import annotations

from benchmarks.growth import PARTS, STRATEGIES, gathered_bytes, memory_bytes, run_ranks
from lm.config import Hyperparameters
from lm.parallelize import mesh_shape
from tests.support import TINY


def test_ranks_hold_what_the_formulas_say() -> None:
    shape = TINY | {"max_seq_len": 64, "batch_size": 4, "amp_dtype": "bfloat16", "shard_group_size": 1}
    points = [shape | {"sharding": name} for name in STRATEGIES]
    for point, found in zip(points, run_ranks(2, points, 1), strict=True):
        hp = Hyperparameters.model_validate(point)
        _, shards = mesh_shape(hp, 2, 2)
        expected = memory_bytes(hp, shards)
        assert [found[part] for part in PARTS] == [4 * hp.n_parameters // shards * times for times in (1, 1, 2)]
        assert sum(found[part] for part in PARTS) == expected["state"]
        assert found["gathered"] == gathered_bytes(hp, shards), hp.sharding
        peak = found["parameters"] + found["moments"] + min(found["transient"])
        assert 0.75 < peak / sum(expected.values()) < 1.05, hp.sharding
        assert len(found["seconds"]) == 1
