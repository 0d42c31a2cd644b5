"""From a plan to what one rank runs: its stages, their gradients, the programs and the optimizer."""

from dataclasses import dataclass

import torch

from shardwright.model.decoder import DecoderStage, stage_span
from shardwright.parallel.data import GradientBuckets
from shardwright.parallel.mesh import Mesh, make_mesh
from shardwright.parallel.parameter import PlacedParameter, placed_parameters
from shardwright.parallel.pipeline import PipelineExecutor
from shardwright.parallel.stash import StashedWeights
from shardwright.parallel.tensor import Cut
from shardwright.parallel.tied import TiedEmbedding
from shardwright.parallel.watch import Watch
from shardwright.schedule.action import Kind
from shardwright.schedule.generate import forward_of
from shardwright.schedule.job import job_program
from shardwright.schedule.schedule import Program
from shardwright.spec.job import JobSpec
from shardwright.spec.mesh import MeshShape
from shardwright.train.optimizer import GradientNorm, make_adamw


@dataclass(frozen=True)
class Replica:
    """One rank's part of a job, ready to run.

    `optimizers` has one for each stage: schedules that update without draining the pipeline step each stage on its
    own. `stashes` is empty unless the program needs several versions of the weights.
    """

    stages: dict[int, DecoderStage]
    buckets: dict[int, GradientBuckets]
    executor: PipelineExecutor
    program: Program
    evaluation: Program
    optimizers: dict[int, torch.optim.AdamW]
    stashes: dict[int, StashedWeights]
    gradient_norm: GradientNorm
    tied: TiedEmbedding


def job_mesh(job: JobSpec, rank: int, device: torch.device, watch: Watch | None = None) -> Mesh:
    """The process groups that the job's plan needs. Every rank of the job calls this."""
    program = job_program(job)
    pairs = any(action.kind is Kind.OVERLAP for row in program.ranks for action in row)
    return make_mesh(
        MeshShape.of(job.plan), rank, device, job.run.timeout_s, watch,
        job.model.tied_embeddings, program.placement, side_by_side=pairs,
    )  # fmt: skip


def build(job: JobSpec, mesh: Mesh) -> Replica:
    """Make this rank's part of the job, with its initial weights."""
    plan, program = job.plan, job_program(job)
    placement, here = program.placement, mesh.pp.index
    stages = {
        stage: DecoderStage(
            job.model, stage_span(plan, job.model.layers, stage), Cut(mesh.tp, plan.sequence_parallel)
        ).initialise(job.run.seed, mesh.device)
        for stage in placement.stages_of(here)
    }
    tied = _tied(job, stages, mesh)
    tied.share_memory()
    parameters = {stage: list(placed_parameters(module).values()) for stage, module in stages.items()}
    buckets = {
        stage: GradientBuckets(held, mesh, mesh.replicas(stage, program.num_stages), plan.bucket_mib)
        for stage, held in parameters.items()
    }
    # Each tensor is counted once in the norm: in the first copy of its stage, and a tied one as the table.
    counted = {
        stage: [p for p in held if p is not tied.head] if placement.holders[0][stage] == here else []
        for stage, held in parameters.items()
    }
    stashes = {}
    if program.weights != "current":
        stashes = {stage: StashedWeights(held) for stage, held in parameters.items()}
    optimizers = {
        stage: make_adamw(
            job.optimizer,
            [p for p in held if not tied.is_second_use(p)],
            stashes[stage].masters if stashes else None,
        )
        for stage, held in parameters.items()
    }
    return Replica(
        stages=stages,
        buckets=buckets,
        executor=PipelineExecutor(dict(stages), buckets, mesh, stashes),
        program=program,
        evaluation=forward_of(program),
        optimizers=optimizers,
        stashes=stashes,
        gradient_norm=GradientNorm(counted, program.num_stages, mesh),
        tied=tied,
    )


def _tied(job: JobSpec, stages: dict[int, DecoderStage], mesh: Mesh) -> TiedEmbedding:
    table: PlacedParameter | None = None
    head: PlacedParameter | None = None
    for module in stages.values() if job.model.tied_embeddings else ():
        table = module.embedding.weight if module.embedding is not None else table
        head = module.head.weight if module.head is not None else head
    return TiedEmbedding(table, head, mesh.ends)
