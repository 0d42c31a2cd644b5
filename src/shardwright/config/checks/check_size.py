"""Check sizes that follow from several fields against the limits in config/largest.py.

The number of actions of a pipeline is checked with its schedule (schedule/shape_program.py), because a search also
takes plans that it does not simulate.
"""

from shardwright.config import largest
from shardwright.config.job import JobSpec
from shardwright.config.model import ModelSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.phrase import say, summed


def size_faults(job: JobSpec) -> list[str]:
    """Sizes above the limits, each with its arithmetic and a way out."""
    return [*_device_faults(job), *_parameter_faults(job.model), *_token_faults(job)]


def rank_faults(job: JobSpec) -> list[str]:
    """Faults of a plan with too many ranks to compute with."""
    plan = job.plan
    if plan.world <= largest.RANKS:
        return []
    return [
        say(
            "{degrees} = {world:,} ranks, and a job may have at most {most:,}; use smaller degrees, such as plan.dp "
            "= {dp}",
            degrees=plan.degrees,
            world=plan.world,
            most=largest.RANKS,
            dp=max(1, largest.RANKS * plan.dp // plan.world),
        )
    ]


def _device_faults(job: JobSpec) -> list[str]:
    cluster = job.cluster
    if cluster.num_devices <= largest.RANKS:
        return []
    return [
        say(
            "cluster {name} has {num_devices:,} devices in its nodes, and a cluster may have at most {most:,}; use "
            "fewer nodes, or fewer devices in each",
            name=repr(cluster.name),
            num_devices=cluster.num_devices,
            most=largest.RANKS,
        )
    ]


def _parameter_faults(model: ModelSpec) -> list[str]:
    shape = shape_of(model)
    dense, sparse = (sum(m.num_elements for m in shape.matrices(kind)) for kind in ("dense", "experts"))
    num_sparse, table = shape.layers - shape.num_dense, shape.table_elements
    further = (dense if shape.is_dense(shape.layers) else sparse) + shape.further_matrix.num_elements
    total = num_sparse * sparse + shape.num_dense * dense + shape.mtp * further + 2 * table
    if total <= largest.PARAMETERS:
        return []
    terms: list[str] = (
        [say("{num_dense:,} layers x {dense:,}", num_dense=shape.num_dense, dense=dense)] if shape.num_dense else []
    )
    terms += (
        [say("{num_sparse:,} layers with experts x {sparse:,}", num_sparse=num_sparse, sparse=sparse)]
        if num_sparse
        else []
    )
    terms += [say("{mtp} further tokens x {further:,}", mtp=shape.mtp, further=further)] if shape.mtp else []
    return [
        say(
            "{terms} + 2 tables x {table:,} = {total:.3g} parameters, and a model may have at most {most:.3g}; use "
            "fewer layers or experts, or a smaller model.hidden, heads, ffn or vocab",
            terms=summed(terms),
            table=table,
            total=total,
            most=largest.PARAMETERS,
        )
    ]


def _token_faults(job: JobSpec) -> list[str]:
    model, batch, microbatch = job.model, job.batch.global_batch_size, job.plan.microbatch_size
    faults: list[str] = []
    if job.tokens_per_step > largest.TOKENS:
        faults.append(
            say(
                "batch.global_batch_size {batch:,} x model.sequence {sequence:,} = {tokens_per_step:.3g} tokens, and "
                "a step may have at most {most:.3g}; use at most {sequences:,} such sequences, or shorter ones",
                batch=batch,
                sequence=model.sequence,
                tokens_per_step=job.tokens_per_step,
                most=largest.TOKENS,
                sequences=largest.TOKENS // model.sequence,
            )
        )
    widest = max(model.hidden, model.ffn_size, model.heads * model.query_width, model.vocab)
    count = microbatch * model.sequence * widest * model.num_blocks
    if count > largest.ACTIVATIONS:
        faults.append(
            say(
                "plan.microbatch_size {microbatch:,} x model.sequence {sequence:,} x {widest:,} (the widest of "
                "hidden, ffn, all heads and vocab) x {num_blocks:,} layers = {count:.3g} elements of a microbatch, "
                "and it may have at most {most:.3g}; use smaller microbatches or shorter sequences",
                microbatch=microbatch,
                sequence=model.sequence,
                widest=widest,
                num_blocks=model.num_blocks,
                count=count,
                most=largest.ACTIVATIONS,
            )
        )
    return faults
