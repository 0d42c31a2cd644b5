"""What the command `dryrun` prints: memory at the peak beside the account, over the actions, and the collectives."""

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
    sent = [["collective", "axis", "calls", "bytes"]]
    for words, entry in run["collectives"].items():
        kind, _, axis = words.partition(" ")
        sent.append([kind, axis, f"{entry['count']:,}", bytes_text(entry["bytes"])])
    return "\n\n".join(
        [
            f"{run['place']} of {name}, as on {run['device']}: {run['num_operators']:,} operators of a step in "
            f"{run['took_s']:.1f} s, without their values",
            aligned(rows),
            f"Most is there after {peak['operator']} in {peak['action']}. Over the actions of the step:\n"
            + _curve(run["curve"], peak["total_bytes"]),
            "Made in this step, and there then:\n" + aligned(made, left=(1, 2)),
            aligned(sent, left=(0, 1)),
        ]
    )


def _curve(curve: list[tuple[str, int]], most: int) -> str:
    """The most memory of neighbouring actions, as bars from none to the peak."""
    width = min(_WIDTH, len(curve))
    parts = [curve[len(curve) * i // width : len(curve) * (i + 1) // width] for i in range(width)]
    heights = [max(num_bytes for _, num_bytes in part) / most for part in parts]
    bars = "".join(_BARS[round(height * (len(_BARS) - 1))] for height in heights)
    return f"{bars}\n{curve[0][0]} ... {curve[-1][0]}"
