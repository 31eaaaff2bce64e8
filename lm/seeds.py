"""Seeds as a pure function of their purpose, so that checkpoints hold no random generator state."""

import hashlib


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed for the purpose that `parts` name, e.g. `derive_seed(seed, "dropout", step, dp_rank)`.

    The seed is equal on every machine and in every process; different parts have unrelated seeds.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
