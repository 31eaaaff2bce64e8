"""Plot memory by part over GPUs and strategies, and tokens/s per GPU of up to 10,000 GPUs in nodes of 8, by `lm.plan`.

    python -m benchmarks.plot_plan FILE.png [options of lm.plan]

`--gpus N` is the largest number of GPUs whose memory is shown.
"""

from __future__ import annotations

import itertools
import sys

from matplotlib.figure import Figure  # a dependency of determined

from lm.errors import command
from lm.metrics.device import GIB
from lm.plan import speed
from lm.plan.__main__ import SHARDINGS, load, make_plan, parse


@command
def main(arguments: list[str]) -> int:
    path, *options = arguments
    args = parse(options)
    card = speed.CARDS[args.gpu]
    hp = load(args).model_copy(update={"total_batch_size": None})
    counts = [*(2**power for power in range(14)), 10000]
    figure = Figure(figsize=(14, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = []
    for count, sharding in itertools.product((n for n in counts if n <= args.gpus), SHARDINGS):
        if count > 8 or not sharding.startswith("hybrid"):  # otherwise a hybrid is the same as full- or grad-shard
            plan = make_plan(hp.model_copy(update={"sharding": sharding}), count, max(1, count // 8), card.gib, None)
            bottom = 0.0
            for color, (part, n_bytes) in enumerate(plan["memory"].items()):
                left.bar(len(names), n_bytes / GIB, 0.8, bottom, color=f"C{color}", label="" if names else part)
                bottom += n_bytes / GIB
            names.append(f"{count} {sharding}")
    left.axhline(card.gib, color="k", linestyle="--", label=f"{card.name}: {card.gib:g} GiB")
    left.set_xticks(range(len(names)), names, rotation=90)
    left.set_ylabel("GiB per GPU")
    left.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
    for sharding in ("full-shard", "hybrid-full-shard"):
        changed = hp.model_copy(update={"sharding": sharding})
        plans = [make_plan(changed, n, max(1, n // 8), card.gib, card, args.network) for n in counts]
        right.plot(counts, [plan["tokens_per_second"] / plan["gpus"] for plan in plans], "o-", label=sharding)
    right.set(xscale="log", xlabel="GPUs", ylabel="tokens/s per GPU (not measured)", ylim=0)
    right.legend()
    figure.savefig(path, dpi=80)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
