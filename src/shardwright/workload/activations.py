"""What a layer keeps for its backward, tensor by tensor, and what it costs to compute it again.

This is what our runtime keeps (model/decoder.py), derived operator by operator as Korthikanti et al. 2022 (arXiv
2205.05198, section 4) derive theirs; docs/recompute.md sets the two side by side. A test compares it with what autograd
saves, to the byte.

Letters: S sequence, B microbatch size, T = S x B tokens, H hidden, N query heads, G key/value heads, D head width, F
inner width of the MLP, V vocabulary, t tensor-parallel degree. Sizes are bytes on one rank.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardwright.spec.job import JobSpec
from shardwright.spec.plan import split_evenly
from shardwright.spec.recompute import LAYER, Policy

FLOAT32, INT64, BOOL = 4, 8, 1

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
    """One operator of a layer: the tensors it takes, keeps for its backward and gives, and what running it takes."""

    name: str
    takes: str
    keeps: tuple[str, ...]
    gives: str
    work: Work


Region = tuple[Operator, ...]


@dataclass(frozen=True)
class Layer:
    """A layer on one rank, for one microbatch: the size of each tensor, and its two chains of operators.

    The last operator of a chain is the product whose output joins the residual stream. Between them stands the sum
    that makes "middle".
    """

    sizes: Mapping[str, int]
    attention: Region
    mlp: Region

    def kept(self, policy: Policy) -> dict[str, int]:
        """Bytes that are kept from the forward to the backward, by tensor."""
        if LAYER in policy:
            return {"input": self.sizes["input"]}
        names: dict[str, None] = {}
        for chain in (self.attention, self.mlp):
            follows_region = False
            for region in _runs(chain, policy):
                if region[0].name in policy:
                    names[region[0].takes] = None
                    follows_region = True
                    continue
                for operator in region:
                    # The product after a region keeps the region's input instead of its own.
                    names |= {} if follows_region else dict.fromkeys(operator.keeps)
                    follows_region = False
        return {name: self.sizes[name] for name in names}

    def kept_bytes(self, policy: Policy) -> int:
        """All that is kept."""
        return sum(self.kept(policy).values())

    def regions(self, policy: Policy) -> list[Region]:
        """What is computed again, each at a time of its own."""
        if LAYER in policy:
            return [self.attention + self.mlp[:-1]]
        return [run for chain in (self.attention, self.mlp) for run in _runs(chain, policy) if run[0].name in policy]

    def again_bytes(self, policy: Policy) -> int:
        """What is there in the backward besides what was kept: of the largest region, all that it makes again."""
        sizes = []
        for region in self.regions(policy):
            made = {name for operator in region for name in operator.keeps} | {region[-1].gives}
            sizes.append(sum(self.sizes[name] for name in made - {region[0].takes}))
        return max(sizes, default=0)

    def work_again(self, policy: Policy) -> Work:
        """What computing again takes."""
        return sum((operator.work for region in self.regions(policy) for operator in region), Work())

    def work(self) -> Work:
        """What the forward takes."""
        return sum((operator.work for operator in self.attention + self.mlp), Work())

    def deferred_bytes(self) -> int:
        """What is kept from I to W: input and output gradient of each product, whole along the sequence."""
        products = (self.attention[1], self.attention[-1], self.mlp[1], self.mlp[-1])
        return sum(self.sizes[f"whole {p.takes}"] + self.sizes[f"whole {p.gives}"] for p in products)


def _runs(chain: Region, policy: Policy) -> Iterator[Region]:
    """The chain, cut where recomputed and kept operators meet."""
    run: list[Operator] = []
    for operator in chain:
        if run and (operator.name in policy) != (run[-1].name in policy):
            yield tuple(run)
            run = []
        run.append(operator)
    yield tuple(run)


def layer_of(job: JobSpec) -> Layer:
    """Any layer of a job, on any rank, for one microbatch; they are all alike."""
    model, plan, element = job.model, job.plan, job.precision.compute_bytes
    tp, batch = plan.tp, plan.microbatch_size
    tokens = model.sequence * batch
    is_sharded = plan.sequence_parallel and tp > 1
    tokens_here = tokens // tp if is_sharded else tokens
    hidden, heads, kv_heads, width = model.hidden, model.heads // tp, model.num_kv_heads // tp, model.head_size
    qkv_width = (heads + 2 * kv_heads) * width
    inner = model.ffn_size // tp
    up_width = (2 if model.gated_mlp else 1) * inner
    stream, whole_stream = element * tokens_here * hidden, element * tokens * hidden
    # RMSNorm keeps 1 / rms in float32; LayerNorm keeps mean and 1 / deviation, in the number type of x on a CPU.
    statistics = FLOAT32 * tokens_here if model.norm == "rmsnorm" else 2 * element * tokens_here
    sizes = {
        "input": stream, "attention statistics": statistics, "attention normal": stream,
        "qkv": element * tokens * qkv_width,
        "biased qkv": element * tokens * qkv_width,
        "query": element * tokens * heads * width,
        "key": element * tokens * kv_heads * width,
        "value": element * tokens * kv_heads * width,
        "attended": element * tokens * heads * width,
        "log-sum-exp": FLOAT32 * tokens * heads,
        "middle": stream, "mlp statistics": statistics, "mlp normal": stream,
        "up": element * tokens * up_width,
        "biased up": element * tokens * up_width,
        "inner": element * tokens * inner,
        "output": stream,
    }  # fmt: skip
    sizes |= {f"whole {name}": size for name, size in sizes.items()}
    sizes |= {f"whole {name}": whole_stream for name in ("attention normal", "middle", "mlp normal", "output")}

    whole_qkv = "biased qkv" if model.bias else "qkv"
    if model.positions == "rotary":
        qkv_kept: tuple[str, ...] = ("query", "key", "value")
    elif heads == kv_heads or kv_heads == 1:
        qkv_kept = (whole_qkv,)  # three views of it
    else:
        qkv_kept = (whole_qkv, "query")  # several queries of a key are copied side by side

    def product(rows: int, columns: int, gathered: int = 0, scattered: int = 0) -> Work:
        """T x rows times rows x columns."""
        moved = element * (tokens * rows + rows * columns + tokens * columns)
        # Under sequence parallel the input is gathered, else the output summed; one rank alone does neither.
        return Work(2.0 * tokens * rows * columns, moved, gathered if is_sharded else (scattered if tp > 1 else 0))

    def norm() -> Work:
        return Work(float(NORM_FLOPS * tokens_here * hidden), 2.0 * stream)

    rotary = 2 * (sizes["query"] + sizes["key"]) if model.positions == "rotary" else 0
    attended = Work(
        4.0 * tokens * model.sequence * heads * width,
        sizes["query"] + sizes["key"] + sizes["value"] + sizes["attended"] + rotary,
    )
    activated = Work(float(ACTIVATION_FLOPS * tokens * up_width), float(sizes["up"] + sizes["inner"]))
    leaving = product(heads * width, hidden, whole_stream, whole_stream)
    falling = product(inner, hidden, whole_stream, whole_stream)
    return Layer(
        sizes,
        attention=(
            Operator("norm", "input", ("input", "attention statistics"), "attention normal", norm()),
            Operator("qkv", "attention normal", ("attention normal",), "qkv", product(hidden, qkv_width, whole_stream)),
            Operator("attention", "qkv", (*qkv_kept, "attended", "log-sum-exp"), "attended", attended),
            Operator("output", "attended", ("attended",), "middle", leaving),
        ),
        mlp=(
            Operator("norm", "middle", ("middle", "mlp statistics"), "mlp normal", norm()),
            Operator("up", "mlp normal", ("mlp normal",), "up", product(hidden, up_width, whole_stream)),
            Operator("activation", "up", ("biased up" if model.bias else "up",), "inner", activated),
            Operator("down", "inner", ("inner",), "output", falling),
        ),
    )


def embedding_kept(job: JobSpec) -> dict[str, int]:
    """What the first stage keeps besides its layers, of one microbatch. Token ids are the batch's, and there anyway."""
    tokens = job.model.sequence * job.plan.microbatch_size
    kept: dict[str, int] = {}
    if job.plan.tp > 1:
        kept |= {"rows": INT64 * tokens, "rows elsewhere": BOOL * tokens}
    if job.model.positions == "learned":
        kept["positions"] = INT64 * job.model.sequence
    return kept


def head_kept(job: JobSpec, tp_index: int = 0) -> dict[str, int]:
    """What the last stage keeps besides its layers, of one microbatch: the final norm's, the head's and the loss's."""
    model, plan = job.model, job.plan
    layer = layer_of(job)
    tokens = model.sequence * plan.microbatch_size
    first, end = split_evenly(model.vocab, plan.tp, tp_index)
    return {
        "final input": layer.sizes["input"], "final statistics": layer.sizes["attention statistics"],
        "final normal": layer.sizes["attention normal"],
        "softmax": FLOAT32 * tokens * (end - first),
        "targets": INT64 * tokens, "targets elsewhere": BOOL * tokens,
    }  # fmt: skip


def head_deferred_bytes(job: JobSpec, tp_index: int = 0) -> int:
    """What the head keeps from I to W: its input, and the gradient of the logits."""
    first, end = split_evenly(job.model.vocab, job.plan.tp, tp_index)
    tokens, element = job.model.sequence * job.plan.microbatch_size, job.precision.compute_bytes
    return element * tokens * (job.model.hidden + end - first)
