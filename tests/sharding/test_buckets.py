"""Units of parameters: every rank of tp has the same ones, whatever parts of the tensors it holds."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwright.config.job import JobSpec
from shardwright.memory.rank_state import rank_state
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.tensor.initial_values import seeded
from shardwright.parallel.tensor.parameter import name_parameters, sharded, whole
from shardwright.parallel.zero.flat_unit import FlatUnit
from shardwright.parallel.zero.unit_setting import Sharding, UnitSetting, tensor_pool
from shardwright.schedule.job_program import job_program
from support.cases import KINDS, against_one_rank, small_job
from support.ranks import run_on_mesh
from support.rounding import check_rounding


def with_vocab(job: JobSpec, vocab: int) -> JobSpec:
    return job.model_copy(update={"model": job.model.model_copy(update={"vocab": vocab})})


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    tp=st.sampled_from([2, 4]),
    vocab=st.integers(16, 300),
    ffn=st.integers(8, 64),
    bucket_mib=st.sampled_from([0.0005, 0.001, 0.002, 0.004, 0.01]),
    zero=st.sampled_from([0, 1, 2, 3]),
)
def test_ranks_of_tp_group_alike(kind: str, tp: int, vocab: int, ffn: int, bucket_mib: float, zero: int) -> None:
    """Else one would sum the gradients of a norm over tp while another sums those of two."""
    job = with_vocab(small_job(kind, tp=tp, dp=2, zero=zero, bucket_mib=bucket_mib), vocab)
    job = job.model_copy(update={"model": job.model.model_copy(update={"ffn": ffn})})
    program = job_program(job)
    groups = [
        [[place.name for place in unit.places if place.summed_over or not place.sharded_over] for unit in state.units]
        for index in range(tp)
        for state in rank_state(job, program, 0, index).values()
    ]
    assert all(own == groups[0] for own in groups)


# A vocabulary of 33 or 37 is cut into unequal parts. In small buckets one part fills a bucket where another does not.
PLANS: dict[str, tuple[str, dict[str, Any], int]] = {
    "tp2": ("gpt", {"tp": 2, "sequence_parallel": True, "bucket_mib": 0.002}, 33),
    "tp4": ("gpt", {"tp": 4, "sequence_parallel": True, "bucket_mib": 0.00125}, 37),
    "zero2": ("gpt-tied", {"tp": 2, "dp": 3, "zero": 2, "sequence_parallel": True, "batch": 6}, 37),
    "zero3": ("gpt", {"tp": 2, "dp": 4, "zero": 3, "sequence_parallel": True, "batch": 8}, 33),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PLANS)
def test_unequal_parts_equal_one_rank(name: str) -> None:
    kind, fields, vocab = PLANS[name]
    job = with_vocab(small_job(kind, **fields), vocab)
    check_rounding(against_one_rank(job), job)


def sums_over_tp_and_dp(mesh: Mesh) -> list[tuple[int, float]]:
    """Offset and summed gradient of what each rank holds whole, of gradients that are 1 on tp rank 0 and 2 on 1."""
    module = nn.Module()
    module.cut = sharded((3, 8), 0, mesh.tp, "normal", 0.02)
    module.first, module.second = (whole((rows, 5), "normal", 0.02, mesh.tp) for rows in (1, 2))
    name_parameters(module, torch.device("cpu"), torch.float32)
    parameters = [module.cut, module.first, module.second]
    unit = FlatUnit(
        parameters,
        Sharding(1, mesh.dp, mesh.cp, mesh.tp),
        UnitSetting(JobSpec(), tensor_pool(torch.device("cpu")), seeded(0)),
    )
    for parameter in parameters:
        parameter.add_gradient(torch.full(parameter.shape, 1.0 + mesh.tp.index))
    unit.start_reduce()
    unit.finish_reduce()
    places = dict(zip(unit.parameters, unit.layout.offsets, strict=True))
    return [(places[p], unit.rows_of_gradient(p).sum().item()) for p in (module.first, module.second)]


def test_a_shard_that_ends_between_what_is_summed() -> None:
    """The part of 1 row leaves the cut between two matrices and inside neither; that of 2 rows leaves it elsewhere."""
    ranks = run_on_mesh(small_job(tp=2, dp=2), sums_over_tp_and_dp)
    gaps = {second - first - 5 for (first, _), (second, _) in ranks}
    assert len(gaps) == 2, "one rank of tp has padding between them, and the other has not"
    for tp in (0, 1):
        of_shards = [results for rank, results in enumerate(ranks) if rank % 2 == tp]
        # 2 replicas, each the sum 1 + 2 over tp; 5 elements of the first and 10 of the second.
        assert [sum(sums) for sums in zip(*([s for _, s in results] for results in of_shards), strict=True)] == [30, 60]
