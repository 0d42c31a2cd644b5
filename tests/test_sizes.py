"""Sizes by arithmetic are the sizes of the tensors that a stage really has."""

import pytest
import torch

from cases import KINDS, small_job
from shardwright.model.decoder import DecoderStage, stage_span
from shardwright.parallel.collectives import Axis
from shardwright.parallel.ledger import Ledger
from shardwright.parallel.parameter import placed_parameters
from shardwright.parallel.tensor import Cut
from shardwright.schedule.job import job_program
from shardwright.spec.flops import matrix_parameters
from shardwright.spec.parameters import stage_elements


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_parameters_of_a_stage(kind: str, tp: int) -> None:
    job = small_job(kind, pp=3, tp=tp, layers=5, sequence_parallel=tp > 1)
    layers = job.plan.stage_layers(job.model.layers)
    for index in range(tp):
        axis = Axis("tp", tuple(range(tp)), index, None, Ledger(torch.device("cpu")), None)
        held = []
        for stage in range(3):
            module = DecoderStage(job.model, stage_span(job.plan, 5, stage), Cut(axis, job.plan.sequence_parallel))
            held.append(sum(p.numel() for p in placed_parameters(module).values()))
        assert list(stage_elements(job.model, layers, tp, index)) == held


def test_one_stage_is_the_matrices_the_table_and_the_norms() -> None:
    model = small_job().model
    (elements,) = stage_elements(model, [4])
    assert elements == matrix_parameters(model) + model.vocab * model.hidden + 9 * model.hidden


def test_a_message_is_a_hidden_state() -> None:
    """Sequence 16, hidden 32, float32; under sequence parallel each of two ranks sends its half."""
    whole, half = (
        small_job(pp=2, tp=2, microbatch_size=4),
        small_job(pp=2, tp=2, microbatch_size=4, sequence_parallel=True),
    )
    for job, tokens in ((whole, 16), (half, 8)):
        program = job_program(job)
        sends = [action for action in program.ranks[0] if str(action).startswith("0SF")]
        assert {program.num_bytes(action) for action in sends} == {tokens * 4 * 32 * 4}
        assert program.sizes is not None
        assert program.sizes.transfer(1024.0) == (tokens * 4 * 32 * 4 / 1024,)
        assert program.sizes.stage_input(0) == 0
        assert program.sizes.reduce == program.sizes.gather == (0, 0)  # nobody shares the stages


def test_what_nobody_sized_has_no_bytes() -> None:
    from shardwright.schedule.generate import training_program

    program = training_program("1f1b", 2, 2)
    assert {program.num_bytes(action) for row in program.ranks for action in row} == {None}
