"""The tensors that a layer with experts keeps in place of an MLP, operator by operator: model/router.py and
moe_block.py.

The number of rows that arrive at a rank's experts depends on the gate: on average it equals the number sent, top_k for
each token. Given counts make it exact. The kept rows are not divided by ep: tokens are exchanged, not removed.

Letters: T tokens of a rank (X if it sends all of its tp line), K choices of a token, E experts, R rows that leave the
rank, N rows that arrive, H hidden, F inner width of an expert on this rank. Sizes are bytes on one rank.
"""

from shardwright.config.job import JobSpec
from shardwright.config.moe import MoeSpec
from shardwright.layers.layer_operators import routed_operators, shared_operators
from shardwright.layers.layer_tensors import BLOCK, EXPERT_MLP, ROUTING, SHARED_MLP, LabelledTensor
from shardwright.memory.cast_inputs import BOTH, LAST, cast_inputs, waiting_operands
from shardwright.memory.kept_chain import Chain, UnitTensors, activation_keeps, chain_bytes, kept_chain
from shardwright.memory.kept_tensors import IN_MLP, IN_ROUTING, Rows, Share, TensorBytes, Tensors


def expected_rows(job: JobSpec) -> Rows:
    """The average rows, if no choice is dropped: a gate of GShard drops some, and capacity may."""
    moe, tokens = job.model.moe, Share.of(job).tokens_sent
    sent = tokens * moe.num_chosen
    capacity = moe.capacity(job.model.sequence * job.plan.microbatch_size)
    if capacity is not None:
        share = tokens / (job.model.sequence * job.plan.microbatch_size)
        sent = min(sent, round(moe.experts * capacity * share))
    return Rows(sent, sent, moe.num_chosen)


def experts_of(job: JobSpec, share: Share) -> tuple[TensorBytes, Chain, Chain]:
    """(bytes of the tensors of a layer with experts, its operators, the operators of its shared experts)."""
    moe, in_float8 = job.model.moe, job.precision.float8_weight_gradients
    routed, shared = routed_operators(share.tensors.shape), shared_operators(share.tensors.shape)
    takes = BLOCK.mlp_norm_out if share.tensors.shape.norms_before else BLOCK.middle
    adapter = job.model.adapter
    trained_takes = () if job.model.is_adapted else (takes,)
    keeps: UnitTensors = {
        "norm before experts": (BLOCK.middle, IN_MLP.norm_statistics),
        "router": (*trained_takes, *_router_keeps(moe)),
        "dispatch": (IN_ROUTING.trip,),
        "combine": (),
        "gate": (*trained_takes, ROUTING.shared_out, IN_ROUTING.shared_gate),
        "out norm": (BLOCK.mlp_out, IN_MLP.out_norm_statistics),
    }
    # Weights multiply the experts' activation (model/weighed_activation.py) or input; the one that is weighed keeps
    # them.
    is_early = moe.weigh == "input"
    weighed: UnitTensors = {"weigh" if is_early else "activation": (IN_ROUTING.arrived_weights,)}
    alone: UnitTensors = {"activation": activation_keeps(job, EXPERT_MLP)} if is_early else {}
    groups = moe.experts // job.plan.ep
    cast, in_place = cast_inputs(job, share, routed, LAST if is_early else BOTH, num_groups=groups)
    operands = waiting_operands(job, share, (*routed, *shared), num_groups=groups) | cast
    chain = kept_chain(routed, keeps | alone | in_place, weighed, waits_in_float8=in_float8, adapter=adapter)
    if not shared:
        return chain_bytes(share, chain, operands), chain, ()
    cast, in_place = cast_inputs(job, share, shared, LAST)  # the router keeps the input of the first product
    keeps["activation"] = activation_keeps(job, SHARED_MLP, IN_MLP.biased_shared_up)
    shared_chain = kept_chain(shared, keeps | in_place, waits_in_float8=in_float8, adapter=adapter)
    return chain_bytes(share, (*chain, *shared_chain), operands | cast), chain, shared_chain


def _router_keeps(moe: MoeSpec) -> Tensors:
    """The tensors that the gate and the losses keep, without the input of the router's product."""
    has_balance = moe.aux_loss != "none"
    tensors: list[LabelledTensor]
    if moe.softmax_over == "chosen":
        tensors = [ROUTING.logits, IN_ROUTING.choices, IN_ROUTING.plain_weights]
        tensors += [IN_ROUTING.scores] if has_balance else []
    else:
        adds_to_one = moe.gate_facts.adds_to_one == "always" or (
            moe.gate_facts.adds_to_one == "as asked" and moe.normalise
        )
        tensors = [IN_ROUTING.scores, IN_ROUTING.choices]
        tensors += [IN_ROUTING.plain_weights, IN_ROUTING.sum_of_weights] if adds_to_one else []
    if has_balance:
        # Under global scope shares come from the step before, and the pass keeps none.
        tensors += [IN_ROUTING.expert_shares] if moe.aux_scope != "global" else []
        tensors += [] if moe.gate_facts.scores_add_up else [IN_ROUTING.sum_of_scores]
    return (*tensors, *((ROUTING.logits, IN_ROUTING.logits_log_sum_exp) if moe.z_coefficient else ()))
