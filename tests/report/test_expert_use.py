"""The picture of how experts were used: what a made-up run says is what is drawn, and every word has its own place."""

import json
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from shardwright.cli.main import cli
from shardwright.config.base import PlanError
from shardwright.config.gate_facts import GATES
from shardwright.report.expert_use import draw_use, experts_picture, read_use, use_dict, use_text
from shardwright.report.svg import BOUNDS, level
from support.experts_run import load_of, write_run
from support.languages import assert_same_in_chinese, differing, num_chinese, words_of_picture

SVG = "{http://www.w3.org/2000/svg}"
DOCS = Path(__file__).parents[2] / "docs"


def drawn(folder: Path) -> ElementTree.Element:
    return ElementTree.fromstring(experts_picture(read_use(folder), "a run"))


def cells(group: ElementTree.Element, rows: int, columns: int) -> list[list[int | None]]:
    """The colours of a heat map's cells, read from its rectangles; None is an empty cell."""
    *rectangles, frame = group.findall(f"{SVG}rect")
    left, top, width, height = (float(frame.get(name, "")) for name in ("x", "y", "width", "height"))

    def colour_at(x: float, y: float) -> int | None:
        results = [
            int(rectangle.get("class", "")[1:])
            for rectangle in rectangles
            if 0 <= x - float(rectangle.get("x", "")) < float(rectangle.get("width", ""))
            and 0 <= y - float(rectangle.get("y", "")) < float(rectangle.get("height", ""))
        ]
        assert len(results) <= 1, "rectangles overlap"
        return results[0] if results else None

    return [
        [colour_at(left + (c + 0.5) * width / columns, top + (r + 0.5) * height / rows) for c in range(columns)]
        for r in range(rows)
    ]


