"""plan.recompute = "budget": what is chosen fits its limit, on paper and as measured, and costs the least."""

import itertools
from pathlib import Path
from typing import Any

import pytest

import shardwright
from shardwright.config.base import PlanError
from shardwright.config.checks.check import job_faults
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.plan import layer_policies
from shardwright.config.recompute_policy import KEEP_ALL, WHOLE_LAYER, Policy
from shardwright.config.units import GIB
from shardwright.layers.layer_tensors import BLOCK
from shardwright.layers.recompute_cost import Again
from shardwright.measure.saved_tensors import LiveBytes
from shardwright.measure.verdict import compare
from shardwright.memory.activation_peak import activation_bytes, bytes_at, job_stages, moments, peak
from shardwright.memory.activations import layer_of
from shardwright.memory.budget import meet_budget
from shardwright.memory.recompute_budget import choices, choose, ladder, layer_choices, options
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.tensor.parameter import placed_parameters
from shardwright.schedule.job_program import job_program
from shardwright.train.build import build
from shardwright.train.train_step import train_step
from support.cases import by_one_rank, made_up_tokens, record, small_job
from support.ranks import leaves_nothing, run_on_mesh

pytestmark = pytest.mark.long


def budget_job(limit_bytes: float = GIB, **fields: Any) -> JobSpec:
    fields = {"pp": 4, "layers": 12, "batch": 8, **fields}
    job = small_job(recompute="budget", memory_limit_gib=limit_bytes / GIB, **fields)
    return job.model_copy(update={"model": job.model.model_copy(update={"sequence": 64})})


def peaks_with(job: JobSpec, policy: Policy) -> list[int]:
    """Predicted peak of each pipeline rank, all layers with one policy."""
    program = job_program(job)
    policies = [policy] * job.model.layers
    return [peak(moments(program, rank), job_stages(job, program, rank, policies))[0] for rank in range(job.plan.pp)]


def between(job: JobSpec, share: float) -> float:
    """A limit so far between what the first rank needs with all layers recomputed (0) and with none (1)."""
    least, most = max(peaks_with(job, WHOLE_LAYER)), max(peaks_with(job, KEEP_ALL))
    return least + share * (most - least)


@leaves_nothing
def live_peak(mesh: Mesh, job: JobSpec) -> int:
    """The most bytes that saved tensors of this rank held in a training step."""
    replica = build(job, mesh)
    tokens = made_up_tokens(job, 0)
    constants = [p.detach() for stage in replica.stages.values() for p in placed_parameters(stage).values()]
    constants += [angle for stage in replica.stages.values() for angle in stage.tables.tensors]
    with LiveBytes([*constants, tokens]) as live:
        train_step(replica, 0, tokens)
    assert live.current_bytes == 0
    return live.peak_bytes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9])
def test_limit_holds_as_measured_and_costs_less_than_full(share: float) -> None:
    limit = between(budget_job(), share)
    job = budget_job(limit)
    results = choices(job)
    full = Again.of(job).flops(WHOLE_LAYER)
    for rank, (choice, measured) in enumerate(zip(results, run_on_mesh(job, live_peak, meet_budget(job)), strict=True)):
        assert choice.peak_bytes <= int(limit)
        assert measured <= choice.peak_bytes
        assert measured >= 0.9 * choice.peak_bytes
        if share > 0:
            assert choice.flops < len(choice.policies) * full
        assert rank == 0 or choice.flops <= results[rank - 1].flops  # early stages hold more microbatches
    if share < 0.9:
        assert results[0].flops > results[-1].flops
    assert max(peaks_with(job, KEEP_ALL)) > limit


@pytest.mark.parametrize("policy", [KEEP_ALL, WHOLE_LAYER, frozenset({"norm", "attention", "activation"})])
def test_predicted_peak_is_the_measured_one(policy: Policy) -> None:
    fields: dict[str, Any] = {"recompute": "none"}
    if policy == WHOLE_LAYER:
        fields = {"recompute": "full"}
    elif policy:
        fields = {"recompute": "selective", "recompute_operators": sorted(policy)}
    job = small_job(pp=4, layers=12, batch=8, **fields)
    for predicted, measured in zip(peaks_with(job, policy), run_on_mesh(job, live_peak, job), strict=True):
        # Where something is computed again, its last result is held too, but not by autograd.
        assert 0.85 * predicted <= measured <= predicted
        if policy == KEEP_ALL:
            assert measured == predicted


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-h1", "zb-v", "dualpipev", "gpipe"])
def test_any_schedule(schedule: str) -> None:
    fields: dict[str, Any] = {"schedule": schedule, "pp": 2, "layers": 8}
    if schedule == "interleaved-1f1b":
        fields["virtual_stages"] = 2
    limit = between(budget_job(**fields), 0.4)
    job = budget_job(limit, **fields)
    results = choices(job)
    assert all(choice.peak_bytes <= int(limit) for choice in results)
    assert len({policy for choice in results for policy in choice.policies.values()}) > 1
    one = by_one_rank(job, record, 2)
    assert compare(run_on_mesh(job, record, meet_budget(job), 2), one).bitwise


