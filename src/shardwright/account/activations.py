"""The tensors that a layer keeps for its backward.

This is what our runtime keeps (model/decoder.py), derived operator by operator as Korthikanti et al. 2022 (arXiv
2205.05198, section 4) derive theirs; docs/recompute.md sets the two side by side. A test compares it with what autograd
saves, to the byte.

Letters: S tokens of a sequence on a rank, B microbatch size, T = S x B, H hidden, F inner width of the MLP, V
vocabulary, t tensor-parallel degree. Sizes are bytes on one rank.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardwright.account.attention_activations import attention_of
from shardwright.account.cast_inputs import BOTH, cast_inputs, waiting_operands
from shardwright.account.kept_tensors import (
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
from shardwright.account.moe_activations import Rows, expected_rows, experts_of
from shardwright.account.working_memory import BackwardNeed, OperatorNeeds, most_needed
from shardwright.config.array_math import holds, most
from shardwright.config.job import JobSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.recompute_policy import LAYER, Policy
from shardwright.workload.layer_operators import ALWAYS_AGAIN, mlp_operators


@dataclass(frozen=True)
class Layer:
    """A layer on one rank, for one microbatch: the size of each tensor, and its two chains of operators.

    The last operator of a chain is the product whose output joins the residual stream. Between them stands the sum
    that makes "middle"; in a parallel block the sum over tp comes behind both. In a layer with experts they stand for
    the MLP, and shared experts beside them. Where the end is no product, for there are experts or a norm of what the
    MLP gives, it is computed again with the whole layer. `carried` is what the first chain hands to the end, and
    `needs` are those of its operators in the backward.
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
        policy |= ALWAYS_AGAIN
        return {name: self.sizes[name] for chain in self.chains for name in _kept_names(chain, policy)}

    def kept_bytes(self, policy: Policy) -> Bytes:
        """All that is kept."""
        return sum(self.kept(policy).values())

    def again_bytes(self, policy: Policy) -> Bytes:
        """The bytes in the backward besides the kept ones: all that the largest recomputed region makes again.

        When attention's turn comes, the chains behind it have let go what they kept.
        """
        if LAYER in policy:
            whole = sum(self.chains, ())
            end = len(whole) - self.ends_with_product
            return self._made_bytes(whole[:end], {whole[0].takes}, self.carried)
        sizes, behind = [0], set(self.kept(policy)) - set(_kept_names(self.attention, policy))
        for chain in self.chains:
            gone = sum(self.sizes[name] for name in behind) if chain is self.attention else 0
            again = [run for run in _runs(chain, policy) if run[0].name in policy]
            sizes += [self._made_bytes(run, set(_inputs(run))) - gone for run in again]
        return most(*sizes)

    def _made_bytes(self, region: Chain, inputs: set[str], *others: str) -> Bytes:
        made = {*_kept_names(region, ALWAYS_AGAIN), region[-1].gives, *others}
        return sum(self.sizes[name] for name in made - inputs)

    def working_bytes(self, policy: Policy) -> Bytes:
        """The most that an operator needs in its backward beside what the layer kept and made again, less what is free
        by then."""
        there = self.kept(policy)
        if LAYER in policy:
            there |= {name: self.sizes[name] for chain in self.chains for name in _kept_names(chain, ALWAYS_AGAIN)}
        return most_needed(self.needs, there)

    def deferred_bytes(self) -> Bytes:
        """The bytes kept from I to W: inputs and output gradients of the products."""
        names = {name for chain in self.chains for operator in chain for name in operator.waits}
        return sum(self.sizes[name] for name in names)


def _kept_names(chain: Chain, policy: Policy) -> dict[str, None]:
    """The tensors that a chain keeps, in order."""
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
    """The tensors that a region takes from outside of itself."""
    return (region[0].takes, *(name for operator in region for name in operator.beside))


def _runs(chain: Chain, policy: Policy) -> Iterator[Chain]:
    """The chain, cut where recomputed and kept operators meet."""
    run: list[KeptTensors] = []
    for operator in chain:
        if run and (operator.name in policy) != (run[-1].name in policy):
            yield tuple(run)
            run = []
        run.append(operator)
    yield tuple(run)