def words(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def test_each_cell_is_the_load_of_an_expert_in_a_step(tmp_path: Path) -> None:
    write_run(tmp_path)
    maps = [group for group in drawn(tmp_path).iter(f"{SVG}g") if group.get("class") == "load"]
    assert len(maps) == 2
    for layer, group in enumerate(maps):
        loads = [load_of(step, layer, 4) for step in range(1, 7)]
        wanted = [[level(load[expert] * 4 / sum(load)) for load in loads] for expert in range(4)]
        assert cells(group, 4, 6) == wanted
        assert len({colour for row in wanted for colour in row}) > 3


def test_pairs_are_those_of_the_last_step_that_counted_them(tmp_path: Path) -> None:
    write_run(tmp_path, steps=5)
    root = drawn(tmp_path)
    first = next(group for group in root.iter(f"{SVG}g") if group.get("class") == "together")
    counts = [[0 if i == j else 4 + 5 * i + j for j in range(4)] for i in range(4)]
    wanted = [[None if i == j else level(counts[i][j] * 3 / sum(counts[i])) for j in range(4)] for i in range(4)]
    assert cells(first, 4, 4) == wanted
    assert words(root).count("step 4") == 2


def test_figures_are_means_of_the_end(tmp_path: Path) -> None:
    write_run(tmp_path, steps=30)
    use = read_use(tmp_path)
    first, second = use_dict(use)["layers"]
    assert (first["layer"], second["layer"], first["experts"]) == (1, 3, 4)
    assert first["dropped_share"] == pytest.approx(sum(0.25 / step for step in range(21, 31)) / 10)
    assert f"layer 3: busiest {second['largest_load']:.2f} x mean" in use_text(use)
    chinese = use_text(use, "zh")
    assert num_chinese(chinese) > 40 and not differing(use_text(use), chinese)
    texts = words(drawn(tmp_path))
    assert "dropped 1.0 %" in texts and "unserved 12.5 %" in texts and f"entropy 1.50 of {math.log(4):.2f}" in texts


def test_curves_are_at_the_height_of_their_values(tmp_path: Path) -> None:
    """Three charts of two layers: busiest, entropy, dropped."""
    write_run(tmp_path)
    use = read_use(tmp_path)
    curves = [
        [float(point.split(",")[1]) for point in line.get("points", "").split()]
        for line in drawn(tmp_path).iter(f"{SVG}polyline")
    ]
    assert len(curves) == 6
    for layer, (loads, _, dropped) in zip(use.layers, (curves[::2], curves[1::2]), strict=True):
        for heights, values in ((loads, layer.figures["largest_load"]), (dropped, layer.figures["dropped_share"])):
            first, last = (values[0], heights[0]), (values[-1], heights[-1])
            scale = (last[1] - first[1]) / (last[0] - first[0])
            assert scale < 0  # more is higher up
            assert heights == pytest.approx([first[1] + scale * (value - first[0]) for value in values], abs=0.15)


def test_bytes_are_told_by_link_where_nodes_are_known(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert use_dict(read_use(tmp_path))["sent_bytes"] == {
        "tokens to experts and back": {"inside_nodes": 4 << 20, "between_nodes": 1 << 20},
        "all else": {"inside_nodes": 1 << 20, "between_nodes": 2 << 20},
    }
    assert any("4 MiB, between nodes (red) 1 MiB" in word for word in words(drawn(tmp_path)))
    write_run(tmp_path, has_nodes=False)
    assert not any("bytes" in word for word in words(drawn(tmp_path)))


@pytest.mark.parametrize(
    "shape", [{}, {"steps": 1}, {"steps": 300, "layers": 10, "num_experts": 120}, {"layers": 8, "has_nodes": False}]
)
def test_words_lie_apart_and_on_the_page(tmp_path: Path, shape: dict[str, Any]) -> None:
    write_run(tmp_path, **shape)
    root = drawn(tmp_path)
    boxes = []
    for element in root.iter(f"{SVG}text"):
        size, x, y = (float(element.get(name, "")) for name in ("font-size", "x", "y"))
        wide = 0.6 * size * len(element.text or "")
        left = x - {"middle": wide / 2, "end": wide}.get(element.get("text-anchor", ""), 0.0)
        boxes.append((left, y - 0.75 * size, left + wide, y + 0.2 * size, element.text))
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    for n, (left, top, right, bottom, word) in enumerate(boxes):
        assert left >= 0 and top >= 0 and right <= width and bottom <= height, word
        for other in boxes[:n]:
            assert right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top, (word, other[4])


def test_the_picture_has_the_same_numbers_in_chinese(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path)
    use = read_use(tmp_path)
    assert_same_in_chinese(lambda language: words_of_picture(experts_picture(use, "run", language)), monkeypatch, 80)


def test_colours_have_a_dark_side(tmp_path: Path) -> None:
    write_run(tmp_path)
    text = experts_picture(read_use(tmp_path), "a run")
    light, *dark = text.split("prefers-color-scheme: dark")
    for number in range(len(BOUNDS) + 1):
        assert f".h{number} {{" in light + dark[0] and any(f".h{number} {{" in part for part in dark)
    assert not re.search(r"https?://", text.replace("http://www.w3.org/2000/svg", ""))


def test_a_run_that_goes_on_is_drawn_up_to_its_last_whole_line(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "experts": [{"lay')
    assert read_use(tmp_path).steps == [1, 2, 3]


def test_the_command_draws_and_tells(tmp_path: Path) -> None:
    write_run(tmp_path)
    answer = CliRunner().invoke(cli, ["experts", str(tmp_path)], catch_exceptions=False)
    assert "layer 1: busiest" in answer.output and str(tmp_path / "experts.svg") in answer.output
    other = tmp_path / "other.svg"
    result = json.loads(CliRunner().invoke(cli, ["experts", str(tmp_path), "--json", "--svg", str(other)]).stdout)
    assert result["last_step"] == 6 and result["svg"] == str(other)
    title = f"{tmp_path.name}: how experts were used in steps 1 to 6"
    assert title in other.read_text() and other.read_text() == (tmp_path / "experts.svg").read_text()


def test_what_can_not_be_drawn_is_said(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"there is no .*metrics\.jsonl; name the folder of a run"):
        read_use(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "experts": null}\n')
    with pytest.raises(PlanError, match="has no step with experts; train a model that has some"):
        read_use(tmp_path)
    write_run(tmp_path)
    with pytest.raises(PlanError, match=r"can't be written: .*; name another with --svg"):
        draw_use(tmp_path, tmp_path / "nowhere" / "x.svg")


def test_the_table_in_the_docs_shows_every_gate_with_its_rule_and_without() -> None:
    text = (DOCS / "experts.md").read_text(encoding="utf-8")
    assert "![" in text and "(experts.svg)" in text
    table = text[text.index("| gate | balanced by |") :].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert {row[0].split(",")[0].replace(" ", "-") for row in rows} == set(GATES)
    picture = ElementTree.parse(DOCS / "experts.svg").getroot()
    for gate in {row[0] for row in rows}:
        loads = {row[1]: float(row[2]) for row in rows if row[0] == gate}
        unruled = loads.pop("none", None)
        if unruled is None:
            assert list(loads) == ["none needed"] and loads["none needed"] <= 1.5
        else:
            assert min(loads.values()) <= 1.5 < unruled and max(loads.values()) < unruled
        assert gate in words(picture)