@pytest.mark.sampled(3)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_layers_with_experts_and_without_climb_ladders_of_their_own(share: float) -> None:
    def with_experts(limit: float) -> JobSpec:
        return small_job("deepseek", pp=2, layers=6, batch=8, recompute="budget", memory_limit_gib=limit / GIB)

    job = with_experts(limit := between(with_experts(GIB), share))
    assert job_faults(job) == []
    results = choices(job)
    assert all(choice.peak_bytes <= int(limit) for choice in results)
    policies = layer_policies(meet_budget(job).plan, 6)
    for rank, choice in enumerate(results):
        assert (
            choice.peak_bytes
            == peak(moments(job_program(job), rank), job_stages(job, job_program(job), rank, policies))[0]
        )
    assert len(set(policies)) > 1
    one = by_one_rank(job, record, 2)
    assert compare(run_on_mesh(job, record, meet_budget(job), 2), one).bitwise


def cost_of(job: JobSpec, policies: tuple[Policy, ...]) -> float:
    by_policy = {option.policy: option.cost for option in options(layer_of(job), Again.of(job))}
    return sum(by_policy[policy] for policy in policies)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("share", [0.05, 0.2, 0.4, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("pp", [1, 2])
def test_no_choice_is_cheaper_by_more_than_a_step(pp: int, share: float) -> None:
    """Against all combinations of policies: at most the dearest step of one layer above the best of them."""
    job = budget_job(pp=pp, layers=4 * pp)
    program = job_program(job)
    every = options(layer_of(job), Again.of(job))
    dearest_step = max(b.cost - a.cost for a, b in itertools.pairwise(ladder(every)))
    limit = int(between(job, share))
    stages = job_stages(job, program, 0, [KEEP_ALL] * 4 * pp)
    when = moments(program, 0)
    chosen = choose({0: layer_choices(job)[: len(stages[0].layers)]}, stages, when, limit)
    assert chosen is not None
    own = cost_of(job, tuple(held.policy for held in chosen[0].layers))
    best = float("inf")
    # Only how many layers have which policy matters, if those that keep less come first.
    for combination in itertools.combinations_with_replacement(sorted(every, key=lambda o: o.kept_bytes), 4):
        policies = [option.policy for option in combination] + [KEEP_ALL] * 4 * (pp - 1)
        tried = job_stages(job, program, 0, policies)
        if peak(when, tried)[0] <= limit:
            best = min(best, sum(option.cost for option in combination))
    assert best <= own <= best + dearest_step


def test_ladder_gets_steeper() -> None:
    job = budget_job()
    steps = ladder(options(layer_of(job), Again.of(job)))
    assert steps[0].policy == KEEP_ALL and steps[-1].policy == WHOLE_LAYER
    assert len(steps) >= 4
    rates = [(b.cost - a.cost) / (a.kept_bytes - b.kept_bytes) for a, b in itertools.pairwise(steps)]
    assert rates == sorted(rates)


def test_limit_that_nothing_meets_says_by_how_much() -> None:
    least = max(peaks_with(budget_job(), WHOLE_LAYER))
    with pytest.raises(PlanError) as caught:
        choices(budget_job(0.5 * least))
    text = str(caught.value)
    assert "pipeline rank 0 holds" in text and f"{least:,}" in text and "stage 0" in text and "set it to" in text
    assert choices(budget_job(least))[0].peak_bytes <= least


def test_moments_hold_what_the_schedule_says() -> None:
    """1F1B: rank r holds p - r microbatches at most; its backward begins with all of them there."""
    job = budget_job()
    program = job_program(job)
    for rank in range(4):
        alive = {sum(moment.microbatches.values()) for moment in moments(program, rank)}
        assert max(alive) == 4 - rank
    stages = job_stages(job, program, 3, [KEEP_ALL] * 12)
    most, moment = peak(moments(program, 3), stages)
    assert most == bytes_at(moment, stages) == stages[3].kept_bytes


def test_stage_recomputation_holds_inputs() -> None:
    """One microbatch is made again at a time; of the others there is the stage's input. Token ids are there anyway."""
    job = small_job(pp=4, layers=12, batch=8, recompute="stage")
    program, layer = job_program(job), layer_of(job)
    for rank in range(4):
        stages = job_stages(job, program, rank, [KEEP_ALL] * 12)
        inputs = 0 if rank == 0 else (3 - rank) * layer.sizes[BLOCK.input]
        assert peak(moments(program, rank), stages)[0] == stages[rank].kept_bytes + inputs


def test_a_met_budget_is_a_plan() -> None:
    job = budget_job(between(budget_job(), 0.4))
    met = meet_budget(job)
    assert met.plan.recompute == "layers" and met.plan.memory_limit_gib == 0
    assert make_job(met.model_dump()) == met  # it can be written down and read
    chosen = {i: policy for choice in choices(job) for i, policy in choice.policies.items()}
    assert layer_policies(met.plan, 12) == [chosen[i] for i in range(12)]
    assert meet_budget(met) is met
    program = job_program(met)
    assert [activation_bytes(met, program, rank)[0] for rank in range(4)] == [c.peak_bytes for c in choices(job)]


def test_many_layers_and_ranks() -> None:
    """Choosing is arithmetic: 126 layers over 16 ranks and 64 microbatches."""
    fields: dict[str, Any] = {"pp": 16, "layers": 126, "batch": 64}
    job = budget_job(between(budget_job(**fields), 0.3), **fields)
    assert len(choices(job)) == 16


def test_a_budget_is_met_in_one_place() -> None:
    """Where a job is read: what comes behind sees the choice, never the wish."""
    source = Path(shardwright.__file__).parent
    calls = [path.relative_to(source) for path in source.rglob("*.py") if "meet_budget(" in path.read_text()]
    assert sorted(map(str, calls)) == ["api/asked_job.py", "memory/budget.py"]
