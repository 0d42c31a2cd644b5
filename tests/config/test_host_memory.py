"""Offloaded state has to fit in the host's memory: in an estimate, in a search, and in the message of a misfit."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.config.cluster_facts import host_memory_bytes
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.cost.calibration import shipped
from shardwright.cost.from_job import run_of
from shardwright.memory.job_memories import fullest, job_memories
from shardwright.memory.job_memory import job_memory
from shardwright.memory.rank_estimate import peak_memory
from shardwright.planner.advice.priced_plan import priced
from shardwright.planner.advice.reasons import reasons
from shardwright.planner.advice.repair import misfit
from shardwright.planner.search.constraints import constraints_of
from shardwright.planner.search.plan_price import fits, room_bytes
from shardwright.planner.search.search import search
from shardwright.report.estimate_text import estimate_dict
from shardwright.report.fit_verdict import fit_of, verdict_text

OFFLOADING = constraints_of(
    ["plan.offload_optimizer=1.0", "plan.recompute=none", "plan.schedule=1f1b", "plan.cp=1", "plan.microbatch_size=1"],
    [],
)


def job(host_memory_gib: float, **plan: object) -> JobSpec:
    model = {"layers": 6, "hidden": 4096, "heads": 32, "kv_heads": 4, "ffn": 11008, "vocab": 32000, "sequence": 2048}
    links = {"intra_node": {"bandwidth_gb_per_s": 300.0}, "inter_node": {"bandwidth_gb_per_s": 25.0}}
    cluster = {"device": "a100-sxm-40g", "devices_per_node": 4, "nodes": 2, "host_memory_gib": host_memory_gib} | links
    return make_job(
        {
            "model": model, "cluster": cluster, "plan": {"dp": 8} | plan, "batch": {"global_batch_size": 8},
            "precision": {"compute": "bf16"},
        }
    )  # fmt: skip


def test_a_share_of_the_node_or_what_the_catalog_says() -> None:
    assert host_memory_bytes(job(400.0).cluster) == 100 * 2**30
    assert host_memory_bytes(job(0.0).cluster) == 128 * 2**30  # DGX A100 of 40 GB: 1 TiB for 8
    unknown = job(0.0).cluster.model_copy(update={"device": "a100-pcie-40g"})
    assert host_memory_bytes(unknown) is None


@pytest.mark.long
@settings(max_examples=6, deadline=None)
@given(st.floats(1.0, 200.0), st.floats(1.0, 4.0))
def test_more_host_memory_never_makes_it_slower_or_a_fitting_plan_unfit(gib: float, times: float) -> None:
    less, more = job(gib), job(gib * times)
    few, many = (search(of, OFFLOADING, shipped(), num_shown=4).candidates for of in (less, more))
    for candidate in few:
        (result,) = priced([candidate.job], shipped())
        assert float(result.memory.host) <= gib / 4 * 2**30
        assert result.fits and fits(more, result.memory, room_bytes(more))
    if few:
        assert many and many[0].token_s <= few[0].token_s


@pytest.mark.long
def test_what_does_not_fit_says_so_with_a_way_out() -> None:
    small, large = (job(gib, zero=1, offload_optimizer=1.0) for gib in (4.0, 400.0))
    needed = max(rank.host_bytes for rank in job_memory(small))
    assert needed > 2**30
    too_little, enough = (verdict_text(of, fit_of(of, job_memory(of), "not priced")) for of in (small, large))
    assert "does not fit its host: pp rank 0 offloads" in " ".join(too_little.split())
    assert "4.0 GiB for 4 devices are 1.0 GiB each" in " ".join(too_little.split())
    assert "It fits one a100-sxm-40g, which shows 39.4 GiB of its 40.0 GiB" in " ".join(enough.split())
    assert "which leaves" in enough
    assert [estimate_dict(of)["fits"] for of in (small, large)] == [False, True]
    result = misfit(small, ("1f1b",), shipped())
    assert result is not None and misfit(large, ("1f1b",), shipped()) is None
    (own,) = priced([small], shipped())
    assert not own.fits
    assert result.host_excess_bytes == pytest.approx(float(own.memory.host) - 2**30)
    assert result.excess_bytes < 0
    assert result.nearest and all(float(near.price.memory.host) <= 2**30 for near in result.nearest)


def test_a_neighbour_that_offloads_too_much_is_told_as_not_fitting() -> None:
    small = job(4.0, zero=1)
    beside = [reason for reason in reasons(small, ("1f1b",), shipped()) if reason.field == "offload_optimizer"]
    assert beside and all(reason.is_host and reason.excess_bytes > 0 for reason in beside)
    assert all("more than a device's share of its host" in reason.text for reason in beside)
    roomy = job(400.0, zero=1)
    assert not any(reason.is_host for reason in reasons(roomy, ("1f1b",), shipped()))


@pytest.mark.parametrize("software", ["shardwright", "nemo"])
def test_the_rank_that_offloads_most_need_not_be_the_fullest(software: str) -> None:
    """Of 7 and 9 layers the first rank is fuller, since it keeps more microbatches, and the second offloads more."""
    fields = job(1.0).model_dump(mode="json")
    fields["cluster"] |= {"software": software}
    fields["plan"] |= {"dp": 4, "pp": 2, "layout": [7, 9], "offload_optimizer": 1.0}
    fields["model"] = {"layers": 16}
    fields["batch"] |= {"global_batch_size": 16}
    uneven = make_job(fields)
    first, second = job_memories(uneven, shipped())
    assert first.process > second.process and first.host < second.host
    result, in_arrays = fullest(uneven, shipped()), peak_memory(run_of(uneven), shipped())
    assert (result.process, result.host) == (first.process, second.host)
    assert float(in_arrays.host) == pytest.approx(float(second.host), rel=1e-3)
