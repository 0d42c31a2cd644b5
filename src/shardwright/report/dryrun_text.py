"""Text of the command `dryrun`: memory at the peak compared with the account, memory over the
actions, and the collectives."""

from typing import Any

from shardwright.config.phrase import ENGLISH, say
from shardwright.config.units import bytes_text, memory_text
from shardwright.report.document import AlignedRows, Lines, document_text
from shardwright.sharding.memory_account import DEVICE_KINDS

_KINDS = DEVICE_KINDS | {"host": say("host")}
_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 100  # columns of the curve


def dryrun_text(name: str, run: dict[str, Any], language: str = ENGLISH) -> str:
    """A dry run as text in a language. `run` is the result of `DryRun.as_dict`."""
    peak, account = run["peak"], run["account"]
    rows: list[list[str]] = [["", say("at the peak"), say("account")]]
    for kind, label in _KINDS.items():
        measured_bytes, account_bytes = peak[f"{kind}_bytes"], account.get(f"{kind}_bytes")
        if measured_bytes or account_bytes:
            account_text = say("not counted") if account_bytes is None else memory_text(account_bytes)
            rows.append([label, memory_text(measured_bytes), account_text])
    rows.append([say("on the device"), memory_text(peak["total_bytes"]), memory_text(account["total_bytes"])])
    largest_tensors = [[memory_text(num_bytes), *origin] for origin, num_bytes in peak["largest"]]
    heading = say(
        "{place} of {name}, as on {device}: {operators:,} operators of {steps} in {took_s:.1f} s, without their values",
        place=run["place"],
        name=name,
        device=run["device"],
        operators=run["num_operators"],
        steps=say("a step") if run["num_steps"] == 1 else say("{count} steps", count=run["num_steps"]),
        took_s=run["took_s"],
    )
    moment = say(
        "Most is there after {operator} in {action}. Over the actions of the step:",
        operator=peak["operator"],
        action=peak["action"],
    )
    parts = (
        heading,
        AlignedRows(rows),
        Lines((moment, _curve(run["curve"], peak["total_bytes"]))),
        Lines((say("Made in this step, and there then:"), AlignedRows(largest_tensors, left=(1, 2)))),
        _collectives(run["collectives"], run["account_collectives"]),
    )
    return document_text(parts, language)


def _collectives(run: dict[str, Any], account: dict[str, Any]) -> Lines:
    """A table of the run's collectives, with the account's calls and bytes where they differ."""
    rows: list[list[str]] = [[say("collective"), say("axis"), say("calls"), say("bytes")]]
    no_calls = {"count": 0, "bytes": 0}
    if run != account:
        rows[0] += [say("account's calls"), say("bytes")]
    for name in sorted({*run, *account}):
        kind, _, axis = name.partition(" ")
        entries = [run.get(name, no_calls), account.get(name, no_calls)]
        differs = entries[0] != entries[1]
        sizes = [f"{e['bytes']:,}" if differs else bytes_text(e["bytes"]) for e in entries]
        columns = [(f"{e['count']:,}", size) for e, size in zip(entries, sizes, strict=True)][: 1 + differs]
        rows.append([kind, axis, *(text for entry in columns for text in entry)])
        rows[-1] += [""] * (len(rows[0]) - len(rows[-1]))
    verdict = (
        say("The account of these, made without running anything, is equal in calls and bytes.")
        if run == account
        else say("The account of these, made without running anything, differs where it is told.")
    )
    return Lines((AlignedRows(rows, left=(0, 1)), verdict))


def _curve(curve: list[tuple[str, int]], most: int) -> str:
    """The memory over the actions as bars from zero to the peak; a bar is the most of neighbouring actions."""
    width = min(_WIDTH, len(curve))
    parts = [curve[len(curve) * i // width : len(curve) * (i + 1) // width] for i in range(width)]
    heights = [max(num_bytes for _, num_bytes in part) / most for part in parts]
    bars = "".join(_BARS[round(height * (len(_BARS) - 1))] for height in heights)
    return f"{bars}\n{curve[0][0]} ... {curve[-1][0]}"
