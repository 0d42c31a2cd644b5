"""Text of the command `dryrun`: memory at the peak compared with the account, memory over the
actions, and the collectives."""

from typing import Any

from shardwright.config.units import bytes_text, memory_text
from shardwright.report.text_columns import aligned

_KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers", "working", "host")
_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 100  # columns of the curve


def dryrun_text(name: str, run: dict[str, Any]) -> str:
    """A dry run as text. `run` is the result of `DryRun.as_dict`."""
    peak, account = run["peak"], run["account"]
    rows = [["", "at the peak", "account"]]
    for kind in _KINDS:
        measured_bytes, account_bytes = peak[f"{kind}_bytes"], account.get(f"{kind}_bytes")
        if measured_bytes or account_bytes:
            rows.append(
                [
                    kind,
                    memory_text(measured_bytes),
                    "not counted" if account_bytes is None else memory_text(account_bytes),
                ]
            )
    rows.append(["on the device", memory_text(peak["total_bytes"]), memory_text(account["total_bytes"])])
    largest_tensors = [[memory_text(num_bytes), *origin] for origin, num_bytes in peak["largest"]]
    steps = "a step" if run["num_steps"] == 1 else f"{run['num_steps']} steps"
    return "\n\n".join(
        [
            f"{run['place']} of {name}, as on {run['device']}: {run['num_operators']:,} operators of {steps} in "
            f"{run['took_s']:.1f} s, without their values",
            aligned(rows),
            f"Most is there after {peak['operator']} in {peak['action']}. Over the actions of the step:\n"
            + _curve(run["curve"], peak["total_bytes"]),
            "Made in this step, and there then:\n" + aligned(largest_tensors, left=(1, 2)),
            _collectives(run["collectives"], run["account_collectives"]),
        ]
    )


def _collectives(run: dict[str, Any], account: dict[str, Any]) -> str:
    """A table of the run's collectives, with the account's calls and bytes where they differ."""
    rows, no_calls = [["collective", "axis", "calls", "bytes"]], {"count": 0, "bytes": 0}
    if run != account:
        rows[0] += ["account's calls", "bytes"]
    for name in sorted({*run, *account}):
        kind, _, axis = name.partition(" ")
        entries = [run.get(name, no_calls), account.get(name, no_calls)]
        differs = entries[0] != entries[1]
        sizes = [f"{e['bytes']:,}" if differs else bytes_text(e["bytes"]) for e in entries]
        columns = [(f"{e['count']:,}", size) for e, size in zip(entries, sizes, strict=True)][: 1 + differs]
        rows.append([kind, axis, *(text for entry in columns for text in entry)])
        rows[-1] += [""] * (len(rows[0]) - len(rows[-1]))
    verdict = "is equal in calls and bytes" if run == account else "differs where it is told"
    return f"{aligned(rows, left=(0, 1))}\nThe account of these, made without running anything, {verdict}."


def _curve(curve: list[tuple[str, int]], most: int) -> str:
    """The memory over the actions as bars from zero to the peak; a bar is the most of neighbouring actions."""
    width = min(_WIDTH, len(curve))
    parts = [curve[len(curve) * i // width : len(curve) * (i + 1) // width] for i in range(width)]
    heights = [max(num_bytes for _, num_bytes in part) / most for part in parts]
    bars = "".join(_BARS[round(height * (len(_BARS) - 1))] for height in heights)
    return f"{bars}\n{curve[0][0]} ... {curve[-1][0]}"
