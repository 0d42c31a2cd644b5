"""The tensors that a layer keeps for its backward.

They are the tensors that this runtime keeps (model/decoder.py), derived operator by operator like those of Korthikanti
et al. 2022 (arXiv 2205.05198, section 4); docs/recompute.md compares the two. A test compares them with the tensors
that autograd saves, to the byte.

Letters: S tokens of a sequence on a rank, B microbatch size, T = S x B, H hidden, F inner width of the MLP, V
vocabulary, t tensor-parallel degree. Sizes are bytes on one rank.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardwright.config.array_math import holds, most
from shardwright.config.job import JobSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.recompute_policy import LAYER, Policy
from shardwright.layers.layer_operators import ALWAYS_RECOMPUTED, mlp_operators
from shardwright.memory.attention_activations import attention_of
from shardwright.memory.cast_inputs import BOTH, cast_inputs, waiting_operands
from shardwright.memory.kept_tensors import (
    BOOL,
    FLOAT32,
    INT32,
    INT64,
    Bytes,
    Chain,
    KeptTensors,
    Share,
    activation_keeps,
    kept_chain,
)
from shardwright.memory.moe_activations import Rows, expected_rows, experts_of
from shardwright.memory.working_memory import BackwardNeed, OperatorNeeds, most_needed


@dataclass(frozen=True)
class Layer:
    """A layer on one rank, for one microbatch: the size of each tensor, and its two chains of operators.

    The last operator of a chain is the product whose output is added to the residual stream. Between the chains is the
    sum that makes "middle"; in a parallel block the sum over tp comes after both. In a layer with experts the chain
    `mlp` has the experts, and `shared` the shared experts. If the layer does not end with a product, because it has
    experts or a norm of the MLP's result, its end is recomputed with the whole layer. `carried` is the tensor that the
    first chain passes to the end, and `needs` are the memory needs of the operators in the backward.
    """

    sizes: Mapping[str, Bytes]
    attention: Chain
    mlp: Chain
    shared: Chain = ()
    ends_with_product: bool = True
    carried: str = "middle"
    needs: tuple[BackwardNeed, ...] = ()

    @property
    def chains(self) -> tuple[Chain, ...]:
        """Every chain of the layer."""
        return (self.attention, self.mlp, self.shared) if self.shared else (self.attention, self.mlp)

    def kept(self, policy: Policy) -> dict[str, Bytes]:
        """Bytes that are kept from the forward to the backward, by tensor."""
        if LAYER in policy:
            return {"input": self.sizes["input"]}
        policy |= ALWAYS_RECOMPUTED
        return {name: self.sizes[name] for chain in self.chains for name in _kept_names(chain, policy)}

    def kept_bytes(self, policy: Policy) -> Bytes:
        """Bytes of all kept tensors."""
        return sum(self.kept(policy).values())

    def again_bytes(self, policy: Policy) -> Bytes:
        """The bytes in the backward besides the kept ones: the tensors of the largest recomputed region.

        When attention's turn comes, the later chains have freed their kept tensors.
        """
        if LAYER in policy:
            operators = sum(self.chains, ())
            end = len(operators) - self.ends_with_product
            return self._made_bytes(operators[:end], {operators[0].takes}, self.carried)
        sizes, later_kept = [0], set(self.kept(policy)) - set(_kept_names(self.attention, policy))
        for chain in self.chains:
            freed_bytes = sum(self.sizes[name] for name in later_kept) if chain is self.attention else 0
            recomputed = [run for run in _runs(chain, policy) if run[0].name in policy]
            sizes += [self._made_bytes(run, set(_inputs(run))) - freed_bytes for run in recomputed]
        return most(*sizes)

    def _made_bytes(self, region: Chain, inputs: set[str], *further: str) -> Bytes:
        names = {*_kept_names(region, ALWAYS_RECOMPUTED), region[-1].gives, *further}
        return sum(self.sizes[name] for name in names - inputs)

    def working_bytes(self, policy: Policy) -> Bytes:
        """The most bytes that an operator needs in its backward besides the kept and the recomputed tensors of the
        layer, less the tensors that are free by then."""
        kept = self.kept(policy)
        if LAYER in policy:
            kept |= {name: self.sizes[name] for chain in self.chains for name in _kept_names(chain, ALWAYS_RECOMPUTED)}
        return most_needed(self.needs, kept)

    def deferred_bytes(self) -> Bytes:
        """Bytes kept from I to W: inputs and output gradients of the products."""
        names = {name for chain in self.chains for operator in chain for name in operator.waits}
        return sum(self.sizes[name] for name in names)


def _kept_names(chain: Chain, policy: Policy) -> dict[str, None]:
    """The names of the tensors that a chain keeps, in order (keys of a dict)."""
    names: dict[str, None] = {}
    follows_region = False
    for region in _runs(chain, policy):
        if region[0].name in policy:
            names |= dict.fromkeys(_inputs(region))
            follows_region = True
            continue
        for operator in region:
            # The product after a region keeps the region's input instead of its own.
            names |= {} if follows_region else dict.fromkeys(operator.keeps)
            follows_region = False
    return names


def _inputs(region: Chain) -> tuple[str, ...]:
    """The names of the tensors that a region takes from outside."""
    return (region[0].takes, *(name for operator in region for name in operator.beside))


def _runs(chain: Chain, policy: Policy) -> Iterator[Chain]:
    """Split a chain into runs of operators that are recomputed and runs that are not."""
    run: list[KeptTensors] = []
    for operator in chain:
        if run and (operator.name in policy) != (run[-1].name in policy):
            yield tuple(run)
            run = []
        run.append(operator)
    yield tuple(run)


def layer_of(job: JobSpec, layer: int = 0, rows: Rows | None = None) -> Layer:
    """A layer of a job, or a block of further tokens, by its number in the model, on any rank, for one microbatch.

    `rows` has the rows that the gate sends to the experts of this rank, if known.
    """
    attention_sizes, attention = attention_of(job, layer)
    kind = shape_of(job.model).kind(layer)
    if job.model.has_experts(layer):
        rows = rows or expected_rows(job)
        sizes, experts, shared = experts_of(job, rows)
        needs = OperatorNeeds(job, Share.of(job, rows.sent, rows.arrived))
        all_needs = (
            *needs.of_experts(),
            *(needs.of_mlp("shared ") if shared else ()),
            *needs.of_attention(tuple(sizes), kind),
        )
        return Layer(attention_sizes | sizes, attention, experts, shared, ends_with_product=False, needs=all_needs)
    share = Share.of(job)
    shape, norm_bytes = share.tensors.shape, share.statistics(share.tensors.tokens_here)
    operators = mlp_operators(shape)
    sizes = share.sizes(operators) | {"middle": share["middle"], "biased up": share["up"]}
    sizes |= dict.fromkeys(("mlp statistics", "mlp out statistics"), norm_bytes)
    keeps = {
        "norm": (operators[0].takes, "mlp statistics"),
        "out norm": ("mlp output", "mlp out statistics"),
        "activation": activation_keeps(job),
    }
    cast, in_place = cast_inputs(job, share, operators, BOTH)
    sizes, needs = sizes | waiting_operands(job, share, operators) | cast, OperatorNeeds(job, share)
    chain = kept_chain(operators, keeps | in_place, waits_in_float8=job.precision.float8_weight_gradients)
    all_needs = (*needs.of_mlp(), *needs.of_attention(tuple(sizes.keys() - {"input"}), kind))
    carried = "middle" if shape.parallel == "none" else "whole output"
    is_last = not shape.norms_after
    return Layer(attention_sizes | sizes, attention, chain, ends_with_product=is_last, carried=carried, needs=all_needs)


def documents_kept(job: JobSpec) -> dict[str, Bytes]:
    """Bytes of the tensors that every stage keeps of a microbatch if documents are separate: the document of each
    token, in a model with chunks also its chunk, and the factor of its query if queries grow with their position. The
    targets that count are marked in the tokens, and computed with the loss.

    Every stage counts as one with layers of all kinds of the model: few stages lack a kind."""
    model, size = job.model, job.plan.microbatch_size
    if not job.data.separate_documents:
        return {}
    tensors = {"documents": INT32 * model.sequence * size}
    if model.window.size and model.window.chunked:
        tensors["chunks"] = INT32 * model.sequence * size
    if model.positions == "rotary" and model.temperature_tuning.scale:
        trades_heads = job.plan.trades_heads
        tensors["temperatures"] = FLOAT32 * (model.sequence if trades_heads else job.tokens_within) * size
    return tensors


def embedding_kept(job: JobSpec) -> dict[str, Bytes]:
    """Bytes of the tensors that the first stage keeps of one microbatch besides its layers. Token ids need no memory of
    their own, since the batch has them, unless a rank picks its part or removes the marks of documents."""
    plan = job.plan
    tokens = job.tokens_within * plan.microbatch_size
    is_cut, is_picked = holds(plan.tp > 1), holds(plan.cp > 1) and not plan.trades_heads
    tensors: dict[str, Bytes] = {}
    if is_cut or is_picked:
        tensors["rows"] = INT64 * tokens
    elif job.data.separate_documents:
        tensors["rows"] = INT64 * job.model.sequence * plan.microbatch_size
    if is_cut:
        tensors["rows elsewhere"] = BOOL * tokens
    if job.model.positions == "learned":
        tensors["positions"] = INT64 * job.tokens_within * (plan.microbatch_size if job.data.separate_documents else 1)
    if job.model.embedding_norm:
        share = Share.of(job)
        tensors |= {"embedded": share["embedded"], "embedding statistics": share.statistics(share.tensors.tokens_here)}
    return tensors


def head_kept(job: JobSpec) -> dict[str, Bytes]:
    """Bytes of the tensors that the last stage keeps of one microbatch besides its layers: those of the final norm, of
    the head and of the loss, which computes logits only in the backward."""
    share = Share.of(job)
    tokens = share.tensors.tokens
    masked = {"targets that do not count": BOOL * tokens} if job.data.separate_documents else {}
    statistics, normal = share.statistics(share.tensors.tokens_here), share["final normal"]
    # Each further token has its own norm and loss, whose last targets never count. The inputs of all norms but one are
    # kept before the blocks (memory/layer_memory.py).
    further = job.model.mtp_layers * (statistics + normal + (INT64 + BOOL) * tokens)
    return masked | {
        "final input": share["final input"],
        "final statistics": statistics,
        "final normal": normal,
        "targets": INT64 * tokens,
        "further tokens": further,
    }


def head_working_bytes(job: JobSpec, tp_index: int = 0) -> Bytes:
    """The most bytes that the loss, the head and its norm need in their backward besides their kept tensors."""
    size, num_longer = divmod(job.model.vocab, job.plan.tp)
    rows = size + (tp_index < num_longer)
    return most_needed(OperatorNeeds(job, Share.of(job)).of_head(rows), head_kept(job))
