"""Copies of gathered parameters and of gradients under FSDP, and the entries of software that have them."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.config import catalog
from shardwright.config.adapter import AdapterSpec
from shardwright.config.model_shape import ModelShape
from shardwright.config.software import software_of
from shardwright.cost.calibration import shipped
from shardwright.cost.piece_time import PieceTime
from shardwright.cost.stage_time import Costing
from shardwright.layers.query import PlanGrid, Run
from shardwright.simulate.closed_form import step_time

SHAPE = ModelShape(16, 4096, 32, 8, 128, 14336, True, 128256, 4096)
RUN = Run(
    SHAPE,
    PlanGrid(dp=8, zero=3, microbatch=1, global_batch=8),
    device="h100-sxm",
    software="torchtitan",
    devices_per_node=8,
    node_bytes_per_s=450e9,
    network_bytes_per_s=50e9,
)
PRIORS = Path(__file__).parents[2] / "benchmarks/fit_priors.toml"


def layer_of(run: Run, copied: tuple[float, float]) -> PieceTime:
    costing = Costing.of(run, shipped())
    zero = costing.software.zero.model_copy(update={"copied": copied})
    return replace(costing, software=costing.software.model_copy(update={"zero": zero})).piece("dense", "none")


@pytest.mark.parametrize(
    ("software", "copied"),
    [("torchtitan", (4, 6)), ("torchtitan-2025", (4, 6)), ("automodel", (4, 4)), ("transformers-2024", (0, 4))],
)
def test_a_layer_has_the_copies_of_its_parameters(software: str, copied: tuple[float, float]) -> None:
    """Bytes by element over the rate of the memory: a gather in each pass, a scatter in the backward."""
    run = replace(RUN, software=software)
    assert software_of(software).zero.copied == copied
    with_copies, without = layer_of(run, copied), layer_of(run, (0.0, 0.0))
    element_s = SHAPE.kind_parameters("dense")[0] / Costing.of(run, shipped()).rates.memory_bytes_per_s
    assert float(with_copies.forward - without.forward) == pytest.approx(copied[0] * element_s)
    assert float(with_copies.backward - without.backward) == pytest.approx(sum(copied) * element_s)


def test_nothing_is_copied_where_nothing_is_gathered() -> None:
    for grid in (replace(RUN.grid, dp=1, global_batch=1), replace(RUN.grid, zero=1)):
        run = replace(RUN, grid=grid)
        assert layer_of(run, (4.0, 6.0)).total == layer_of(run, (0.0, 0.0)).total


def test_parameters_of_another_width_are_copied_as_wide_as_they_are() -> None:
    """A base in NF4 has a quarter of the bytes and its scales; adapters' gradients are too few to count."""
    base = replace(RUN, shape=replace(SHAPE, adapter=AdapterSpec(rank=8, base="nf4")))
    more = [layer_of(run, (4.0, 6.0)).forward - layer_of(run, (0.0, 0.0)).forward for run in (RUN, base)]
    assert 0.25 < float(more[1] / more[0]) < 0.3
    assert layer_of(base, (0.0, 6.0)).total == layer_of(base, (0.0, 0.0)).total


def test_the_step_has_the_copies_of_all_layers() -> None:
    """The copies of 32 layers less those of 16, which leaves out the tables."""

    def copies_s(layers: int) -> float:
        runs = [
            replace(RUN, shape=replace(SHAPE, layers=layers), software=name) for name in ("automodel", "torchtitan")
        ]
        fewer, more = (layers_s(run) for run in runs)
        return more - fewer

    def layers_s(run: Run) -> float:
        zero = software_of(run.software).zero
        of_layer = layer_of(run, zero.copied), layer_of(run, (0.0, 0.0))
        step = step_time(run, shipped())
        return float(step.compute) - run.shape.layers * float(of_layer[1].forward + of_layer[1].backward)

    element_s = SHAPE.kind_parameters("dense")[0] / Costing.of(RUN, shipped()).rates.memory_bytes_per_s
    assert copies_s(32) - copies_s(16) == pytest.approx(16 * 2 * element_s, rel=1e-3)


def test_compiling_gains_less_in_larger_models_and_no_more_than_was_measured() -> None:
    """IBM's Llama 2 of 7, 34 and 70 billion parameters on 128 A100, by itself and compiled: 23, 17 and 11 %
    (pytorch.org/blog/maximizing-training-throughput)."""
    measured, gains = (0.23, 0.17, 0.11), []
    for layers, hidden, kv_heads, ffn in ((32, 4096, 32, 11008), (48, 8192, 8, 22016), (80, 8192, 8, 28672)):
        shape = ModelShape(layers, hidden, hidden // 128, kv_heads, 128, ffn, True, 32000, 4096)
        recompute = "none" if hidden == 4096 else "full"
        grid = PlanGrid(dp=128, zero=3, microbatch=2, global_batch=256, recompute=recompute)
        run = replace(RUN, shape=shape, grid=grid, device="a100-sxm-80g")
        run = replace(run, node_bytes_per_s=300e9, network_bytes_per_s=6.25e9)
        eager_s, compiled_s = (
            float(step_time(replace(run, software=name), shipped()).total)
            for name in ("transformers-2024", "fsdp-compile")
        )
        gains.append(eager_s / compiled_s - 1)
    assert gains == sorted(gains, reverse=True)
    assert all(0.4 * most < gain < most for gain, most in zip(gains, measured, strict=True))


def scatter_s(run: Run, num_bytes: int = 0) -> float:
    """Seconds of scattering the gradients of a layer; with `num_bytes`, where software reduces so many of each under
    every stage."""
    costing = Costing.of(run, shipped())
    if num_bytes:
        zero = costing.software.zero.model_copy(update={"scattered_bytes": 0})
        software = costing.software.model_copy(update={"reduce_bytes": num_bytes, "zero": zero})
        costing = replace(costing, software=software)
    return float(costing.shard_s("dense")[1])


def test_gradients_under_zero_3_travel_in_the_type_that_the_software_or_the_job_says() -> None:
    """Accelerate's FSDP reduces in the type of the products, where DDP reduces what it adds up."""
    run = replace(RUN, software="transformers-2024")
    assert (software_of(run.software).reduce_bytes, software_of(run.software).scattered_bytes) == (4, 2)
    assert scatter_s(run) == scatter_s(run, 2) < scatter_s(run, 4)
    told = replace(run, grid=replace(run.grid, reduce_bytes=4))
    assert Costing.of(told, shipped()).software.scattered_bytes == 4
    assert scatter_s(told) == scatter_s(run, 4)


def test_every_constant_has_a_prior() -> None:
    """benchmarks/fit_costs.py can write each constant of the catalog's calibrations again."""
    priors = tomllib.loads(PRIORS.read_text())
    names = {
        f"{file}.{name}"
        for file in catalog.names("calibrations")
        if file != "pessimistic"
        for name in catalog.read("calibrations", file)
    }
    assert {name for name in names if not name.endswith(".name")} <= set(priors)
