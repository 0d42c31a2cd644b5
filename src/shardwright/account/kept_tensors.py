"""An operator of a layer of our runtime as data: which tensors it takes, keeps and gives. What it costs is in
operators.py."""

from dataclasses import dataclass

from shardwright.config.job import JobSpec

FLOAT32, INT32, INT64, BOOL = 4, 4, 8, 1


@dataclass(frozen=True)
class KeptTensors:
    """One operator of a layer: the tensors it takes, keeps for its backward and gives.

    `waits` are those that its weight gradients are made from, and so stay from I to W where the backward is split.
    """

    name: str
    takes: str
    keeps: tuple[str, ...]
    gives: str
    waits: tuple[str, ...] = ()


Chain = tuple[KeptTensors, ...]


@dataclass(frozen=True)
class Share:
    """What one rank has of a microbatch: `element` bytes of a number; `tokens` within the layers, and `tokens_here`
    between them, where the sequence may be sharded over tp."""

    element: int
    tp: int
    hidden: int
    tokens: int
    tokens_here: int
    is_rmsnorm: bool

    @classmethod
    def of(cls, job: JobSpec) -> "Share":
        """That of any rank of a job."""
        tokens, tp = job.tokens_within * job.plan.microbatch_size, job.plan.tp
        is_sharded = job.plan.sequence_parallel and tp > 1
        return cls(
            element=job.precision.compute_bytes, tp=tp, hidden=job.model.hidden, tokens=tokens,
            tokens_here=tokens // tp if is_sharded else tokens, is_rmsnorm=job.model.norm == "rmsnorm",
        )  # fmt: skip

    @property
    def stream(self) -> int:
        """Bytes of the residual stream between the layers."""
        return self.element * self.tokens_here * self.hidden

    @property
    def whole_stream(self) -> int:
        """Bytes of the residual stream within the layers, whole along what tp shares of the sequence."""
        return self.element * self.tokens * self.hidden

    def statistics(self, rows: int) -> int:
        """What a norm of so many vectors keeps besides its input.

        RMSNorm keeps 1 / rms in float32; LayerNorm keeps mean and 1 / deviation, in the number type of x on a CPU.
        """
        return FLOAT32 * rows if self.is_rmsnorm else 2 * self.element * rows
