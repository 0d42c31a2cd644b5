"""A bit that flips in what several ranks hold alike is found and its rank named; nothing is found where none has."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from health.watched import Fault, watched_run, with_health
from shardwright.config.job import JobSpec
from shardwright.config.plan import PlanSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.build import Replica
from shardwright.train.health.repeated_step import content_hash, wrapped
from shardwright.train.health.replica_hashes import KINDS, ReplicasDifferError, groups_alike, odd_ranks
from support.cases import small_job
from support.ranks import run_on_mesh

FLIPPED_IN, STEPS, EVERY = 3, 5, 2


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Turn one bit of a tensor around."""
    words = tensor.view(-1).view(torch.int32 if tensor.element_size() == 4 else torch.int16)
    words[element] ^= 1 << bit


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=60), st.data(), st.integers(0, 31),
    st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_any_flipped_bit_changes_the_hash(numbers: list[float], data: Any, bit: int, dtype: torch.dtype) -> None:
    x = torch.tensor(numbers, dtype=torch.float32).to(dtype)
    before, element = content_hash(x), data.draw(st.integers(0, len(numbers) - 1))
    flip(x, element, bit % (8 * dtype.itemsize - 1))
    assert content_hash(x) != before


@given(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=60), st.integers(0, 60))
def test_hashes_of_parts_add_up(numbers: list[int], cut: int) -> None:
    x = torch.tensor(numbers)
    one, other = x[:cut], x[cut:]
    total = int(content_hash(one)) + int(content_hash(other, len(one)))
    assert wrapped(total) == int(content_hash(x))


def test_a_long_tensor_is_hashed_in_pieces() -> None:
    x = torch.arange(3_000_000, dtype=torch.int32)
    assert int(content_hash(x)) == wrapped(
        int(content_hash(x[:1_500_000])) + int(content_hash(x[1_500_000:], 1_500_000))
    )
    swapped = x.clone()
    swapped[[5, 2_500_000]] = x[[2_500_000, 5]]
    assert content_hash(swapped) != content_hash(x)


def test_the_majority_is_right() -> None:
    alike = {"values": [[[0], [1], [2]], [[3], [4]]]}
    hashes = [[n] + [0] * (len(KINDS) - 1) for n in (7, 8, 7, 1, 2)]
    three, two = odd_ranks(hashes, alike)
    assert (three.ranks, three.are_sure) == ((1,), True)
    assert (two.ranks, two.are_sure) == ((3, 4), False)
    assert odd_ranks([[7] * 5] * 5, alike) == []


@pytest.mark.parametrize(
    ("plan", "kind", "groups"),
    [
        ({"dp": 4}, "values", [[0, 1, 2, 3]]),
        ({"dp": 4, "zero": 1}, "values", [[0, 1, 2, 3]]),
        ({"dp": 4, "zero": 1}, "state", []),
        ({"dp": 4, "zero": 2, "zero_ranks": 2}, "values", [[0, 1, 2, 3]]),
        ({"dp": 4, "zero": 2, "zero_ranks": 2}, "state", [[0, 2], [1, 3]]),
        ({"dp": 4, "zero": 3, "zero_ranks": 2}, "values", [[0, 2], [1, 3]]),
        ({"dp": 4, "zero": 3}, "values", []),
        ({"dp": 2, "tp": 2}, "norms", [[0, 1], [2, 3]]),
        ({"pp": 2, "schedule": "dualpipe", "virtual_stages": 1}, "values", [[0, 1]]),
    ],
)
def test_what_is_alike_where(plan: dict[str, Any], kind: str, groups: list[list[int]]) -> None:
    assert groups_alike(PlanSpec(**plan))[kind] == [[[rank] for rank in group] for group in groups]


PLANS: dict[str, dict[str, Any]] = {
    "zero 0": {"dp": 3, "batch": 6},
    "zero 0 of 2": {"dp": 2},
    "zero 1": {"dp": 3, "zero": 1, "batch": 6},
    "zero 2": {"dp": 2, "zero": 2},
    "zero 2 hybrid": {"dp": 4, "zero": 2, "zero_ranks": 2},
    "zero 3 hybrid": {"dp": 4, "zero": 3, "zero_ranks": 2},
    "cp": {"cp": 2, "zero": 1},
    "pp": {"pp": 2, "dp": 2},
    "dualpipe": {"pp": 2, "schedule": "dualpipe", "batch": 8},
    "pipedream": {"pp": 1, "dp": 2},
}


