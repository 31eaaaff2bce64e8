"""Seeds as a pure function of their purpose, so that checkpoints hold no random generator state."""

import hashlib


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed for a purpose, e.g. `derive_seed("dropout", seed, step, dp_rank)`.

    The seed is equal on every machine and in every process; different parts have unrelated seeds.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    seed_64_bits = int.from_bytes(digest, "big")
    return seed_64_bits >> 1  # it also fits into a signed integer of 64 bits
