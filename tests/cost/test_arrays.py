"""Plans priced together are priced as each alone; distinct combinations are found and given back."""

from dataclasses import asdict, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.config.model_shape import ModelShape
from shardwright.config.rank_order import ORDERS
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.section_shapes import ExpertShape, LatentShape
from shardwright.cost.calibration import shipped
from shardwright.layers.arrays import distinct
from shardwright.layers.query import PlanGrid, Run, stacked
from shardwright.layers.stage_contents import all_ranks, different_ranks
from shardwright.memory.rank_estimate import peak_memory, rank_memory
from shardwright.simulate.batch_pricing import Price, batches, prices
from shardwright.simulate.closed_form import step_time

CONSTANTS = shipped()
LLAMA = ModelShape(18, 4096, 32, 8, 128, 14336, True, 128256, 4096)
MOE = replace(LLAMA, experts=ExpertShape(num=64, topk=4, ffn=2048, shared_ffn=2048, dense_layers=3))
LATENT = replace(MOE, latent=LatentShape(1536, 512))
GPT = replace(LLAMA, tied=True, gated=False)

DEGREES = st.fixed_dictionaries(
    {
        "dp": st.sampled_from([1, 2, 3, 16]), "tp": st.sampled_from([1, 2, 8, 16]), "pp": st.sampled_from([1, 2, 4, 6]),
        "cp": st.sampled_from([1, 2]), "ep": st.sampled_from([1, 2, 8]), "virtual": st.sampled_from([1, 2, 3]),
        "zero": st.sampled_from([0, 1, 2, 3]), "zero_ranks": st.sampled_from([0, 2, 8]),
        "microbatch": st.sampled_from([1, 2]), "sequence_parallel": st.booleans(),
        "global_batch": st.sampled_from([96, 128]), "order_number": st.integers(0, len(ORDERS) - 1),
    }
)  # fmt: skip
WORDS = st.fixed_dictionaries(
    {
        "recompute": st.sampled_from(["none", "selective", "full", "matmul"]),
        "schedule": st.sampled_from(["1f1b", "interleaved-1f1b", "gpipe", "zb-h1", "zb-h2"]),
        "precision": st.sampled_from(["bf16", "fp8"]),
    }
)

SEVERAL = [
    "1f1b", "gpipe", "sequential", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min",
    "dualpipe", "dualpipev",
]  # fmt: skip


@pytest.mark.long
@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from([LLAMA, MOE, LATENT, GPT]), st.lists(DEGREES, min_size=1, max_size=6), WORDS,
    st.sampled_from(["megatron-core", "nemo", "aleph-torch", "hai-llm"]), st.sampled_from([4, 8, 72]),
)  # fmt: skip
def test_arrays_are_priced_as_single_plans(
    shape: ModelShape, degrees: list[dict], words: dict, software: str, domain: int
) -> None:
    grids = [PlanGrid(**words, **numbers) for numbers in degrees]
    run = Run(
        shape,
        stacked(grids),
        device="h100-sxm",
        software=software,
        devices_per_node=domain,
        node_bytes_per_s=450e9,
        network_bytes_per_s=50e9,
    )
    times, memory = asdict(step_time(run, CONSTANTS)), asdict(peak_memory(run, CONSTANTS))
    for n, grid in enumerate(grids):
        alone = replace(run, grid=grid)
        for together, single in ((times, step_time(alone, CONSTANTS)), (memory, peak_memory(alone, CONSTANTS))):
            for name, value in asdict(single).items():
                assert isinstance(value, float)
                assert together[name][n] == pytest.approx(value, rel=1e-12, abs=1e-12), name


@pytest.mark.long
@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([LLAMA, GPT]),
    st.lists(st.tuples(DEGREES, st.sampled_from(SEVERAL)), min_size=2, max_size=8),
)
def test_plans_of_several_schedules_are_priced_as_single_plans(
    shape: ModelShape, plans: list[tuple[dict, str]]
) -> None:
    """In one call, whatever the order in which their schedules come."""
    grids = [
        PlanGrid(schedule=name, **numbers | {"virtual": SCHEDULES[name].stages_per_rank or 2})
        for numbers, name in plans
    ]
    together = replace(
        stacked(grids), schedule_number=np.array([SCHEDULES.names.index(grid.schedule) for grid in grids])
    )
    run = Run(
        shape,
        together,
        device="h100-sxm",
        software="megatron-core",
        devices_per_node=8,
        node_bytes_per_s=450e9,
        network_bytes_per_s=50e9,
    )
    times, memory = asdict(step_time(run, CONSTANTS)), asdict(peak_memory(run, CONSTANTS))
    for n, grid in enumerate(grids):
        alone = replace(run, grid=grid)
        for many, single in ((times, step_time(alone, CONSTANTS)), (memory, peak_memory(alone, CONSTANTS))):
            for name, value in asdict(single).items():
                assert many[name][n] == pytest.approx(value, rel=1e-12, abs=1e-12), (name, grid.schedule)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([LLAMA, MOE, GPT]), DEGREES, WORDS)
