"""Bytes that a program moves, by arithmetic on the job."""

from shardwright.config.load import make_job
from shardwright.config.model_shape import shape_of
from shardwright.schedule.job_program import job_program
from shardwright.sharding.stage_parameters import num_parameters, num_trained_parameters
from support.cases import small_job

NF4 = {"rank": 4, "base": "nf4"}


def test_one_stage_is_the_matrices_the_table_and_the_norms() -> None:
    model = small_job(layers=4).model
    assert num_parameters(model) == shape_of(model).matrix_parameters + model.vocab * model.hidden + 9 * model.hidden


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


def test_a_message_is_of_the_tokens_that_a_rank_holds() -> None:
    """Of 16 tokens two ranks of cp hold 8 each, and under sequence parallel each of two ranks of tp 4 of those."""
    for fields, tokens in (({"cp": 2}, 8), ({"cp": 2, "tp": 2, "sequence_parallel": True}, 4)):
        program = job_program(small_job(pp=2, **fields))
        assert program.sizes is not None
        assert program.sizes.message == tokens * 32 * 4


def test_what_nobody_sized_has_no_bytes() -> None:
    from support.programs import training_program

    program = training_program("1f1b", 2, 2)
    assert {program.num_bytes(action) for row in program.ranks for action in row} == {None}


def test_frozen_weights_are_gathered_and_not_reduced() -> None:
    """Beside adapters, whose gradients alone travel; matrices in NF4 travel as their words."""
    fields = small_job(pp=2, dp=2, zero=3, layers=2).model_dump()
    fields["model"] |= {"hidden": 64, "ffn": 128, "adapter": {"rank": 4}}
    plain, stored = (make_job(fields | {"model": fields["model"] | {"adapter": a}}) for a in ({"rank": 4}, NF4))
    in_numbers, in_words = (job_program(job).sizes for job in (plain, stored))
    assert in_numbers is not None and in_words is not None
    assert sum(in_numbers.reduce) == sum(in_words.reduce) == 4 * num_trained_parameters(plain.model)
    assert sum(in_numbers.gather) == 4 * num_parameters(plain.model)
    matrices = sum(m.num_elements for m in shape_of(plain.model).matrices("dense")) * 2
    assert sum(in_numbers.gather) - sum(in_words.gather) == 4 * matrices - matrices * 9 // 16  # 4.5 bits an element
