"""Seconds, FLOPs and numbers of things in words, with as many digits as one reads."""

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_FLOPS = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1.0, "FLOP"))


def seconds_text(seconds: float) -> str:
    """ "1.25 s", "34.1 ms", "0.8 us"; "0" is none at all."""
    if seconds == 0:
        return "0"
    unit, name = next(((unit, name) for unit, name in _SECONDS if seconds >= unit), _SECONDS[-1])
    return f"{seconds / unit:.3g} {name}" if seconds < 999.5 * unit else f"{seconds / unit:,.0f} {name}"


def flops_text(flops: float) -> str:
    """ "1.23 TFLOP"."""
    unit, name = next(((unit, name) for unit, name in _FLOPS if flops >= unit), _FLOPS[-1])
    return f"{flops / unit:.3g} {name}" if flops < 999.5 * unit else f"{flops / unit:,.0f} {name}"


def count_text(number: float) -> str:
    """ "16,384", "0.5", "2.25"."""
    return f"{number:,.0f}" if number == int(number) or number >= 100 else f"{number:.3g}"


def ranks_text(ranks: tuple[int, ...], most: int = 6) -> str:
    """ "0 1 2 3", or the first ones and the last where there are many."""
    if len(ranks) <= most:
        return " ".join(map(str, ranks))
    return " ".join(map(str, ranks[: most - 2])) + f" ... {ranks[-1]}"
