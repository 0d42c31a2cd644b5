"""The table of kernels and bytes in docs/gpu.md is what a dry run counts."""

import re
from collections import Counter
from pathlib import Path

import pytest

from support.kernel_traffic import Kernel, step_kernels

pytestmark = pytest.mark.long

PAGE = Path(__file__).parents[2] / "docs/gpu.md"
BASE = (
    "plan={dp=1, zero=1, microbatch_size=1}", 'precision.compute="bf16"', "cluster.software=shardwright",
    'run.device="cuda"', "model.sequence=8192", "model.vocab=128256",
)  # fmt: skip
LLAMA = (*BASE, "model.hidden=4096", "model.heads=32", "model.kv_heads=8", "model.ffn=14336")
MODELS = {
    "dense 1B": (*BASE, "model.hidden=2048", "model.heads=32", "model.kv_heads=8", "model.ffn=8192"),
    "dense 8B": LLAMA,
    "8 experts of 7B": (*LLAMA, "model.moe={experts=8, top_k=2}"),
}
# Of a step with L layers and M microbatches: what there is L x M times, L times, M times and once.
PARTS = ("a layer, a microbatch", "a layer, a step", "a microbatch besides", "a step besides")
# In a dry run an operator for each tensor of the state stands for one kernel of the update.
UPDATE = "parallel/optimizers/elementwise.py"
PROFILED = ("_record_function_enter_new", "_record_function_exit")  # no kernels


def parts_of_step(fields: tuple[str, ...]) -> list[Counter[Kernel]]:
    """The kernels of each part, from steps with two or three layers and microbatches."""
    steps = {
        (layers, number): step_kernels(*fields, layers=layers, num_microbatches=number)
        for layers in (2, 3)
        for number in (2, 3)
    }

    def summed(*signed: tuple[int, Counter[Kernel]]) -> Counter[Kernel]:
        total = Counter[Kernel]()
        for sign, kernels in signed:
            for kernel, count in kernels.items():
                total[kernel] += sign * count
        return total

    both = summed((1, steps[3, 3]), (-1, steps[3, 2]), (-1, steps[2, 3]), (1, steps[2, 2]))
    layer = summed((1, steps[3, 2]), (-1, steps[2, 2]), (-2, both))
    microbatch = summed((1, steps[2, 3]), (-1, steps[2, 2]), (-2, both))
    rest = summed((1, steps[2, 2]), (-4, both), (-2, layer), (-2, microbatch))
    return [both, layer, microbatch, rest]


def shown(kernels: Counter[Kernel]) -> tuple[int, float]:
    """(kernels, GB) as the page has them."""
    number, num_bytes = 0.0, 0.0
    for kernel, count in kernels.items():
        # Of three operators, each of which reads and writes 12 bytes of an element, stands one kernel, with 28 in all.
        number += 0 if kernel.operator in PROFILED else count / 3 if kernel.file == UPDATE else count
        num_bytes += kernel.num_bytes * count * (28 / 36 if kernel.file == UPDATE else 1)
    return round(number), num_bytes / 1e9


def in_page(part: str) -> list[tuple[int, float]]:
    """The cells of a row of the page: "28, 10.3 GB"."""
    (row,) = re.findall(rf"^\| {re.escape(part)}[^|]*\|(.*)\|$", PAGE.read_text(encoding="utf-8"), re.M)
    cells = [re.fullmatch(r"\s*([\d,]+): ([\d.]+) GB\s*", cell) for cell in row.split("|")]
    return [(int(cell[1].replace(",", "")), float(cell[2])) for cell in cells if cell is not None]


@pytest.mark.parametrize("model", MODELS)
def test_the_table_is_what_is_counted(model: str) -> None:
    column = list(MODELS).index(model)
    for part, kernels in zip(PARTS, parts_of_step(MODELS[model]), strict=True):
        number, gigabytes = shown(kernels)
        answer, told_gigabytes = in_page(part)[column]
        assert answer == number, part
        assert told_gigabytes == pytest.approx(gigabytes, rel=0.01, abs=0.006), part
