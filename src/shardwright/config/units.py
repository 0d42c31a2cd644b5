"""Texts of numbers for people: seconds, FLOPs, bytes and counts, with few digits.

This is in config because all rooms write numbers: faults of the checks, predictions, and runs.
"""

import math
import re
from collections.abc import Sequence

from shardwright.config.phrase import Phrase, say

KIB, MIB, GIB = 2**10, 2**20, 2**30  # bytes
FLOAT32_BYTES = 4  # of a number, as masters and sums of gradients are
DAY_S = 86_400

_SECONDS = (  # (least seconds, unit in seconds, name of the unit)
    (2.0 * DAY_S, 1.0 * DAY_S, "days"),
    (7200.0, 3600.0, "h"),
    (120.0, 60.0, "min"),
    (1.0, 1.0, "s"),
    (1e-3, 1e-3, "ms"),
    (0.0, 1e-6, "us"),
)
_FLOPS = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1.0, "FLOP"))
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")


def seconds_text(seconds: float, beside_s: float = 0.0) -> str:
    """ "0.8 us", "34.1 ms", "6.75 s", "12 min", "4.2 h", "93.8 days"; "0" for exactly 0. A time that stands beside
    another one has its unit."""
    if seconds == 0:
        return "0"
    unit, name = next((unit, name) for least, unit, name in _SECONDS if (beside_s or seconds) >= least)
    value = seconds / unit
    if name == "days":
        return say("{days} days", days=f"{value:,.1f}")
    return f"{value:.3g} {name}" if value < 999.5 else f"{value:,.0f} {name}"


def flops_text(flops: float) -> str:
    """ "1.23 TFLOP"."""
    unit, name = next(((unit, name) for unit, name in _FLOPS if flops >= unit), _FLOPS[-1])
    return f"{flops / unit:.3g} {name}" if flops < 999.5 * unit else f"{flops / unit:,.0f} {name}"


def bytes_text(num_bytes: int) -> str:
    """ "512 B", "1.5 MiB": any size, with four digits."""
    power = 0
    while num_bytes >= 1024 ** (power + 1) and power + 1 < len(_BYTES):
        power += 1
    return f"{num_bytes / 1024**power:.4g} {_BYTES[power]}"


def size_bytes(text: str) -> int:
    """Bytes of a size as people write it: 1e9 for "1GB", 2**26 for "64MiB", 512 for "512". ValueError otherwise."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if match is None or (match[3] and not match[2]):
        raise ValueError(
            say(
                "{text} is no size; write a number of bytes, or one such as 25MB, 64MiB or 1GB",
                text=repr(text),
            )
        )
    num_bytes = float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " ")
    if math.isinf(num_bytes):
        raise ValueError(say("{text} is more bytes than a number can hold; write fewer", text=repr(text)))
    return int(num_bytes)


def memory_text(num_bytes: int) -> str:
    """ "0.8 MiB", "75.4 GiB": memory of a device, with one decimal, so that a column of sizes is easy to compare. A
    size above 0 that would be "0.0 MiB" has a smaller unit."""
    if 0 < num_bytes < MIB / 20:
        return bytes_text(num_bytes)
    return f"{num_bytes / MIB:,.1f} MiB" if num_bytes < GIB else f"{num_bytes / GIB:,.1f} GiB"


def number_text(number: float) -> str:
    """ "16,384", "0.5", "2.25"."""
    return f"{number:,.0f}" if number == int(number) or number >= 100 else f"{number:.3g}"


def days_column(days: Sequence[float]) -> tuple[Phrase, list[str]]:
    """Times of runs, in days, as a column of a table: its heading and its cells, in days, or all in hours or minutes
    where the shortest is less than one of the larger unit."""
    shortest = min((time for time in days if time > 0), default=1.0)
    headings = ((1, say("days")), (24, say("hours")), (1440, say("minutes")))
    in_a_day, heading = next((unit for unit in headings if unit[0] * shortest >= 1), headings[-1])
    return heading, [number_text(in_a_day * time) for time in days]


def tokens_text(num_tokens: float) -> str:
    """ "1e12", "2.5e9", "500": a number of tokens with three digits."""
    return f"{num_tokens:.3g}".replace("e+0", "e").replace("e+", "e")


def counted(number: int, noun: str) -> str:
    """ "1 rank", "4,096 ranks", "8 microbatches"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{'es' if noun.endswith('ch') else 's'}"


def counted_phrase(number: int, noun: str) -> Phrase:
    """The phrase of `counted`, whose nouns are in the catalogs: "{number:,} ranks"."""
    return Phrase("{number:,} " + counted(number, noun).partition(" ")[2], {"number": number})


def ending_phrase(status: int, last_words: str = "") -> Phrase:
    """ "signal 9" or "exit status 1: KeyError": how a process ended, by its exit status or the negative number of the
    signal that killed it. `last_words` are those of a process that no signal killed."""
    if status < 0:
        return say("signal {number}", number=-status)
    return say("exit status {status}{last_words}", status=status, last_words=last_words)


def ranks_text(ranks: tuple[int, ...], most: int = 6) -> str:
    """ "0 1 2 3", or the first few ranks and the last one if there are more than `most`."""
    if len(ranks) <= most:
        return " ".join(map(str, ranks))
    return " ".join(map(str, ranks[: most - 2])) + f" ... {ranks[-1]}"
