"""Stages that are alike: what is counted of one of them holds for all."""

import pytest

from shardwright.config.load import load_job
from shardwright.memory.rank_state import StageState, rank_state, sized_state
from shardwright.schedule.job_program import job_order, job_program
from shardwright.sharding.stage_parameters import alike_stages, stage_parameters

JOBS = (
    ("gpt3-175b-1024", ()),
    ("gpt3-175b-1024", ("plan.schedule=interleaved-1f1b", "plan.virtual_stages=2", "plan.zero=1")),
    ("gpt3-175b-1024", ("model.tied_embeddings=true", "plan.schedule=dualpipev", "plan.zero=2")),
    ("deepseek-v3", ("plan.zero=1",)),
    ("gpt3-175b-1024", ("optimizer.name=muon", "plan.zero=1")),
)


def sizes_of(state: StageState) -> object:
    """All of a stage's state but the names of parameters and regions."""
    units = [
        (
            [(place.box, place.is_expert) for place in unit.places],
            unit.layout.size,
            unit.layout.shard_size,
            unit.replicas,
        )
        for unit in state.units
    ]
    return state.stage, units, list(state.units_in.values()), state.own_gradient, state.updates, len(state.further)


@pytest.mark.parametrize(("name", "overrides"), JOBS)
def test_a_sized_state_has_the_sizes_of_each_rank(name: str, overrides: tuple[str, ...]) -> None:
    job = load_job(name, overrides)
    program = job_order(job).program()
    for rank in range(job.plan.pp):
        expected, sized = rank_state(job, program, rank), sized_state(job, program, rank)
        assert {stage: sizes_of(state) for stage, state in sized.items()} == {
            stage: sizes_of(state) for stage, state in expected.items()
        }


def test_stages_that_are_alike_share_their_units() -> None:
    job = load_job("gpt3-175b-1024")
    program = job_order(job).program()
    first, second = (sized_state(job, program, rank)[rank] for rank in (1, 2))
    assert first.units is second.units
    assert sized_state(job, program, 15)[15].units[0].places != first.units[0].places  # it has the head, too


def test_alike_stages_have_the_same_parameters() -> None:
    """DeepSeek-V3 begins with three dense layers, and its layers don't divide evenly."""
    job = load_job("deepseek-v3")
    alike = alike_stages(job.model, job.plan)
    shapes = [
        [place.box for places in stage_parameters(job.model, job.plan, stage).values() for place in places]
        for stage in range(job.plan.num_stages)
    ]
    assert shapes == [shapes[stage] for stage in alike]
    assert len(set(alike)) < len(alike) and alike[0] == 0 and alike[-1] == len(alike) - 1


@pytest.mark.parametrize(("name", "overrides"), JOBS)
def test_sizes_of_a_program_are_those_of_each_stage(name: str, overrides: tuple[str, ...]) -> None:
    job = load_job(name, overrides)
    sizes = job_program(job).sizes
    assert sizes is not None
    for stage in range(1, job.plan.num_stages - 1):
        places = [place for of_region in stage_parameters(job.model, job.plan, stage).values() for place in of_region]
        assert sizes.gather[stage] == job.precision.compute_bytes * sum(place.num_elements for place in places)
