"""Text of the command `dryrun`: memory at the peak beside the account, over the actions, and the collectives."""

from typing import Any

from shardwright.config.units import bytes_text, memory_text
from shardwright.report.text_columns import aligned

_KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers", "working", "host")
_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 100  # columns of the curve


def dryrun_text(name: str, run: dict[str, Any]) -> str:
    """A dry run for reading. `run` is that of `DryRun.as_dict`."""
    peak, account = run["peak"], run["account"]
    rows = [["", "at the peak", "account"]]
    for kind in _KINDS:
        held, foretold = peak[f"{kind}_bytes"], account.get(f"{kind}_bytes")
        if held or foretold:
            rows.append([kind, memory_text(held), "not counted" if foretold is None else memory_text(foretold)])
    rows.append(["on the device", memory_text(peak["total_bytes"]), memory_text(account["total_bytes"])])
    made = [[memory_text(num_bytes), *origin] for origin, num_bytes in peak["largest"]]
    steps = "a step" if run["num_steps"] == 1 else f"{run['num_steps']} steps"
    return "\n\n".join(
        [
            f"{run['place']} of {name}, as on {run['device']}: {run['num_operators']:,} operators of {steps} in "
            f"{run['took_s']:.1f} s, without their values",
            aligned(rows),
            f"Most is there after {peak['operator']} in {peak['action']}. Over the actions of the step:\n"
            + _curve(run["curve"], peak["total_bytes"]),
            "Made in this step, and there then:\n" + aligned(made, left=(1, 2)),
            _collectives(run["collectives"], run["account_collectives"]),
        ]
    )


def _collectives(run: dict[str, Any], account: dict[str, Any]) -> str:
    """The collectives of the run, and the account of each that differs."""
    rows, none = [["collective", "axis", "calls", "bytes"]], {"count": 0, "bytes": 0}
    if run != account:
        rows[0] += ["account's calls", "bytes"]
    for words in sorted({*run, *account}):
        kind, _, axis = words.partition(" ")
        entries = [run.get(words, none), account.get(words, none)]
        is_told = entries[0] != entries[1]
        sizes = [f"{e['bytes']:,}" if is_told else bytes_text(e["bytes"]) for e in entries]
        told = [(f"{e['count']:,}", size) for e, size in zip(entries, sizes, strict=True)][: 1 + is_told]
        rows.append([kind, axis, *(text for entry in told for text in entry)])
        rows[-1] += [""] * (len(rows[0]) - len(rows[-1]))
    verdict = "is equal in calls and bytes" if run == account else "differs where it is told"
    return f"{aligned(rows, left=(0, 1))}\nThe account of these, made without running anything, {verdict}."


def _curve(curve: list[tuple[str, int]], most: int) -> str:
    """The most memory of neighbouring actions, as bars from none to the peak."""
    width = min(_WIDTH, len(curve))
    parts = [curve[len(curve) * i // width : len(curve) * (i + 1) // width] for i in range(width)]
    heights = [max(num_bytes for _, num_bytes in part) / most for part in parts]
    bars = "".join(_BARS[round(height * (len(_BARS) - 1))] for height in heights)
    return f"{bars}\n{curve[0][0]} ... {curve[-1][0]}"
