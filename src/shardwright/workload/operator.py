"""An operator of a layer as data: what it takes, keeps and gives, and what running it costs on one rank."""

from dataclasses import dataclass

from shardwright.spec.job import JobSpec

FLOAT32, INT32, INT64, BOOL = 4, 4, 8, 1

# Operations an element, roughly: what is elementwise is bound by memory, and counted so that nothing is free.
NORM_FLOPS, ACTIVATION_FLOPS = 6, 8


@dataclass(frozen=True)
class Work:
    """FLOPs, bytes read and written, and bytes of collectives' full tensors."""

    flops: float = 0.0
    moved_bytes: float = 0.0
    communicated_bytes: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.flops + other.flops,
            self.moved_bytes + other.moved_bytes,
            self.communicated_bytes + other.communicated_bytes,
        )


@dataclass(frozen=True)
class Operator:
    """One operator of a layer: the tensors it takes, keeps for its backward and gives, and what running it takes.

    `waits` are those that its weight gradients are made from, and so stay from I to W where the backward is split.
    """

    name: str
    takes: str
    keeps: tuple[str, ...]
    gives: str
    work: Work
    waits: tuple[str, ...] = ()


Chain = tuple[Operator, ...]


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

    def norm(self, rows: int = 0, width: int = 0) -> Work:
        """A norm; of the residual stream, unless a shape is given."""
        elements = (rows or self.tokens_here) * (width or self.hidden)
        return Work(float(NORM_FLOPS * elements), 2.0 * self.element * elements)

    def product(self, rows: int, columns: int, gathered: int = 0, scattered: int = 0, tokens: int = 0) -> Work:
        """T x rows times rows x columns, of all tokens or of `tokens`.

        Under sequence parallel `gathered` bytes of its input are gathered, else `scattered` of its output summed; one
        rank alone does neither.
        """
        tokens = tokens or self.tokens
        moved = self.element * (tokens * rows + rows * columns + tokens * columns)
        is_sharded = self.tokens_here < self.tokens
        return Work(2.0 * tokens * rows * columns, moved, gathered if is_sharded else (scattered if self.tp > 1 else 0))
