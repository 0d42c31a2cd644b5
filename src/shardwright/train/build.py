"""From a plan to what one rank runs: its stages, their gradients, the programs and the optimizer."""

from dataclasses import dataclass

import torch

from shardwright.model.decoder import DecoderStage, stage_span
from shardwright.parallel.data import GradientBuckets
from shardwright.parallel.mesh import Mesh
from shardwright.parallel.parameter import PlacedParameter, placed_parameters
from shardwright.parallel.pipeline import PipelineExecutor
from shardwright.schedule.generate import forward_program, training_program
from shardwright.schedule.schedule import Program
from shardwright.spec.job import JobSpec
from shardwright.train.optimizer import GradientNorm, make_adamw


@dataclass(frozen=True)
class Replica:
    """One rank's part of a job, ready to run."""

    stages: dict[int, DecoderStage]
    buckets: dict[int, GradientBuckets]
    executor: PipelineExecutor
    program: Program
    evaluation: Program
    optimizer: torch.optim.AdamW
    gradient_norm: GradientNorm

    def tied(self) -> tuple[PlacedParameter | None, PlacedParameter | None]:
        """The table and the head of a tied embedding, as far as this rank holds them."""
        table = head = None
        for stage in self.stages.values():
            if stage.spec.tied_embeddings:
                table = stage.embedding.weight if stage.embedding is not None else table
                head = stage.head.weight if stage.head is not None else head
        return table, head


def build(job: JobSpec, mesh: Mesh) -> Replica:
    """Make this rank's part of the job, with its initial weights."""
    plan = job.plan
    program = training_program(plan.schedule, plan.pp, job.num_microbatches)
    stages = {
        stage: DecoderStage(
            job.model, stage_span(plan, job.model.layers, stage), mesh.tp, plan.sequence_parallel
        ).initialise(job.run.seed, mesh.device)
        for stage in program.placement.stages_of(mesh.pp.index)
    }
    parameters = {stage: list(placed_parameters(module).values()) for stage, module in stages.items()}
    buckets = {stage: GradientBuckets(held, mesh, plan.bucket_mib) for stage, held in parameters.items()}
    # The head of a tied embedding is updated where it has memory of its own, and counted nowhere.
    counted, updated = {}, []
    for stage, module in stages.items():
        head = module.head.weight if module.head is not None and job.model.tied_embeddings else None
        counted[stage] = [p for p in parameters[stage] if p is not head]
        updated += counted[stage] if module.tied_here() else parameters[stage]
    return Replica(
        stages=stages,
        buckets=buckets,
        executor=PipelineExecutor(dict(stages), buckets, mesh),
        program=program,
        evaluation=forward_program(plan.pp, job.num_microbatches),
        optimizer=make_adamw(job.optimizer, updated),
        gradient_norm=GradientNorm(counted, program.num_stages, mesh),
    )
