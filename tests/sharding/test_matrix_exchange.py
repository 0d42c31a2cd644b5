"""Who owns which matrix, and which units are exchanged together: enough matrices to share the work out evenly."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.memory.rank_state import StageState, rank_state
from shardwright.schedule.job_program import job_program
from shardwright.sharding.matrix_exchange import (
    ALL_TP_RANKS,
    MATRICES_EACH,
    MatrixExchange,
    exchanged_together,
    orthogonal_flops,
)
from support.cases import small_job, with_optimizer


@settings(max_examples=100, deadline=None)
@given(num_matrices=st.lists(st.integers(1, 20), max_size=30), num_owners=st.integers(1, 16))
def test_neighbours_of_about_as_many_matrices(num_matrices: list[int], num_owners: int) -> None:
    groups = exchanged_together(num_matrices, num_owners)
    assert [unit for group in groups for unit in group] == list(range(len(num_matrices)))
    total = sum(num_matrices)
    times = max(1, round(total / (MATRICES_EACH * num_owners)))
    assert len(groups) <= times
    for group in groups:
        assert sum(num_matrices[unit] for unit in group) <= total / times + max(num_matrices)


def stage(kind: str, tp_index: int = 0, bucket_mib: float = 25.0, layers: int = 6, **plan: int) -> StageState:
    """The state that a rank holds of a small model's only stage."""
    job = small_job(kind, batch=8, layers=layers, sequence_parallel="tp" in plan, bucket_mib=bucket_mib, **plan)
    job = with_optimizer(job, name="muon")
    return rank_state(job, job_program(job), 0, tp_index)[0]


def exchanges(state: StageState) -> list[MatrixExchange]:
    return [group.update for group in state.updates if isinstance(group.update, MatrixExchange)]


PLANS = [
    ("llama", 25.0, {"dp": 4, "zero": 3}),
    ("llama", 0.004, {"dp": 4, "zero": 1}),
    ("gpt", 0.01, {"dp": 2, "tp": 2, "zero": 2}),
    ("deepseek", 0.01, {"dp": 2, "tp": 2, "ep": 2, "zero": 3}),
    ("llama", 0.002, {"tp": 2}),
]


@pytest.mark.parametrize(("kind", "bucket_mib", "plan"), PLANS)
def test_work_is_shared_out(kind: str, bucket_mib: float, plan: dict[str, int]) -> None:
    """To within the largest matrix of each exchange; each matrix of the model is in one."""
    whole = stage(kind, **({"ep": plan["ep"], "dp": plan["ep"]} if "ep" in plan else {}))
    state = stage(kind, bucket_mib=bucket_mib, **plan)
    results = exchanges(state)
    assert sum(len(each.matrices) for each in results) == sum(len(each.matrices) for each in exchanges(whole))
    assert any(len(group.units) > 1 for group in state.updates) and len(results) > 1
    for each in results:
        work: Counter[tuple[int, int]] = Counter()
        costs = [orthogonal_flops(of.matrix.full_rows, of.matrix.full_columns, 1) for of in each.matrices]
        for of, cost in zip(each.matrices, costs, strict=True):
            for index in range(each.tp_size) if of.tp_owner == ALL_TP_RANKS else [of.tp_owner]:
                work[of.shard, index] += cost
        owners = each.num_shards * each.tp_size
        assert max(work.values()) <= work.total() / owners + max(costs)


@pytest.mark.parametrize(("kind", "bucket_mib", "plan"), PLANS)
def test_what_leaves_arrives(kind: str, bucket_mib: float, plan: dict[str, int]) -> None:
    """Each element of a rank's part of a matrix is in one shard; ranks of tp have the same owners; and what is sent to
    owners comes back."""
    states = [stage(kind, index, bucket_mib, **plan) for index in range(plan.get("tp", 1))]
    for alike in zip(*(exchanges(state) for state in states), strict=True):
        each = alike[0]
        owners = [(of.shard, of.tp_owner) for of in each.matrices]
        assert all([(of.shard, of.tp_owner) for of in other.matrices] == owners for other in alike)
        for of in each.matrices:
            assert sum(each.num_held(shard, of) for shard in range(each.num_shards)) == of.matrix.num_elements
        for along, lines in (("shards", [[0]]), ("tp", [range(each.tp_size)])):
            sent = [
                [num_bytes for way, num_bytes in each.sent_bytes(shard, index) if way == along]
                for indices in lines
                for shard in range(each.num_shards)
                for index in indices
            ]
            there, back = (sum(of[way] for of in sent if of) for way in (0, 1))
            assert there == back
        assert each.scratch_bytes >= each.itemsize * sum(each.shard_sizes)
