"""The job: model + cluster + plan + batch + precision + data + optimizer + run. Everything that one command needs."""

from typing import Annotated, Literal

from pydantic import Field

from shardwright.config import largest
from shardwright.config.base import SectionSpec, Spec
from shardwright.config.batch import BatchSpec
from shardwright.config.checkpoint import CheckpointSpec
from shardwright.config.cluster import ClusterSpec
from shardwright.config.data import DataSpec
from shardwright.config.field_types import Steps, StepsOr0
from shardwright.config.health import HealthSpec
from shardwright.config.model import ModelSpec
from shardwright.config.optimizer import OptimizerSpec
from shardwright.config.plan import PlanSpec
from shardwright.config.precision import PrecisionSpec


class RunSpec(SectionSpec):
    """The place, the seed, the devices and the limits of a run."""

    folder: str = Field("", description="Folder of logs and metrics; empty means runs/NAME.")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(1234, description="Seeds weights, data order and sampling.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes CUDA where there is some.")
    log_every: Steps = Field(10, description="Steps between progress lines.")
    eval_every: StepsOr0 = Field(0, description="Steps between evaluations on held-out text; 0 means only at the end.")
    eval_batches: Steps = Field(
        4, description="Global batches of held-out text in one evaluation at most; each sequence counts once."
    )
    sample_tokens: Annotated[int, Field(ge=0, le=largest.SEQUENCE)] = Field(
        0, description="Tokens of text generated at the end."
    )
    sample_prompt: str = Field("def ", description="What the generated text begins with.")
    timeout_s: Annotated[float, Field(gt=0, le=largest.SECONDS)] = Field(
        120.0, description="Seconds that a rank waits for another before the run is ended."
    )
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        0, description="Port of the local rendezvous; 0 means any free one."
    )
    max_restarts: Annotated[int, Field(ge=0, le=largest.RESTARTS)] = Field(
        3, description="Restarts after failures within restart_window_s, where the run writes checkpoints."
    )
    restart_window_s: Annotated[float, Field(gt=0, le=largest.SECONDS)] = Field(
        3600.0, description="Seconds after which a restart no longer counts."
    )
    profile_first_step: Steps = Field(10, description="The first step that profile_steps records, counted from 1.")
    profile_steps: StepsOr0 = Field(
        0, description="Steps whose operators each rank records, in the folder's profile/; 0 means none."
    )
    prometheus: str = Field(
        "", description="File of the newest metrics in Prometheus' text format, for a textfile collector; empty: none."
    )
    wandb: Literal["off", "offline", "online"] = Field(
        "off", description="Curves for Weights & Biases: offline below the run's folder, or sent while the run goes on."
    )


# Fields that a run on several machines must state: it needs one of each section, even if it has the default.
STATED: dict[str, tuple[str, ...]] = {
    "data": ("path", "sources"),
    "optimizer": ("learning_rate",),
    "checkpoint": ("every_steps", "every_s", "auto"),
}


class JobSpec(Spec):
    """A job. Every field has a default that works."""

    name: str = Field("job", description="Name of the job; the run folder is called after it.")
    model: ModelSpec = Field(ModelSpec(), description="The decoder.")
    cluster: ClusterSpec = Field(ClusterSpec(), description="The machines.")
    plan: PlanSpec = Field(PlanSpec(), description="How a step is cut over the ranks.")
    batch: BatchSpec = Field(BatchSpec(), description="What a step consumes.")
    precision: PrecisionSpec = Field(PrecisionSpec(), description="In which numbers.")
    data: DataSpec = Field(DataSpec(), description="The text.")
    optimizer: OptimizerSpec = Field(OptimizerSpec(), description="How weights are updated.")
    run: RunSpec = Field(RunSpec(), description="Folder, seed, logging.")
    checkpoint: CheckpointSpec = Field(CheckpointSpec(), description="What is kept of a run while it goes.")
    health: HealthSpec = Field(HealthSpec(), description="What is watched of a run while it goes.")

    @property
    def num_microbatches(self) -> int:
        """Number of forward passes of one rank in one step."""
        return self.batch.global_batch_size // (self.plan.dp * self.plan.microbatch_size)

    @property
    def runs_on_cpu(self) -> bool:
        """True if ranks are processes on CPUs, over Gloo: if the job asks for CPUs, or names no device."""
        is_unknown = self.cluster.device == "unknown" and not self.cluster.parts
        return self.run.device == "cpu" or (self.run.device == "auto" and is_unknown)

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens of one optimizer step, over all ranks."""
        return self.batch.global_batch_size * self.model.sequence

    @property
    def tokens_within(self) -> int:
        """Number of tokens of a sequence with which a rank computes in a layer."""
        return self.model.sequence // self.plan.cp

    @property
    def tokens_between(self) -> int:
        """Number of tokens of a sequence whose hidden states a rank holds between layers, and between stages."""
        return self.tokens_within // (self.plan.tp if self.plan.sequence_parallel else 1)

    def at_batch(self, size: int) -> "JobSpec":
        """The job with batches of constant size `size`."""
        if not self.batch.grows and size == self.batch.global_batch_size:
            return self
        return self.model_copy(update={"batch": BatchSpec(global_batch_size=size)})

    def grown(self) -> "JobSpec":
        """The job with full batches only."""
        return self.at_batch(self.batch.global_batch_size)

    def at_step(self, step: int) -> "JobSpec":
        """The job with the batch of step 0, 1, ..., which may still be growing."""
        return self.at_batch(self.batch.size_at(step))

    def batch_share(self, step: int) -> float:
        """The batch of a step, as a share of the full batch."""
        return self.batch.size_at(step) / self.batch.global_batch_size

    @property
    def tokens_of_run(self) -> int:
        """Number of tokens of all steps."""
        return self.batch.samples_before(self.optimizer.steps) * self.model.sequence

    def as_one_rank(self) -> "JobSpec":
        """The job as one rank computes it: same microbatches, samples and numbers, no parallelism."""
        plan = PlanSpec(microbatch_size=self.plan.microbatch_size, schedule="sequential")
        return self.model_copy(update={"plan": plan})
