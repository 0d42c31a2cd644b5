"""Pages of the field's systems: their pictures are what `explain` prints, and their inequalities are right."""

import json
import re
from collections import defaultdict

import numpy as np
import pytest
from click.testing import CliRunner

from shardwright.cli.main import cli
from shardwright.config.cluster_facts import device_entry
from shardwright.config.matrix import Matrix
from shardwright.config.model_shape import shape_of
from shardwright.config.units import bytes_text
from shardwright.learn.grid_products import GridBytes, cube_bytes, grid_bytes, line_bytes
from shardwright.learn.idea_pages import LANGUAGES, SYSTEMS, IdeaPage
from shardwright.learn.system_figures import SYSTEM_PLANS, axis_traffic
from support.languages import words_of_picture
from support.learn_pages import commands, figure_file

LABELS = {
    "en": ("**Cuts:** ", "**Collectives:** ", "**The same here:** "),
    "zh": ("**切什么：** ", "**集合通信：** ", "**这里的对应：** "),
}


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_is_told_by_its_cuts_its_collectives_and_the_same_plan(name: str, language: str) -> None:
    text = IdeaPage(name, language).markdown
    places = [text.index(label) for label in LABELS[language]]
    assert places == sorted(places) and text.count("\n## ") == 3
    joined = [re.sub(r"\s*\\\n\s*", " ", command) for command in commands(text)]
    assert any(command.startswith(f"shardwright explain {SYSTEM_PLANS[name].words} ") for command in joined)


def test_each_system_has_a_plan() -> None:
    assert set(SYSTEM_PLANS) == set(SYSTEMS)


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_picture_of_a_system_has_the_bytes_of_explain(name: str) -> None:
    asked = ["explain", *SYSTEM_PLANS[name].words.split(), "--json"]
    printed = json.loads(CliRunner().invoke(cli, asked, catch_exceptions=False).stdout)
    printed_sums, drawn_sums = defaultdict[str, float](float), defaultdict[str, float](float)
    for crossing in printed["crossings"]:
        if crossing["phase"] != "end of step":
            printed_sums[crossing["axis"] + " inside"] += crossing["sent"]["inside"]
            printed_sums[crossing["axis"] + " between"] += crossing["sent"]["between"]
            printed_sums[crossing["axis"] + " waits"] += crossing["exposed_s"]
    rows, step_s = axis_traffic(SYSTEM_PLANS[name].spec)
    for row in rows:
        drawn_sums[row.group.axis + " inside"] += row.inside_bytes
        drawn_sums[row.group.axis + " between"] += row.between_bytes
        drawn_sums[row.group.axis + " waits"] += row.exposed_s
    assert step_s == pytest.approx(printed["step"]["total"]) and drawn_sums == pytest.approx(printed_sums)
    words = words_of_picture(figure_file(name, "en").read_text(encoding="utf-8"))
    for row in rows:
        texts = [bytes_text(round(size)) for size in (row.inside_bytes, row.between_bytes) if size]
        assert all(text in words for text in texts) and f"{row.group.axis} {len(row.group.ranks)}" in words


def gathered_along(blocks: list[np.ndarray]) -> int:
    """Elements that a rank sends while a ring gathers blocks of equal size, or sums and scatters as many."""
    return (len(blocks) - 1) * blocks[0].size