def test_the_peak_is_of_the_rank_that_needs_most(shape: ModelShape, numbers: dict, words: dict) -> None:
    """Ranks that hold alike are told apart by how many microbatches they keep, and the peak is of all of them."""
    run = Run(
        shape,
        PlanGrid(**words, **numbers),
        device="h100-sxm",
        software="megatron-core",
        devices_per_node=8,
        node_bytes_per_s=450e9,
        network_bytes_per_s=50e9,
    )
    ranks = rank_memory(run, CONSTANTS)
    assert len(ranks) == run.grid.pp
    assert peak_memory(run, CONSTANTS).process == max(rank.process for rank in ranks)


@given(
    st.sampled_from([LLAMA, MOE]), st.lists(DEGREES, min_size=1, max_size=4),
    st.sampled_from(["1f1b", "interleaved-1f1b", "zb-v", "dualpipe"]),
)  # fmt: skip
def test_ranks_that_differ_stand_for_all(shape: ModelShape, degrees: list[dict], schedule: str) -> None:
    """Each kind is there once for every plan, with the first of its ranks; shorter pipelines repeat one."""
    virtual = {"1f1b": 1, "zb-v": 2, "dualpipe": 1}.get(schedule, 3)
    grids = [PlanGrid(schedule=schedule, **numbers | {"virtual": virtual}) for numbers in degrees]
    result = different_ranks(shape, stacked(grids))
    for n, grid in enumerate(grids):
        every = all_ranks(shape, grid.as_arrays())
        first: dict[tuple, int] = {}
        for rank, *held in zip(
            *(a[:, 0].tolist() for a in (every.rank, every.embedding, every.head, *every.layers)), strict=True
        ):
            first.setdefault(tuple(held), rank)
        kinds = zip(
            *(a[:, n].tolist() for a in (result.rank, result.embedding, result.head, *result.layers)), strict=True
        )
        assert {tuple(held): rank for rank, *held in kinds} == first


def test_tables_lie_where_the_first_and_the_last_stage_do() -> None:
    """In a V both are on rank 0; DualPipe has them on both ends, and a rank has one table where they are tied."""
    tables = {}
    for schedule, virtual in (("1f1b", 1), ("zb-v", 2), ("dualpipe", 1)):
        ranks = all_ranks(GPT, PlanGrid(schedule=schedule, pp=4, virtual=virtual).as_arrays())
        tables[schedule] = (ranks.embedding[:, 0].tolist(), ranks.head[:, 0].tolist())
        layers = sum(count[:, 0].sum() for count in ranks.layers)
        assert layers == GPT.layers * (2 if schedule == "dualpipe" else 1)
        elements = ranks.parameters(GPT, PlanGrid(pp=4).as_arrays())[0][0, 0]
        of_layers = ranks.layers[0][0, 0] * GPT.kind_parameters("dense")[0]
        assert elements - of_layers == GPT.vocab * GPT.hidden
        assert bool(ranks.are_tables_apart[0]) == (schedule == "1f1b")
    assert tables["1f1b"] == ([1, 0, 0, 0], [0, 0, 0, 1])
    assert tables["zb-v"] == ([1, 0, 0, 0], [1, 0, 0, 0])
    assert tables["dualpipe"] == ([1, 0, 0, 1], [1, 0, 0, 1])


@given(st.lists(st.tuples(*3 * [st.integers(0, 2**40) | st.integers(0, 3)]), min_size=1, max_size=40))
def test_distinct_rows_stand_for_all(rows: list[tuple[int, ...]]) -> None:
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    results, which = distinct(columns)
    assert [tuple(column[results][n].item() for column in columns) for n in which] == rows
    assert len(results) == len(set(rows))


def test_plans_with_several_layouts_are_priced_at_once_as_alone() -> None:
    layouts = [(), *((2 + n, 3, LLAMA.layers - 9 - n, 4) for n in range(3)), (1, 1, 1, 1)]
    runs = [
        Run(
            LLAMA,
            PlanGrid(pp=4, global_batch=8, layout=layout),
            device="h100-sxm",
            software="megatron-core",
            devices_per_node=8,
            node_bytes_per_s=450e9,
            network_bytes_per_s=50e9,
        )
        for layout in layouts
    ]
    assert len(list(batches(runs))) == 1
    *answers, illegal = prices(runs, CONSTANTS)
    for run, price in zip(runs[:-1], answers, strict=True):
        assert isinstance(price, Price)
        assert price.time == step_time(run, CONSTANTS)
        assert price.memory == peak_memory(run, CONSTANTS)
    assert len({float(price.time.total) for price in answers if isinstance(price, Price)}) == len(answers)
    assert "4 layers in all" in str(illegal)


def test_prices_keep_their_order() -> None:
    run = Run(
        LLAMA,
        PlanGrid(),
        device="h100-sxm",
        software="megatron-core",
        devices_per_node=8,
        node_bytes_per_s=450e9,
        network_bytes_per_s=50e9,
    )
    grids = [PlanGrid(dp=dp, recompute=policy, global_batch=8) for dp, policy in product((1, 2), ("none", "full"))]
    runs = [replace(run, grid=grid) for grid in grids]
    result = prices([*runs, replace(run, device="h1000")], CONSTANTS)
    for run, price in zip(runs, result[:4], strict=True):
        assert isinstance(price, Price)
        assert price.time == step_time(run, CONSTANTS)
        assert price.memory == peak_memory(run, CONSTANTS)
    assert "not in the catalog" in str(result[4])
