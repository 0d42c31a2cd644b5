"""The tensors that a layer keeps for its backward.

They are the tensors that this runtime keeps (model/decoder.py), derived operator by operator like those of Korthikanti
et al. 2022 (arXiv 2205.05198, section 4); docs/recompute.md compares the two. A test compares them with the tensors
that autograd saves, to the byte.

Letters: S tokens of a sequence on a rank, B microbatch size, T = S x B, H hidden, F inner width of the MLP, V
vocabulary, t tensor-parallel degree. Sizes are bytes on one rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwright.config.array_math import holds, most
from shardwright.config.job import JobSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.recompute_policy import LAYER, Policy
from shardwright.layers.layer_operators import ALWAYS_RECOMPUTED, mlp_operators
from shardwright.layers.layer_tensors import BLOCK, ENDS, MLP, LabelledTensor, LayerTensor
from shardwright.memory.attention_activations import attention_of
from shardwright.memory.cast_inputs import BOTH, cast_inputs, waiting_operands
from shardwright.memory.kept_chain import Chain, LayerPart, UnitTensors, activation_keeps, chain_bytes, kept_chain
from shardwright.memory.kept_tensors import IN_ENDS, IN_MLP, Bytes, InnerTensor, Rows, Share, TensorBytes, Tensors
from shardwright.memory.moe_activations import expected_rows, experts_of
from shardwright.memory.working_memory import BackwardNeed, OperatorNeeds, most_needed


@dataclass(frozen=True)
class Layer:
    """A layer on one rank, for one microbatch: the size of each tensor, and its two chains of operators.

    The last operator of a chain is the product whose output is added to the residual stream. Between the chains is the
    sum that makes the middle of the stream; in a parallel block the sum over tp comes after both. In a layer with
    experts the chain `mlp` has the experts, and `shared` the shared experts. If the layer does not end with a product,
    because it has experts or a norm of the MLP's result, its end is recomputed with the whole layer. `carried` is the
    tensor that the first chain passes to the end, and `needs` are the memory needs of the operators in the backward.
    If the layer `is_adapted`, its matrices are frozen beside adapters.
    """

    sizes: TensorBytes
    attention: Chain
    mlp: Chain
    shared: Chain = ()
    ends_with_product: bool = True
    carried: LayerTensor = BLOCK.middle
    needs: tuple[BackwardNeed, ...] = ()
    is_adapted: bool = False

    @property
    def chains(self) -> tuple[Chain, ...]:
        """Every chain of the layer."""
        return (self.attention, self.mlp, self.shared) if self.shared else (self.attention, self.mlp)

    def kept(self, policy: Policy) -> TensorBytes:
        """Bytes that are kept from the forward to the backward, by tensor."""
        if LAYER in policy:
            always = self.mlp[-1].always if self.ends_with_product else ()
            return {tensor: self.sizes[tensor] for tensor in (BLOCK.input, *always)}
        policy |= ALWAYS_RECOMPUTED
        return {tensor: self.sizes[tensor] for chain in self.chains for tensor in _kept_tensors(chain, policy)}

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
        sizes, later_kept = [0], set(self.kept(policy)) - set(_kept_tensors(self.attention, policy))
        for chain in self.chains:
            freed_bytes = sum(self.sizes[tensor] for tensor in later_kept) if chain is self.attention else 0
            recomputed = [run for run in _runs(chain, policy) if run[0].name in policy]
            sizes += [self._made_bytes(run, set(_inputs(run))) - freed_bytes for run in recomputed]
        return most(*sizes)

    def _made_bytes(self, region: Chain, inputs: set[LabelledTensor], *further: LayerTensor) -> Bytes:
        tensors = {*_kept_tensors(region, ALWAYS_RECOMPUTED), region[-1].gives, *further}
        return sum(self.sizes[tensor] for tensor in tensors - inputs)

    def working_bytes(self, policy: Policy) -> Bytes:
        """The most bytes that an operator needs in its backward besides the kept and the recomputed tensors of the
        layer, less the tensors that are free by then."""
        kept = self.kept(policy)
        if LAYER in policy:
            every_kept = (tensor for chain in self.chains for tensor in _kept_tensors(chain, ALWAYS_RECOMPUTED))
            kept |= {tensor: self.sizes[tensor] for tensor in every_kept}
        return most_needed(self._needs_of_region(kept) if LAYER in policy and self.is_adapted else self.needs, kept)

    def _needs_of_region(self, kept: TensorBytes) -> Iterator[BackwardNeed]:
        """The needs of a layer that is computed again before the down product: its result, and the gradient of that,
        stay until the backward of all of it ends. Where weights are trained, their gradients are far larger."""
        inner_bytes = kept.pop(MLP.inner, 0)
        for need in self.needs:
            yield replace(need, num_bytes=need.num_bytes + inner_bytes) if MLP.up in need.free else need

    def deferred_bytes(self) -> Bytes:
        """Bytes kept from I to W: inputs and output gradients of the products."""
        tensors = {tensor for chain in self.chains for part in chain for tensor in part.waits}
        return sum(self.sizes[tensor] for tensor in tensors)


def _kept_tensors(chain: Chain, policy: Policy) -> dict[LabelledTensor, None]:
    """The tensors that a chain keeps, in order (keys of a dict)."""
    tensors: dict[LabelledTensor, None] = {}
    follows_region = False
    for region in _runs(chain, policy):
        if region[0].name in policy:
            tensors |= dict.fromkeys(_inputs(region))
            follows_region = True
            continue
        for part in region:
            # The product after a region keeps the region's input instead of its own.
            tensors |= dict.fromkeys(part.always if follows_region else (*part.keeps, *part.always))
            follows_region = False
    return tensors


def _inputs(region: Chain) -> Tensors:
    """The tensors that a region takes from outside."""
    return (region[0].takes, *(tensor for part in region for tensor in part.beside))


def _runs(chain: Chain, policy: Policy) -> Iterator[Chain]:
    """Split a chain into runs of operators that are recomputed and runs that are not."""
    run: list[LayerPart] = []
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
        share = Share.of(job, rows or expected_rows(job))
        sizes, experts, shared = experts_of(job, share)
        needs = OperatorNeeds(job, share)
        all_needs = (
            *needs.of_experts(),
            *(needs.of_shared_experts() if shared else ()),
            *needs.of_attention(tuple(sizes), kind),
        )
        return Layer(attention_sizes | sizes, attention, experts, shared, ends_with_product=False, needs=all_needs)
    share = Share.of(job)
    shape, operators = share.tensors.shape, mlp_operators(share.tensors.shape)
    keeps: UnitTensors = {
        "norm": (operators[0].takes, IN_MLP.norm_statistics),
        "out norm": (BLOCK.mlp_out, IN_MLP.out_norm_statistics),
        "activation": activation_keeps(job, MLP, IN_MLP.biased_up),
    }
    cast, in_place = cast_inputs(job, share, operators, BOTH)
    in_float8 = job.precision.float8_weight_gradients
    chain = kept_chain(operators, keeps | in_place, waits_in_float8=in_float8, adapter=job.model.adapter)
    sizes = chain_bytes(share, chain, waiting_operands(job, share, operators) | cast)
    needs = OperatorNeeds(job, share)
    all_needs = (*needs.of_mlp(), *needs.of_attention(tuple(sizes.keys() - {BLOCK.input}), kind))
    carried: LayerTensor = BLOCK.middle if shape.parallel == "none" else MLP.product_out
    sizes |= attention_sizes | share.bytes_of((carried,))
    is_last = not shape.norms_after
    return Layer(
        sizes,
        attention,
        chain,
        ends_with_product=is_last,
        carried=carried,
        needs=all_needs,
        is_adapted=job.model.is_adapted,
    )


def documents_kept(job: JobSpec) -> TensorBytes:
    """Bytes of the tensors that every stage keeps of a microbatch if documents are separate: the document of each
    token, in a model with chunks also its chunk, and the factor of its query if queries grow with their position. The
    targets that count are marked in the tokens, and computed with the loss.

    Every stage counts as one with layers of all kinds of the model: few stages lack a kind."""
    model = job.model
    if not job.data.separate_documents:
        return {}
    tensors = [IN_ENDS.documents]
    if model.window.size and model.window.chunked:
        tensors += [IN_ENDS.chunks]
    if model.positions == "rotary" and model.temperature_tuning.scale:
        tensors += [IN_ENDS.temperatures]
    return Share.of(job).bytes_of(tensors)


def rows_kept(job: JobSpec, distance: int = 0) -> tuple[InnerTensor, ...]:
    """The tensors of token ids that a lookup keeps: none where the batch has them as they are. A module that predicts
    further tokens looks up those at a `distance`."""
    plan = job.plan
    is_cut, is_picked = holds(plan.tp > 1), holds(plan.cp > 1) and not plan.trades_heads
    has_rows = is_cut or is_picked or distance > 1 or job.data.separate_documents
    return (IN_ENDS.rows,) * has_rows + (IN_ENDS.rows_elsewhere,) * is_cut


def embedding_kept(job: JobSpec) -> TensorBytes:
    """Bytes of the tensors that the first stage keeps of one microbatch besides its layers. Token ids need no memory of
    their own, since the batch has them, unless a rank picks its part or removes the marks of documents."""
    tensors = [*rows_kept(job)]
    tensors += [IN_ENDS.positions] if job.model.positions == "learned" else []
    share = Share.of(job)
    normed = (ENDS.embedded, IN_ENDS.embedding_statistics) if job.model.embedding_norm else ()
    return share.bytes_of((*tensors, *normed))


def head_kept(job: JobSpec) -> TensorBytes:
    """Bytes of the tensors that the last stage keeps of one microbatch besides its layers: those of the final norm, of
    the head and of the loss, which computes logits only in the backward. The inputs of the norms of further tokens are
    kept before the blocks (memory/layer_memory.py), but for one."""
    masked = (IN_ENDS.uncounted,) if job.data.separate_documents else ()
    norm = ENDS.final_input, IN_ENDS.final_statistics, ENDS.final_norm_out
    return Share.of(job).bytes_of((*masked, *norm, IN_ENDS.targets, IN_ENDS.further_tokens))


def head_working_bytes(job: JobSpec, tp_index: int = 0) -> Bytes:
    """The most bytes that the loss, the head and its norm need in their backward besides their kept tensors."""
    size, num_longer = divmod(job.model.vocab, job.plan.tp)
    rows = size + (tp_index < num_longer)
    return most_needed(OperatorNeeds(job, Share.of(job)).of_head(rows), head_kept(job))