def product(tokens: int, inner: int, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """An input, a weight, and the gradient of their product."""
    draw = np.random.default_rng(0)
    return tuple(draw.integers(-4, 5, shape) for shape in ((tokens, inner), (inner, columns), (tokens, columns)))


def cut(matrix: np.ndarray, down: int, across: int) -> list[list[np.ndarray]]:
    return [np.split(rows, across, axis=1) for rows in np.split(matrix, down)]


@pytest.mark.parametrize(("depth", "side"), [(1, 2), (1, 3), (2, 2), (3, 3)])
def test_a_grid_sends_what_its_products_need(depth: int, side: int) -> None:
    """Products of a layer done block by block: they are right, and what each rank gathers and scatters is counted."""
    x, weight, above = product(36, 12, 24)
    inputs, weights, grads = cut(x, depth * side, side), cut(weight, side, side), cut(above, depth * side, side)
    input_grad, weight_grad = np.zeros_like(x), np.zeros_like(weight)
    for row, of_row in enumerate(inputs):
        for column in range(side):
            of_column = [weights[line][column] for line in range(side)]
            whole_row, whole_column = np.hstack(of_row), np.vstack(of_column)
            rows, columns = (
                slice(at * size, (at + 1) * size) for at, size in ((row, len(whole_row)), (column, 24 // side))
            )
            assert (whole_row @ whole_column == (x @ weight)[rows, columns]).all()
            input_grad[rows] += grads[row][column] @ whole_column.T  # summed along the row
            weight_grad[:, columns] += whole_row.T @ grads[row][column]  # along the column, and over the depth
    assert (input_grad == above @ weight.T).all() and (weight_grad == x.T @ above).all()
    activations = 3 * gathered_along(inputs[0])
    of_weights = 3 * gathered_along(weights[0]) + 2 * (depth - 1) * weights[0][0].size / depth
    sent = grid_bytes([Matrix("up", (24,), 12)], 36, depth, side)
    assert sent == GridBytes(pytest.approx(2 * activations), pytest.approx(2 * of_weights))


@pytest.mark.parametrize("side", [2, 3])
def test_a_cube_sends_what_its_products_need(side: int) -> None:
    x, weight, above = product(18, 36, 72)
    inputs, weights, grads = (cut(matrix, side, side) for matrix in (x, weight, above))
    outputs = [[np.zeros_like(block) for block in row] for row in grads]
    for line in range(side):  # ranks along a line sum a product
        for row in range(side):
            for column in range(side):
                outputs[row][column] += inputs[row][line] @ weights[line][column]
    assert (np.block(outputs) == x @ weight).all()
    shares = {
        name: np.split(blocks[0][0].ravel(), side)
        for name, blocks in (("input", inputs), ("weight", weights), ("output", grads))
    }  # a rank keeps one of each block
    each = {name: gathered_along(parts) for name, parts in shares.items()}
    activations, of_weights = 3 * each["input"] + 2 * each["output"], 3 * each["weight"]
    sent = cube_bytes([Matrix("up", (72,), 36)], 18, side)
    assert sent == GridBytes(pytest.approx(2 * activations), pytest.approx(2 * of_weights))


def test_two_dims_win_by_the_inequality_of_the_page() -> None:
    matrices = shape_of(SYSTEM_PLANS["colossal-ai"].spec.model).matrices("dense")
    inner, elements = sum(matrix.inner for matrix in matrices), sum(matrix.num_elements for matrix in matrices)
    sides = set()
    for side in (2, 4, 8):
        for tokens in (2048, 8192, 16384, 65536):
            line, grid = line_bytes(matrices, tokens, side**2), grid_bytes(matrices, tokens, 1, side)
            bound = 3 * (side - 1) / side**2 * (tokens * inner + elements)
            wins = bound < 8 * (1 - side**-2) * tokens * 8192
            assert wins == (grid.activations + grid.weights < line.activations)
            sides.add((side, wins))
    assert {(4, True), (4, False), (8, True), (8, False)} <= sides


def test_gathers_of_questions_are_those_of_the_grid() -> None:
    matrices = shape_of(SYSTEM_PLANS["colossal-ai"].spec.model).matrices("dense")
    text = IdeaPage("colossal-ai", "en").markdown
    gathers = [
        16384 * sum(matrix.inner for matrix in matrices) / 8,
        sum(matrix.num_elements for matrix in matrices) / 8,
    ]
    assert all(f"{round(2 * gathered / 2**20)} MiB" in text for gathered in gathers)


def test_numbers_in_the_text_follow_from_devices_and_formulas() -> None:
    h100, a100 = device_entry("h100-sxm"), device_entry("a100-sxm-80g")
    hidden = SYSTEM_PLANS["megatron-lm"].spec.model.hidden
    flops = {device.name: device.peak_tflops["bfloat16"] * 1e12 for device in (h100, a100)}
    shares = [(tp - 1) * flops[a100.name] / (3 * hidden * a100.link_gb_per_s * 1e9) for tp in (8, 16)]
    tokens = [flops[h100.name] / (rate * 1e9) for rate in (h100.link_gb_per_s, h100.network_gb_per_s)]
    by_stage = [7.5 * (kept + (16 - kept) / 64) for kept in (16, 4, 2, 0)]
    told = {
        "torchtitan": [f"{3 * flops[h100.name] / (h100.memory_gb_per_s * 1e9):.0f}"],
        "megatron-lm": [f"{share:.2f}" for share in shares],
        "fsdp": [f"{number:,.0f}" for number in tokens],
        "deepspeed": [f"{gigabytes:.1f}".removesuffix(".0") for gigabytes in by_stage],
    }
    for name, numbers in told.items():
        for language in LANGUAGES:
            text = IdeaPage(name, language).markdown.partition("\n## ")[0]
            assert all(re.search(rf"(?<![\d.]){re.escape(number)}(?![\d])", text) for number in numbers), (
                name,
                numbers,
            )