def layer_of(job: JobSpec, layer: int = 0, rows: Rows | None = None) -> Layer:
    """A layer of a job, or a block of further tokens, by its number in the model, on any rank, for one microbatch.

    Of one with experts `rows` says how many the gate sends here, if that is known.
    """
    attention_sizes, attention = attention_of(job, layer)
    kind = shape_of(job.model).kind(layer)
    if job.model.has_experts(layer):
        rows = rows or expected_rows(job)
        sizes, experts, shared = experts_of(job, rows)
        needs = OperatorNeeds(job, Share.of(job, rows.sent, rows.arrived))
        of_all = (
            *needs.of_experts(),
            *(needs.of_mlp("shared ") if shared else ()),
            *needs.of_attention(tuple(sizes), kind),
        )
        return Layer(attention_sizes | sizes, attention, experts, shared, ends_with_product=False, needs=of_all)
    share = Share.of(job)
    shape, of_norm = share.tensors.shape, share.statistics(share.tensors.tokens_here)
    operators = mlp_operators(shape)
    sizes = share.sizes(operators) | {"middle": share["middle"], "biased up": share["up"]}
    sizes |= dict.fromkeys(("mlp statistics", "mlp out statistics"), of_norm)
    keeps = {
        "norm": (operators[0].takes, "mlp statistics"),
        "out norm": ("mlp output", "mlp out statistics"),
        "activation": activation_keeps(job),
    }
    cast, in_place = cast_inputs(job, share, operators, BOTH)
    sizes, needs = sizes | waiting_operands(job, share, operators) | cast, OperatorNeeds(job, share)
    chain = kept_chain(operators, keeps | in_place, waits_in_float8=job.precision.float8_weight_gradients)
    of_all = (*needs.of_mlp(), *needs.of_attention(tuple(sizes.keys() - {"input"}), kind))
    carried = "middle" if shape.parallel == "none" else "whole output"
    is_last = not shape.norms_after
    return Layer(attention_sizes | sizes, attention, chain, ends_with_product=is_last, carried=carried, needs=of_all)


def documents_kept(job: JobSpec) -> dict[str, Bytes]:
    """The tensors that every stage keeps of a microbatch if documents are separate: the document of each token, in a
    model with chunks also its chunk, and the factor of its query if queries grow with their position. Which targets
    count is marked in the tokens, and found when the loss is.

    A stage is counted as one that has layers of all kinds of the model, as few have not."""
    model, size = job.model, job.plan.microbatch_size
    if not job.data.separate_documents:
        return {}
    kept = {"documents": INT32 * model.sequence * size}
    if model.window.size and model.window.chunked:
        kept["chunks"] = INT32 * model.sequence * size
    if model.positions == "rotary" and model.temperature_tuning.scale:
        trades_heads = job.plan.trades_heads
        kept["temperatures"] = FLOAT32 * (model.sequence if trades_heads else job.tokens_within) * size
    return kept


def embedding_kept(job: JobSpec) -> dict[str, Bytes]:
    """The tensors that the first stage keeps of one microbatch besides its layers. Token ids are the batch's, and there
    anyway, unless a rank's are picked from them or have lost their marks."""
    plan = job.plan
    tokens = job.tokens_within * plan.microbatch_size
    is_cut, is_picked = holds(plan.tp > 1), holds(plan.cp > 1) and not plan.trades_heads
    kept: dict[str, Bytes] = {}
    if is_cut or is_picked:
        kept["rows"] = INT64 * tokens
    elif job.data.separate_documents:
        kept["rows"] = INT64 * job.model.sequence * plan.microbatch_size
    if is_cut:
        kept["rows elsewhere"] = BOOL * tokens
    if job.model.positions == "learned":
        kept["positions"] = INT64 * job.tokens_within * (plan.microbatch_size if job.data.separate_documents else 1)
    if job.model.embedding_norm:
        share = Share.of(job)
        kept |= {"embedded": share["embedded"], "embedding statistics": share.statistics(share.tensors.tokens_here)}
    return kept


def head_kept(job: JobSpec) -> dict[str, Bytes]:
    """The tensors that the last stage keeps of one microbatch besides its layers: those of the final norm, of the head
    and of the loss, which computes logits in the backward alone."""
    share = Share.of(job)
    tokens = share.tensors.tokens
    masked = {"targets that do not count": BOOL * tokens} if job.data.separate_documents else {}
    statistics, normal = share.statistics(share.tensors.tokens_here), share["final normal"]
    # Of further tokens each has a norm and a loss of its own, whose last targets never count. The inputs of all norms
    # but one are kept before the blocks (account/further_tokens.py).
    further = job.model.mtp_layers * (statistics + normal + (INT64 + BOOL) * tokens)
    return masked | {
        "final input": share["final input"],
        "final statistics": statistics,
        "final normal": normal,
        "targets": INT64 * tokens,
        "further tokens": further,
    }


def head_working_bytes(job: JobSpec, tp_index: int = 0) -> Bytes:
    """The most that the loss, the head and its norm need in their backward beside what they kept."""
    size, num_longer = divmod(job.model.vocab, job.plan.tp)
    rows = size + (tp_index < num_longer)
    return most_needed(OperatorNeeds(job, Share.of(job)).of_head(rows), head_kept(job))