def fault_of(rank: int, flipped_in: int) -> Fault:
    """A bit of one rank's values flips after a step."""

    def fault(mesh: Mesh, replica: Replica, step: int) -> None:
        if mesh.rank == rank and step + 1 == flipped_in:
            units = replica.shards[min(replica.shards)].units
            flip(units[0].value_shard, 3, 12)

    return fault


def compared(mesh: Mesh, job: JobSpec, rank: int) -> tuple[str, str]:
    """The conclusions of a run without a fault, and of one where a bit of a rank flips."""
    good = watched_run(mesh, job, STEPS)
    is_gathered = job.plan.zero in (1, 2)  # anew after each update
    try:
        bad = watched_run(mesh, job, STEPS, after=fault_of(rank, 4 if is_gathered else 3))
    except ReplicasDifferError as error:
        return good.conclusion, str(error)
    return good.conclusion, bad.conclusion


@pytest.mark.sampled(4)
@pytest.mark.processes
@pytest.mark.parametrize("name", PLANS)
def test_a_flipped_bit_is_found(name: str) -> None:
    job = with_health(small_job(**PLANS[name]), compare_replicas_every=EVERY, slow_share=0)
    answer = set(run_on_mesh(job, compared, job, 1))
    ((good, bad),) = answer  # all ranks say the same
    assert good == f"health: replicas compared {STEPS // EVERY} times, all alike"
    assert "ranks that should hold the same do not after step 4" in bad
    assert "rank 1 (" in bad
    assert "first in embedding.weight" in bad or "first in layers." in bad
    if "of 2" in name or PLANS[name].get("dp", 1) != 3:
        assert "no majority says which is right" in bad
    else:
        assert "rank 0 (" not in bad
        assert "holds other values than 2 other ranks" in bad


TP: dict[str, dict[str, Any]] = {
    "tp": {"tp": 4},
    "sequence parallel": {"tp": 2, "dp": 2, "sequence_parallel": True},
    "zero 3": {"tp": 2, "dp": 2, "zero": 3},
    "zero 1 gpt": {"kind": "gpt-tied", "tp": 2, "dp": 2, "zero": 1},
    "experts": {"kind": "deepseek", "tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True, "expert_tp": 1},
    "qk norm": {"kind": "qwen", "tp": 2, "pp": 2},
}


def flip_norm(mesh: Mesh, replica: Replica, step: int) -> None:
    """A bit of a norm flips on every rank of dp, but on one of tp: tp alone can tell."""
    if mesh.tp.index == 1 and step + 1 == FLIPPED_IN:
        for shards in replica.shards.values():
            for unit in shards.units:
                for parameter in unit.parameters:
                    if parameter.place.name.endswith("attention_norm.weight"):
                        _, values = unit.held_values(parameter)
                        if len(values):
                            flip(values, 0, 12)
                            return


def compared_over_tp(mesh: Mesh, job: JobSpec) -> tuple[str, str]:
    good = watched_run(mesh, job, STEPS)
    try:
        return good.conclusion, watched_run(mesh, job, STEPS, after=flip_norm).conclusion
    except ReplicasDifferError as error:
        return good.conclusion, str(error)


@pytest.mark.sampled(5)
@pytest.mark.processes
@pytest.mark.parametrize("name", TP)
def test_a_norm_is_compared_over_tp(name: str) -> None:
    job = with_health(small_job(**TP[name]), compare_replicas_every=EVERY, slow_share=0)
    ((good, bad),) = set(run_on_mesh(job, compared_over_tp, job))
    assert good == f"health: replicas compared {STEPS // EVERY} times, all alike"
    assert "norms" in bad
    if name == "tp":
        assert "rank 1 (pp 0, dp 0, tp 1) holds other norms than 3 other ranks" in bad
        assert "attention_norm.weight" in bad


def flip_moment(mesh: Mesh, replica: Replica, step: int) -> None:
    """A bit of a moment of one rank flips."""
    if mesh.rank == 2 and step + 1 == FLIPPED_IN:
        unit = replica.shards[0].units[0]
        flip(unit.masters.memory(on_host=False)[-1], 0, 12)


def compared_moments(mesh: Mesh, job: JobSpec) -> str:
    try:
        return watched_run(mesh, job, 3, after=flip_moment).conclusion
    except ReplicasDifferError as error:
        return str(error)


@pytest.mark.processes
def test_the_state_of_the_optimizer_is_compared() -> None:
    job = with_health(small_job(dp=3, batch=6), compare_replicas_every=3, slow_share=0)
    (printed,) = set(run_on_mesh(job, compared_moments, job))
    assert "rank 2 (pp 0, dp 2, tp 0) holds other state than 2 other ranks, first in the optimizer's state" in printed
