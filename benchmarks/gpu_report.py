"""Tables in Markdown of what gpu.py measured."""

from collections.abc import Callable, Sequence
from typing import Any

from gpu_bench import Row

Part = dict[str, Any]
_GIB, _NONE = 2**30, "-"


def report(parts: dict[str, Part]) -> str:
    """All parts that were run, each under a line with its date, device and versions."""
    if not parts:
        return "Nothing was measured yet."
    return "\n\n".join(_part_text(name, part) for name, part in parts.items())


def _part_text(name: str, part: Part) -> str:
    device, mode = part["device"], part["mode"]
    versions = ", ".join(f"{key} {device[key]}" for key in ("torch", "cuda", "nccl") if device.get(key))
    how = "dry" * mode["dry"] + " quick" * mode["quick"]
    head = f"## {name}{f' ({how.strip()})' if how else ''}\n\n{part['date']}, {device['name']}, {versions}; "
    head += f"{part['status']} after {part['took_s']:.0f} s{': ' + part['error'] if 'error' in part else ''}."
    failed = [f"- {row['case']}: {row['error']}" for row in part["rows"] if "error" in row]
    skipped = [f"- {row['case']}: {row['skipped']}" for row in part["rows"] if "skipped" in row]
    fine = [row for row in part["rows"] if "error" not in row and "skipped" not in row]
    blocks = [head, _TABLES[name](fine) if fine else "", "\n".join(failed and ["Failed:", "", *failed])]
    return "\n\n".join(block for block in [*blocks, "\n".join(skipped and ["Left out:", "", *skipped])] if block)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float | None, form: str = ".2f", factor: float = 1.0) -> str:
    return _NONE if value is None else format(value * factor, form)


def _verdict(ok: bool | None) -> str:
    return _NONE if ok is None else "yes" if ok else "**no**"


def _spread(seconds: Sequence[float] | None, factor: float) -> str:
    if seconds is None:
        return _NONE
    low, middle, high = (value * factor for value in seconds)
    return f"{middle:.4g} [{low:.4g}, {high:.4g}]"


def _differences(row: Row) -> list[str]:
    limits = row.get("limits", {})
    printed = [f"{name} {value:.1e} of {limits[name]:.1e}" for name, value in row.get("differences", {}).items()]
    return [", ".join(printed) or _NONE, _verdict(row.get("ok"))]


def _equal(rows: Sequence[Row]) -> str:
    table = _table(["case", "difference, of its limit", "equal"], [[row["case"], *_differences(row)] for row in rows])
    unordered = [
        f"- {row['case']}: two runs have {'the same' if row['bits of two runs'] else 'other'} bits. "
        f"Without a fixed order: {'; '.join(row['no fixed order'])}."
        for row in rows if "no fixed order" in row
    ]  # fmt: skip
    return "\n\n".join([table, "\n".join(unordered)]).strip()


def _ranks(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        if row.get("accepted") is False:
            lines.append([row["case"], _NONE, f"refused: {row['said']}".replace("\n", " ")[:300], _NONE])
        for plan, result in row.get("plans", {}).items():
            error = (result or {}).get("error")
            printed = [error.replace("\n", " ")[:300], _verdict(False)] if error else _differences(result or {})
            lines.append([row["case"], plan, *printed])
    return _table(["over", "plan", "difference, of its limit", "equal"], lines)


def _kernels(rows: Sequence[Row]) -> str:
    lines = [
        [
            row["case"], name, _spread(result["seconds"], 1e6), _number(result.get("flops_per_s"), ".0f", 1e-12),
            _number(result.get("bytes_per_s"), ".0f", 1e-9), _number(result["roofline_s"], ".4g", 1e6),
            _number(result.get("of_roofline"), ".0%"), _number(result["predicted_s"], ".4g", 1e6),
            _number(result.get("over_predicted")),
        ]
        for row in rows for name, result in row["passes"].items()
    ]  # fmt: skip
    header = ["kernel", "pass", "us [quartiles]", "TFLOP/s", "GB/s", "roofline, us", "of the roofline"]
    return _table([*header, "predicted, us", "measured / predicted"], lines)


def _mfu(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        answer, causes = row["predicted"] or {}, row.get("causes", {})
        parts = {name: seconds for name, seconds in answer.items() if name in ("compute", "optimizer", "other")}
        lines.append([
            row["case"], _spread(row.get("step_s"), 1e3), _number(row.get("tokens_per_s"), ",.0f"),
            _number(row.get("mfu"), ".1%"), _number(answer.get("mfu"), ".1%"), _number(answer.get("total"), ".4g", 1e3),
            _number(row.get("over_predicted")), _causes(causes), _causes(parts),
        ])  # fmt: skip
    header = ["job", "step, ms [quartiles]", "tokens/s", "MFU", "predicted MFU", "predicted step, ms"]
    return _table([*header, "measured / predicted", "causes, ms", "predicted causes, ms"], lines)


def _causes(found: Row) -> str:
    return ", ".join(f"{name} {1e3 * seconds:.4g}" for name, seconds in found.items()) or _NONE


def _memory(rows: Sequence[Row]) -> str:
    def gib(found: Row, key: str) -> str:
        return _number(found.get(key), ".2f", 1 / _GIB)

    kinds = ("parameters", "gradients", "optimizer", "buffers")
    lines = []
    for row in rows:
        measured, dry = row.get("measured", {}), row["dry"]
        by_kind = ", ".join(f"{kind} {gib(measured or dry, f'{kind}_bytes')}" for kind in kinds)
        of_dry = (dry["activations_bytes"] + dry["working_bytes"]) / _GIB
        rest = [gib(measured, "beside state and buffers"), _number(of_dry)]
        lines.append([
            row["case"], gib(measured, "allocated"), gib(measured, "reserved"), gib(dry, "total_bytes"),
            gib(row["account"], "total_bytes"), _number(row.get("over_dry"), ".3f"), by_kind, " / ".join(rest),
            _verdict(row["ok"]),
        ])  # fmt: skip
    header = ["job", "peak, GiB", "reserved", "dry run's peak", "account", "measured / dry run"]
    return _table([*header, "what stays", "activations and working memory, measured / dry", "within 3 %"], lines)


def _train(rows: Sequence[Row]) -> str:
    lines = [
        [
            row["case"], " to ".join(f"{loss:.3f}" for loss in row.get("losses", ())) or _NONE,
            _number(row.get("step_s"), ".4g", 1e3), _number(row.get("over_predicted")), _verdict(row["ok"]),
        ]
        for row in rows
    ]  # fmt: skip
    return _table(["run", "loss", "step, ms", "measured / predicted", "right"], lines)


def _calibration(rows: Sequence[Row]) -> str:
    return "\n\n".join(f"{row['file']}:\n\n```\n{row['said'].strip()}\n```" for row in rows)


_TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "equal": _equal, "ranks": _ranks, "kernels": _kernels, "mfu": _mfu, "memory": _memory, "train": _train,
    "calibration": _calibration,
}  # fmt: skip
