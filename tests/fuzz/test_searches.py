"""A slice of the fuzzer of searches that must agree with each other, and that it sees what it looks for."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from fuzz import searches
from shardwright.config import catalog

pytestmark = pytest.mark.long

SEED = 2026
NUM_DRAWS = 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(NUM_DRAWS))
def test_searches_agree(number: int, tmp_path: Path) -> None:
    _, faults = searches.faults_of(SEED, number, tmp_path)
    assert faults == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", [3, 13, 52])
def test_closed_forms_that_say_too_much_hide_no_plan_beside_the_list(number: int, tmp_path: Path) -> None:
    """Of messages that pass while others compute, and of bubbles: the plans beside were up to 7 % faster."""
    given = searches.drawn(555, number)
    plans = searches.answer(given, tmp_path)
    assert plans and searches.beside_faults(given, plans) == []


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("seed", "number"), [(55001, 1), (55002, 7), (99001, 107), (99002, 59), (99002, 49)])
def test_what_gains_under_uneven_stages_or_with_fewer_of_them_is_in_the_list(
    seed: int, number: int, tmp_path: Path
) -> None:
    """Of the last lines of a list: another ZeRO stage under its layout, two stages a rank and not three, what a pair
    of microbatches hides of the way to experts, and a microbatch twice as large."""
    given = searches.drawn(seed, number)
    plans = searches.answer(given, tmp_path)
    assert plans and searches.beside_faults(given, plans) == []


def test_keeping_a_value_of_the_answer_leaves_the_answer(tmp_path: Path) -> None:
    """Four stages are as long with a smaller microbatch, which alone fits: a plan that was not seen took 6 % less."""
    given = searches.drawn(99601, 32)
    plans = searches.answer(given, tmp_path)
    assert plans and searches.kept_faults(given, plans, tmp_path, "microbatch_size", 1) == []


def test_every_relation_is_drawn() -> None:
    """Over a few hundred draws, with models that have experts and ones that have none, and several softwares."""
    drawn = [searches.drawn(SEED, number) for number in range(200)]
    assert {"moe" in given.fields["model"] for given in drawn} == {False, True}
    assert {given.fields["cluster"]["software"] for given in drawn} == set(searches.SOFTWARE)
    assert len({str(given.keep) for given in drawn}) > 4


def computes_nothing_again(given: searches.Drawn, folder: Path) -> bool:
    """True if the fastest plan of a draw has no recomputation."""
    (best, *_) = searches.answer(given, folder) or [None]
    return best is not None and best.job.plan.recompute == "none"


def test_a_slower_plan_in_the_list_is_found(tmp_path: Path) -> None:
    """A plan that computes all again where nothing has to be is told to lose to its neighbour."""
    given = next(
        given
        for given in (searches.drawn(SEED, number) for number in range(100))
        if not given.keep and given.fields["cluster"]["nodes"] == 1 and computes_nothing_again(given, tmp_path)
    )
    (best, *_) = searches.answer(given, tmp_path) or []
    job = best.job.model_copy(update={"plan": best.job.plan.model_copy(update={"recompute": "full", "layout": []})})
    worse = replace(best, job=job, time=searches.simulated_step(job, searches.shipped()))
    assert searches.beside_faults(given, [worse])


def test_what_the_software_lacks_is_no_part_of_its_space(tmp_path: Path) -> None:
    """Kept, it is searched all the same and may be faster; of what the software has nothing may."""
    model = {"layers": 24, "hidden": 4096, "heads": 32, "kv_heads": 4, "ffn": 16384, "vocab": 32000, "sequence": 8192}
    cluster = {"name": "drawn", "devices_per_node": 4, "nodes": 1, "software": "megatron-deepspeed"}
    cluster["intra_node"] = {"bandwidth_gb_per_s": 150.0}
    fields = {"model": model, "cluster": cluster, "batch": {"global_batch_size": 16}, "precision": {"compute": "bf16"}}
    device = {name: value for name, value in catalog.read("devices", "a100-sxm-80g").items() if name != "aliases"}
    given = searches.Drawn(fields, device, keep={})
    plans = searches.answer(given, tmp_path) or []
    best_s, slowest = searches.step_s(plans), plans[-1:]
    assert best_s < searches.step_s(slowest)
    assert searches.step_s(searches.answer(given, tmp_path, {"recompute": "selective"})) < best_s
    assert searches.kept_faults(given, plans, tmp_path, "recompute", "selective") == []
    answer = searches.kept_faults(given, slowest, tmp_path, "recompute", plans[0].job.plan.recompute)
    assert any("makes it faster" in fault for fault in answer)


def test_software_of_its_own_is_drawn_with_fields_that_few_entries_have(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    drawn = [searches.with_own_software(searches.drawn(SEED, number), rng) for number in range(300)]
    fields = {name for given in drawn for name in given.fields["cluster"]["software"]}
    assert {"queued", "gathers_anew", "waits_at_messages", "vocab_multiple", "repeats_keys", "zero"} <= fields
    assert all(given.job(tmp_path) for given in drawn[:40] if "moe" not in given.fields["model"])
