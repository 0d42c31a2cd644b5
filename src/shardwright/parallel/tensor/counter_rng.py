"""Random numbers that depend only on their place in the model, not on the rank or the time of computation.

A number is a hash of a key and a counter, so every plan and every recomputation gets the same number, and there is no
generator state. Salmon et al. 2011 (Parallel Random Numbers: As Easy as 1, 2, 3) propose such generators.

Shape suffixes: S sequence, B batch, W words of a row, T tokens.
"""

import hashlib

import torch
from torch import Tensor


def stream_key(seed: int, step: int, purpose: str) -> int:
    """The key of the random numbers of one place of the model in one step."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step} {purpose}".encode(), digest_size=8).digest(), "little")


def random_words(rows_sB: Tensor, words: int, key: int) -> Tensor:
    """64 random bits for each word of each row, int64, [s, B, words]; or [T, words] for rows [T].

    Word w of a row is SplitMix64 (Steele, Lea and Flood 2014, figure 16) at position row x words + w of stream `key`.
    """
    step = 0x9E3779B97F4A7C15
    first_sB = rows_sB * _signed(words * step) + _signed(key)
    z_sBW = first_sB[..., None] + torch.arange(words, device=rows_sB.device) * _signed(step)
    shifted_sBW = torch.empty_like(z_sBW)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        # int64 shifts copy the sign bit; the mask clears the copies, as in a shift of an unsigned number.
        torch.bitwise_right_shift(z_sBW, shift, out=shifted_sBW)
        z_sBW.bitwise_xor_(shifted_sBW.bitwise_and_((1 << (64 - shift)) - 1))
        if factor != 1:
            z_sBW.mul_(_signed(factor))
    return z_sBW


def uniform(rows_T: Tensor, key: int) -> Tensor:
    """A random number in [0, 1) for each row, float32, [T]: the upper 24 bits of its word."""
    return ((random_words(rows_T, 1, key).squeeze(-1) >> 40) & 0xFFFFFF).float() * 2.0**-24


def _signed(number: int) -> int:
    """The 64-bit integer with the same bits: torch's integers are signed, and wrap around."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number
