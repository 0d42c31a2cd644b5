"""Our pipeline executor against the schedules of torch.distributed.pipelining, on the same stages.

    .venv/bin/python benchmarks/pipeline.py

One step (forward and backward of 8 microbatches) on pp 2, 1F1B against Schedule1F1B and GPipe against ScheduleGPipe.
Both run the same DecoderStage code with the same weights; a thin wrapper fits a stage to torch's interface. Gradients
and losses are checked equal before anything is timed.
"""

import torch
from alternate import RATIO_HEADER, alternate, check_close, plain_stage, print_row, resized, run_two_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from shardwright.config.job import JobSpec
from shardwright.model.decoder import DecoderStage
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.tensor.parameter import placed_parameters
from shardwright.train.build import build
from shardwright.train.train_step import microbatches

MODELS = {
    "small": {"layers": 2, "hidden": 128, "heads": 4, "ffn": 352, "vocab": 512, "sequence": 64},
    "larger": {"layers": 4, "hidden": 256, "heads": 8, "ffn": 704, "vocab": 1024, "sequence": 64},
}
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
MICROBATCHES = 8
MICROBATCH_SIZE = 2
MOST_ROUNDS, MOST_S = 60, 16.0


class ForTorch(nn.Module):
    """A stage behind the interface of torch.distributed.pipelining: one tensor in, one out, the loss elsewhere."""

    def __init__(self, stage: DecoderStage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        """Token ids or hidden states to hidden states; the last stage's are those before the head."""
        return self.stage(x)

    def loss(self, x_SBH: Tensor, targets_BS: Tensor) -> Tensor:
        """The head, and the mean loss of a microbatch."""
        return self.stage.microbatch_loss(x_SBH, targets_BS)


def compare(mesh: Mesh, job: JobSpec) -> list[str]:
    """Check and time one schedule; the row of the table after its name."""
    index = mesh.pp.index
    is_last = index == mesh.pp.size - 1
    replica = build(job, mesh)
    module = ForTorch(plain_stage(job, index))
    schedule = SCHEDULES[job.plan.schedule](
        PipelineStage(module, index, mesh.pp.size, mesh.device, group=mesh.pp.transport.group),
        n_microbatches=MICROBATCHES,
        loss_fn=module.loss,  # called by the last stage; elsewhere it says that there will be a backward
        scale_grads=False,
    )
    generator = torch.Generator().manual_seed(job.run.seed)
    shape = (job.batch.global_batch_size, job.model.sequence + 1)
    tokens_BS = torch.randint(job.model.vocab, shape, generator=generator)
    inputs_BS, targets_BS = tokens_BS[:, :-1].contiguous(), tokens_BS[:, 1:].contiguous()

    reference = placed_parameters(module.stage)

    def our_step() -> list[Tensor]:
        for shards in replica.shards.values():
            shards.clear_gradients()
        parts = microbatches(tokens_BS, job.plan.microbatch_size)
        losses = replica.executor.run(replica.program, parts, lambda _: None)  # no optimizer step here
        return [losses[i] for i in sorted(losses)]

    def their_step() -> list[Tensor]:
        losses: list[Tensor] = []
        for parameter in reference.values():
            parameter.has_gradient = False
        if is_last:
            schedule.step(target=targets_BS, losses=losses, return_outputs=False)
        else:
            schedule.step(inputs_BS)
        return losses

    their_step()  # its first step also runs the stages to learn their shapes, which leaves gradients behind
    for own, baseline in zip(our_step(), their_step(), strict=True):
        check_close("a loss", own.detach(), baseline.detach())
    for name, parameter in placed_parameters(replica.stages[index]).items():
        check_close(f"the gradient of {name}", parameter.gradient, reference[name].gradient)
    return alternate(our_step, their_step, MOST_ROUNDS, MOST_S).cells()


def benchmark(mesh: Mesh, job: JobSpec) -> None:
    """All variants on this rank."""
    print_row(["forward and backward", *RATIO_HEADER], is_header=True)
    for size, model in MODELS.items():
        for schedule, reference in SCHEDULES.items():
            variant = resized(job, model=model, plan={"schedule": schedule})
            print_row([f"{size}, pp 2, {schedule} / {reference.__name__}", *compare(mesh, variant)])


if __name__ == "__main__":
    plan = {"pp": 2, "microbatch_size": MICROBATCH_SIZE}
    run_two_ranks(benchmark, {"plan": plan, "batch": {"global_batch_size": MICROBATCHES * MICROBATCH_SIZE}})
