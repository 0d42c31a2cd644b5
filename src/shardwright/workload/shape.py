"""The model and the plan as the cost model sees them: shapes and degrees, nothing of how they are run.

A job becomes a `Run` (`run_of`), and so does a row of published measurements: everything behind it reads only this. It
can say more than our runtime executes (mixtures of experts, latent attention), because plans of others are predicted
too.
"""

from dataclasses import dataclass, field

from shardwright.spec.job import JobSpec
from shardwright.spec.plan import PlanSpec


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: each token goes to `topk` of `num` MLPs of width `ffn`, and to one of `shared_ffn`.

    The first `dense_layers` have none, and of the others the last of every `every` has some.
    """

    num: int
    topk: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0
    every: int = 1


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: queries and keys through low ranks (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    A head's query and key have `plain` elements and `rotary` ones, its value `value` elements.
    """

    query_rank: int
    key_rank: int
    plain: int = 128
    rotary: int = 64
    value: int = 128


@dataclass(frozen=True)
class Shape:
    """Shape of a decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    vocab: int
    sequence: int
    tied: bool = False
    learned_positions: bool = False
    experts: Experts | None = None
    latent: Latent | None = None

    def padded_vocab(self, tp: int) -> int:
        """Rows of the table with those that make each tp rank's part a multiple of 128, as all frameworks pad it."""
        return -(-self.vocab // (128 * tp)) * 128 * tp

    @property
    def attention_parameters(self) -> int:
        """Elements of a layer's attention matrices."""
        h, a = self.hidden, self.heads
        if self.latent:
            m = self.latent
            queries = m.query_rank * (h + a * (m.plain + m.rotary)) if m.query_rank else h * a * (m.plain + m.rotary)
            return queries + h * (m.key_rank + m.rotary) + m.key_rank * a * (m.plain + m.value) + a * m.value * h
        return h * self.head_dim * 2 * (a + self.kv_heads)

    def mlp_parameters(self, ffn: int) -> int:
        """Elements of the matrices of one MLP."""
        return (3 if self.gated else 2) * self.hidden * ffn

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has one MLP for all tokens."""
        if self.experts is None:
            return True
        behind = layer - self.experts.dense_layers
        return behind < 0 or behind % self.experts.every != self.experts.every - 1

    def layer_parameters(self, layer: int) -> tuple[int, int]:
        """(elements that all tokens use, elements of the routed experts) of a layer."""
        if self.experts is None or self.is_dense(layer):
            return self.attention_parameters + self.mlp_parameters(self.ffn) + 2 * self.hidden, 0
        of = self.experts
        common = self.attention_parameters + self.mlp_parameters(of.shared_ffn) + (of.num + 2) * self.hidden
        return common, of.num * self.mlp_parameters(of.ffn)

    @property
    def parameters(self) -> int:
        """All elements of the model."""
        layers = sum(sum(self.layer_parameters(layer)) for layer in range(self.layers))
        tables = (1 if self.tied else 2) * self.vocab * self.hidden
        return layers + tables + self.hidden + (self.sequence * self.hidden if self.learned_positions else 0)

    def flops_per_token(self, causal: bool = False) -> float:
        """Model FLOPs of one token, forward and backward: 6 a matrix element it meets, and attention.

        Chowdhery et al. 2022 (arXiv 2204.02311, appendix B), over the full sequence; `causal` counts half of it.
        """
        met = self.vocab * self.hidden
        for layer in range(self.layers):
            met += self.attention_parameters
            if self.experts is None or self.is_dense(layer):
                met += self.mlp_parameters(self.ffn)
            else:
                of = self.experts
                met += self.mlp_parameters(of.topk * of.ffn + of.shared_ffn) + of.num * self.hidden
        widths = self.heads * (2 * self.head_dim)
        if self.latent:
            widths = self.heads * (self.latent.plain + self.latent.rotary + self.latent.value)
        return 6.0 * met + 6.0 * self.layers * widths * self.sequence * (0.5 if causal else 1.0)


@dataclass(frozen=True)
class Cut:
    """The plan: degrees, what is sharded, the order of work and what is computed again.

    `zero_ranks` replicas share one set of ZeRO's shards; 0 is all of them. `precision` is of the products: bf16,
    fp16, fp32, fp8, mxfp8 or nvfp4. Recompute is none, selective (the attention core), matmul (all but what products
    and attention give) or full (each layer); of the first `recompute_layers`, or of all where that is 0.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int = 1
    virtual: int = 1
    schedule: str = "1f1b"
    sequence_parallel: bool = False
    zero: int = 0
    zero_ranks: int = 0
    microbatch: int = 1
    global_batch: int = 1
    recompute: str = "none"
    recompute_layers: int = 0
    precision: str = "bf16"
    layout: tuple[int, ...] = field(default=())

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def replicas(self) -> int:
        """Ranks that sum the same gradients."""
        return self.dp * self.cp

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same part of the same experts."""
        return max(1, self.replicas * self.tp // (self.ep * self.expert_tp))

    @property
    def num_microbatches(self) -> int:
        """Forward passes of one rank in a step. The last ones of a batch that does not divide are full here."""
        return max(1, -(-self.global_batch // (self.dp * self.microbatch)))

    def stage_layers(self, layers: int) -> list[int]:
        """Layers of each of the pp x virtual stages, as plan.stage_layers cuts them."""
        plan = PlanSpec(pp=self.pp * self.virtual, layout=list(self.layout))
        return plan.stage_layers(layers)


@dataclass(frozen=True)
class Run:
    """What is predicted: a model under a plan on devices, with a generation of software.

    Bandwidths are in bytes a second, of one device in one direction, as the maker states them; 0 is unknown.
    """

    shape: Shape
    cut: Cut
    device: str
    software: str
    devices_per_node: int
    node_bytes_per_s: float
    network_bytes_per_s: float


def shape_of(job: JobSpec) -> Shape:
    """The model of a job."""
    m = job.model
    experts, latent = None, None
    if m.moe.experts:
        experts = Experts(
            m.moe.experts, m.moe.num_chosen, m.moe.ffn_size(m.ffn_size), m.moe.shared_size(m.ffn_size),
            m.moe.first_dense, m.moe.every,
        )  # fmt: skip
    if m.is_latent:
        low = m.latent
        latent = Latent(low.q_rank, low.kv_rank, low.nope_dim, low.rope_dim, low.value_dim)
    head_dim = m.query_width if m.is_latent else m.head_size
    return Shape(
        m.layers, m.hidden, m.heads, m.num_kv_heads, head_dim, m.ffn_size, m.gated_mlp, m.vocab, m.sequence,
        m.tied_embeddings, m.positions == "learned", experts, latent,
    )  # fmt: skip


_SCHEDULES = {"interleaved-1f1b": "interleaved", "sequential": "none"}


def cut_of(job: JobSpec) -> Cut:
    """The plan of a job."""
    p = job.plan
    recompute = {"none": "none", "selective": "selective"}.get(p.recompute, "full")
    return Cut(
        p.dp, p.tp, p.pp, p.cp, p.ep, p.expert_tp_size, p.stages_per_rank, _SCHEDULES.get(p.schedule, p.schedule),
        p.sequence_parallel, p.zero, p.zero_ranks, p.microbatch_size, job.batch.global_batch_size, recompute, 0,
        "fp8" if job.precision.float8 != "none" else job.precision.compute, tuple(p.layout),
    )  # fmt: skip


def run_of(job: JobSpec) -> Run:
    """A job on its cluster."""
    cluster = job.cluster
    return Run(
        shape_of(job), cut_of(job), cluster.device, cluster.software, cluster.devices_per_node or job.plan.world,
        cluster.intra_node.bandwidth_gb_per_s * 1e9, cluster.inter_node.bandwidth_gb_per_s * 1e9,
    )  # fmt: skip
