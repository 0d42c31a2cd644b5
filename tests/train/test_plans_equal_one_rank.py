"""Any plan trains to what one rank trains to: losses, gradient norms and every parameter of every rank."""

import itertools
from typing import Any

import pytest

from support.cases import KINDS, against_one_rank, small_job
from support.rounding import check_rounding

SCHEDULES = ("1f1b", "gpipe", "sequential")


def plans() -> list[tuple[str, dict[str, Any]]]:
    """Every (tp, pp, dp) of 1, 2, 4 up to 8 ranks, with every kind of model and sequence parallel on and off, but for
    two of every five of these.

    Schedule, accumulation and number of layers go round, so that each meets each kind and each degree.
    """
    results = []
    turn = itertools.count()
    for tp, pp, dp in itertools.product((1, 2, 4), repeat=3):
        if not 1 < tp * pp * dp <= 8:
            continue
        for kind in KINDS:
            for sequence_parallel in (False, True) if tp > 1 else (False,):
                n = next(turn)
                if n % 5 in (0, 3):
                    continue
                accumulation = (3, 1, 2, 2)[n % 4]
                fields = {
                    "tp": tp, "pp": pp, "dp": dp, "sequence_parallel": sequence_parallel,
                    "schedule": SCHEDULES[n % 3], "microbatch_size": 1 + n % 2,
                    "batch": accumulation * dp * (1 + n % 2), "layers": max(pp, 2) + n // 2 % 2,
                }  # fmt: skip
                results.append((kind, fields))
    return results


def name(case: tuple[str, dict[str, Any]]) -> str:
    kind, f = case
    sp = "-sp" if f["sequence_parallel"] else ""
    return f"{kind}-tp{f['tp']}{sp}-pp{f['pp']}-dp{f['dp']}-{f['schedule']}-{f['layers']}layers-batch{f['batch']}"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kind", "fields"), plans(), ids=map(name, plans()))
def test_plan_equals_one_rank(kind: str, fields: dict[str, Any]) -> None:
    job = small_job(kind, **fields)
    verdict = against_one_rank(job)
    assert verdict.world == fields["tp"] * fields["pp"] * fields["dp"]
    if fields["tp"] == fields["dp"] == 1:
        assert verdict.bitwise  # only the pipeline splits the work: the same sums in the same order
    check_rounding(verdict, job)


@pytest.mark.parametrize("layout", [[3, 1, 1], [1, 4, 0], [0, 2, 3]])
def test_uneven_layout_is_bitwise(layout: list[int]) -> None:
    job = small_job("gpt-tied", layers=sum(layout), pp=3, layout=layout, batch=5)
    assert against_one_rank(job).bitwise


def test_size_of_buckets_changes_nothing() -> None:
    # Two replicas, since Gloo adds up more of them in an order that depends on the size of the tensor.
    verdicts = [against_one_rank(small_job("llama", dp=2, bucket_mib=mib)) for mib in (0.001, 0.01, 25.0)]
    assert len(set(verdicts)) == 1


def test_there_are_enough_plans() -> None:
    assert len(plans()) >= 60
    assert {f["schedule"] for _, f in plans() if f["pp"] > 1} == set(SCHEDULES)
