"""Everything random is a pure function of what it is for, so that no generator's state is ever saved."""

import hashlib


def derive_seed(*parts: object) -> int:
    """A seed (63 bits) for what `parts` name, e.g. `derive(seed, "dropout", step, rank)`.

    The same on every machine and in every process; different parts give unrelated seeds.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
