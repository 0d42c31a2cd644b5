"""The tables of the page `playbook`: the Ultra-Scale Playbook's grid, measured, chosen and predicted.

    python tests/support/playbook_page.py     # write them again, in both languages

A cell is a model on a number of GPUs. The measured runs are benchmarks/truth/playbook.csv.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from shardwright.config.units import seconds_text
from shardwright.cost.calibration import shipped
from shardwright.learn.idea_pages import LANGUAGES, IdeaPage
from shardwright.measure.measured_runs.runs import read_runs
from shardwright.measure.validate import Predicted, predict

RUNS = Path(__file__).parents[2] / "benchmarks" / "truth" / "playbook.csv"
TABLE = re.compile(r"(?P<head><!-- table (?P<name>cells|families) -->\n).*?(?=<!-- end -->)", re.DOTALL)
MODELS = {16: "1.3B", 32: "8.9B"}  # by number of layers
WORDS = {
    "en": {
        "cells": "| model, GPUs | runs | fastest: measured (predicted) | chosen here: predicted (measured) | why |",
        "families": "| model, GPUs | replicas alone | tensor parallel | pipeline | both |",
        "same": "as fastest",
        "beside": "beside computing: {parts}",
        "other run": "predicted {ahead} ahead, measured {behind} behind: ",
        "near": "the ranges of both predictions overlap",
        "far": "the prediction is wrong",
        "rewritten": "measured under 20 % MFU, while the authors rewrote their pipeline",
        "comma": ", ", "list": ", ", "colon": ": ", "both": "{} ({})",
        "none": "none ran",
        "data": "replicas", "tensor": "tensor sums", "bubble": "bubble", "messages": "messages",
        "optimizer": "update", "other": "the rest",
    },
    "zh": {
        "cells": "| 模型，GPU 数 | 运行次数 | 最快的：实测（预测） | 我们选的：预测（实测） | 为什么 |",
        "families": "| 模型，GPU 数 | 只用副本 | 张量并行 | 流水线并行 | 两者都用 |",
        "same": "同左",
        "beside": "计算之外：{parts}",
        "other run": "预测快 {ahead}，实测慢 {behind}：",
        "near": "两个预测的范围有重叠",
        "far": "预测错了",
        "rewritten": "实测 MFU 低于 20 %，作者当时正在重写流水线代码",
        "comma": "、", "list": "，", "colon": "：", "both": "{}（{}）",
        "none": "没有跑通的",
        "data": "副本间通信", "tensor": "张量并行求和", "bubble": "气泡", "messages": "阶段间消息",
        "optimizer": "更新", "other": "其余",
    },
}  # fmt: skip
PARTS = ("data", "tensor", "bubble", "messages", "optimizer", "other")
FAMILIES = ((False, False), (True, False), (False, True), (True, True))  # (uses tp, uses pp)

Cell = tuple[int, int]  # layers of the model, GPUs


@cache
def cells() -> Mapping[Cell, Sequence[Predicted]]:
    """The runs of each cell, with their predictions."""
    by_cell: dict[Cell, list[Predicted]] = defaultdict(list)
    for run in predict(read_runs(RUNS), shipped()):
        assert run.row.run is not None and run.time is not None
        by_cell[run.row.run.shape.layers, int(run.row.run.grid.world)].append(run)
    return dict(sorted(by_cell.items()))


def fastest(runs: Iterable[Predicted]) -> Predicted:
    """The run that was measured to be fastest."""
    return min(runs, key=lambda run: run.row.step_s)


def chosen(runs: Iterable[Predicted]) -> Predicted:
    """The run that is predicted to be fastest, of those that are predicted to fit."""
    return min((run for run in runs if run.fits), key=predicted_s)


def predicted_s(run: Predicted) -> float:
    """Predicted seconds of a step."""
    assert run.time is not None
    return float(run.time.total)


def plan_text(run: Predicted) -> str:
    """The plan of a run in few words."""
    assert run.row.run is not None
    grid = run.row.run.grid
    degrees = [f"{axis} {getattr(grid, axis)}" for axis in ("dp", "tp", "pp") if getattr(grid, axis) > 1]
    return ", ".join([*degrees, f"zero {grid.zero}", f"mb {grid.microbatch}"])


def parts_text(run: Predicted, words: Mapping[str, str], most: int) -> str:
    """The largest shares of a step beside computing."""
    shares = {part: getattr(run.time, part) / predicted_s(run) for part in PARTS}
    largest = sorted((part for part in PARTS if shares[part] >= 0.005), key=lambda part: -shares[part])[:most]
    return words["comma"].join(f"{words[part]} {100 * shares[part]:.0f} %" for part in largest)


def reason(best: Predicted, own: Predicted, words: Mapping[str, str]) -> str:
    """The reason why a choice is the measured one, or is not."""
    if own is best:
        return words["beside"].format(parts=parts_text(own, words, 2))
    ahead, behind = predicted_s(best) / predicted_s(own) - 1, own.row.step_s / best.row.step_s - 1
    cause = "near" if best.range_s[0] <= own.range_s[1] else "far"
    cause = cause if own.row.tier == "A" else "rewritten"
    return words["other run"].format(ahead=f"{100 * ahead:.1f} %", behind=f"{100 * behind:.1f} %") + words[cause]


def cell_row(cell: Cell, words: Mapping[str, str]) -> list[str]:
    """A line of the first table."""
    runs = cells()[cell]
    best, own = fastest(runs), chosen(runs)
    measured = both_s(best.row.step_s, predicted_s(best), words)
    predicted = both_s(predicted_s(own), own.row.step_s, words)
    return [
        str(len(runs)),
        plan_text(best) + words["colon"] + measured,
        words["same"] if own is best else plan_text(own) + words["colon"] + predicted,
        reason(best, own, words),
    ]


def both_s(first: float, second: float, words: Mapping[str, str], mark: str = "") -> str:
    """Two numbers of seconds, the second in brackets, with a mark behind it."""
    return words["both"].format(seconds_text(first), seconds_text(second) + mark)


def family_row(cell: Cell, words: Mapping[str, str]) -> list[str]:
    """A line of the second table: of each family of plans the run that is predicted to be fastest."""
    texts = []
    for uses in FAMILIES:
        runs = [run for run in cells()[cell] if run.fits and family_of(run) == uses]
        if not runs:
            texts.append(words["none"])
            continue
        own = chosen(runs)
        mark = "" if own.row.tier == "A" else " *"
        both = both_s(predicted_s(own), own.row.step_s, words, mark)
        texts.append(both + words["colon"] + parts_text(own, words, 1))
    return texts


def family_of(run: Predicted) -> tuple[bool, bool]:
    """The family of a run's plan: True if it shards matrices, and True if it has stages."""
    assert run.row.run is not None
    return run.row.run.grid.tp > 1, run.row.run.grid.pp > 1


def filled(markdown: str, language: str) -> str:
    """A page with the tables of now."""
    words, rows = WORDS[language], {"cells": cell_row, "families": family_row}

    def table(match: re.Match[str]) -> str:
        name = match["name"]
        lines = [words[name], "|---" * (words[name].count("|") - 1) + "|"]
        for cell in cells():
            size = words["list"].join([MODELS[cell[0]], str(cell[1])])
            lines.append("| " + " | ".join([size, *rows[name](cell, words)]) + " |")
        return match["head"] + "\n" + "\n".join(lines) + "\n\n"

    return TABLE.sub(table, markdown)


def main() -> None:
    """Write the tables in both languages."""
    for language in LANGUAGES:
        page = IdeaPage("playbook", language)
        page.file.write_text(filled(page.markdown, language), encoding="utf-8")


if __name__ == "__main__":
    main()
