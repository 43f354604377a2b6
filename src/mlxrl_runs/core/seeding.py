"""One way to turn names and numbers into seeds, the same in every process and on every machine."""

import hashlib
import random


def derive_seed(*parts: object) -> int:
    """A 64-bit seed that is a function of `parts` alone (not of Python's per-process hash)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def generator(*parts: object) -> random.Random:
    """An independent random stream named by `parts`."""
    return random.Random(derive_seed(*parts))
