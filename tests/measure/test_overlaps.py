"""The entry of this runtime says which messages it hides, and they are launched so: work between their begin and
their wait, by the order of launches in a step on CUDA, without values. The entry names these tests.
"""

import re
from pathlib import Path

import shardwright
from shardwright.config.software import SoftwareSpec, software_of
from support.cases import small_job
from support.launch_log import PRODUCT, UPDATE, launched, work_under

ENTRY = Path(shardwright.__file__).parent / "config/catalog/software/shardwright.toml"
TESTS = Path(__file__).parent.parent


def test_reduce_overlap() -> None:
    """All buckets but that of the last gradients have products of the backward beside them."""
    under = work_under(launched(small_job(dp=2, layers=4, bucket_mib=0.004), 0), "all_reduce dp", PRODUCT)
    buckets = under[: next((at for at, num in enumerate(under) if not num), len(under))]
    assert len(buckets) > 4 and all(buckets)


def test_reduce_overlap_of_shards() -> None:
    under = work_under(launched(small_job(dp=2, layers=4, zero=2), 0), "reduce_scatter dp", PRODUCT)
    assert len(under) >= 4 and all(under[:-1])


def test_update_overlap() -> None:
    """While a unit is updated the values of the one before it are gathered."""
    under = work_under(launched(small_job(dp=2, layers=4, zero=1, bucket_mib=0.004), 0), "all_gather dp", UPDATE)
    assert len(under) > 4 and all(under[:-1])


def test_shard_overlap() -> None:
    """Values of a layer come while the one before computes, forward and backward."""
    job = small_job(dp=2, layers=4, zero=3)
    gathers = work_under(launched(job, 0), "all_gather dp", PRODUCT)
    assert len(gathers) >= 2 * job.num_microbatches * 4
    # But the first of each pass, and the last, whose values nothing waits for.
    assert sum(num == 0 for num in gathers) <= 3 * job.num_microbatches


def test_message_overlap() -> None:
    """No send is waited for before the end: what a rank computes next goes on beside each, forward and backward."""
    job = small_job(pp=2, batch=8)
    for rank in (0, 1):
        under = work_under(launched(job, rank), "send pp", PRODUCT)
        assert len(under) == job.num_microbatches
        assert all(under[:-1]), f"rank {rank} waits for a message that it sends"


def test_sum_overlap() -> None:
    """The sum of an input gradient over ranks of tp travels beside the product for the weight gradient."""
    for plan in ({"tp": 2}, {"tp": 2, "sequence_parallel": True}):
        kind = "reduce_scatter" if "sequence_parallel" in plan else "all_reduce"
        job = small_job(layers=3, **plan)
        under = work_under(launched(job, 0), f"{kind} tp", PRODUCT)
        # Two column-parallel products a layer, and the head's chunk.
        assert under.count(1) >= (2 * 3) * job.num_microbatches


def test_the_entry_names_a_test_of_each_overlap() -> None:
    entry, text = software_of("shardwright"), ENTRY.read_text()
    credited = [name for name in SoftwareSpec.model_fields if name.endswith("_overlap") and getattr(entry, name)]
    assert {"reduce_overlap", "shard_overlap", "message_overlap", "sum_overlap", "pair_overlap"} <= set(credited)
    for name in credited:
        comment = re.search(rf"((?:^#.*\n)+){name} = true$", text, re.MULTILINE)
        assert comment is not None, f"{name} has no comment of its own"
        named = re.findall(r"(tests/[\w/]+\.py)::(test_\w+)", comment[1].replace("\n# ", ""))
        assert named, f"the comment of {name} names no test"
        for file, test in named:
            assert f"def {test}(" in (TESTS.parent / file).read_text(), f"there is no {test} in {file}"
