"""The tensors that a layer with experts keeps in place of an MLP, operator by operator: model/router.py and
moe_block.py.

The number of rows that arrive at a rank's experts depends on the gate: on average it equals the number sent, top_k for
each token. Given counts make it exact. The kept rows are not divided by ep: tokens are exchanged, not removed.

Letters: T tokens of a rank (X if it sends all of its tp line), K choices of a token, E experts, R rows that leave the
rank, N rows that arrive, H hidden, F inner width of an expert on this rank. Sizes are bytes on one rank.
"""

from dataclasses import dataclass

from shardwright.config.array_math import holds
from shardwright.config.job import JobSpec
from shardwright.config.moe import MoeSpec
from shardwright.layers.layer_operators import routed_operators, shared_operators
from shardwright.memory.cast_inputs import BOTH, LAST, cast_inputs, waiting_operands
from shardwright.memory.kept_tensors import FLOAT32, INT64, Bytes, Chain, Share, activation_keeps, kept_chain


@dataclass(frozen=True)
class Rows:
    """Rows of one microbatch in one layer: `sent` from this rank, and `arrived` at its experts; and the number of
    `choices` of each token that the routing has room for."""

    sent: Bytes
    arrived: Bytes
    choices: int


def expected_rows(job: JobSpec) -> Rows:
    """The average rows, if no choice is dropped: a gate of GShard drops some, and capacity may."""
    moe, tokens = job.model.moe, tokens_sent(job, Share.of(job))
    sent = tokens * moe.num_chosen
    capacity = moe.capacity(job.model.sequence * job.plan.microbatch_size)
    if capacity is not None:
        share = tokens / (job.model.sequence * job.plan.microbatch_size)
        sent = min(sent, round(moe.experts * capacity * share))
    return Rows(sent, sent, moe.num_chosen)


def tokens_sent(job: JobSpec, share: Share) -> Bytes:
    """The number of tokens of a microbatch that a rank sends to experts: its own, or those of its tp line."""
    is_whole = holds(job.plan.expert_tp_size == job.plan.tp)
    return share.tensors.tokens if is_whole else share.tensors.tokens_here


def experts_of(job: JobSpec, rows: Rows | None = None) -> tuple[dict[str, Bytes], Chain, Chain]:
    """(sizes of the tensors of a layer with experts, its operators, the operators of its shared experts)."""
    rows, moe, plan = rows or expected_rows(job), job.model.moe, job.plan
    share = Share.of(job, rows.sent, rows.arrived)
    routed, shared = routed_operators(share.tensors.shape), shared_operators(share.tensors.shape)
    tokens, choices = share.tensors.tokens_here, tokens_sent(job, share) * rows.choices
    is_moved = (plan.ep > 1) & (moe.experts > plan.ep)
    sizes = share.sizes((*routed, *shared)) | _router_sizes(moe, share, plan.microbatch_size, rows.choices)
    sizes |= {
        **dict.fromkeys(("mlp statistics", "mlp out statistics"), share.statistics(tokens)),
        "mlp result": share["mlp output"],
        "arrived weights": FLOAT32 * rows.arrived,
        "trip": INT64 * (2 * choices + rows.arrived * is_moved),
    }
    if shared:
        sizes |= {
            "biased shared up": share["shared up"],
            "shared gate": (share.element + (FLOAT32 if share.element != FLOAT32 else 0)) * tokens,
            "shared gate logits": FLOAT32 * tokens,
        }
    takes = "mlp normal" if share.tensors.shape.norms_before else "middle"
    keeps = {
        "norm before experts": ("middle", "mlp statistics"),
        "router": (takes, *_router_keeps(moe)),
        "dispatch": ("trip",),
        "combine": (),
        "gate": (takes, "shared output", "shared gate"),
        "out norm": ("mlp result", "mlp out statistics"),
    }
    # Weights multiply the experts' activation (model/weighed_activation.py) or input; the one that is weighed keeps
    # them.
    is_early = moe.weigh == "input"
    weighed = {"weigh" if is_early else "activation": ("arrived weights",)}
    alone = {"activation": activation_keeps(job, "expert ")} if is_early else {}
    groups, in_float8 = moe.experts // plan.ep, job.precision.float8_weight_gradients
    cast, in_place = cast_inputs(job, share, routed, LAST if is_early else BOTH, num_groups=groups)
    sizes |= waiting_operands(job, share, (*routed, *shared), num_groups=groups) | cast
    chain = kept_chain(routed, keeps | alone | in_place, weighed, waits_in_float8=in_float8)
    if not shared:
        return sizes, chain, ()
    cast, in_place = cast_inputs(job, share, shared, LAST)  # the router keeps the input of the first product
    keeps["activation"] = activation_keeps(job, "shared ")
    return sizes | cast, chain, kept_chain(shared, keeps | in_place, waits_in_float8=in_float8)


def _router_sizes(moe: MoeSpec, share: Share, batch: Bytes, choices: int) -> dict[str, Bytes]:
    tokens, logits = share.tensors.tokens_here, FLOAT32 * share.tensors["logits"]
    return {
        "logits": logits,
        "scores": logits,
        "sum of scores": FLOAT32 * tokens,
        "log-sum-exp of logits": FLOAT32 * tokens,
        "choices": INT64 * tokens * choices,
        "plain weights": FLOAT32 * tokens * choices,
        "sum of weights": FLOAT32 * tokens,
        "shares": FLOAT32 * moe.experts * (batch if moe.aux_scope == "sequence" else 1),
    }


def _router_keeps(moe: MoeSpec) -> tuple[str, ...]:
    """The tensors that the gate and the losses keep, without the input of the router's product."""
    has_balance = moe.aux_loss != "none"
    if moe.softmax_over == "chosen":
        names = ["logits", "choices", "plain weights"] + (["scores"] if has_balance else [])
    else:
        adds_to_one = moe.gate_facts.adds_to_one == "always" or (
            moe.gate_facts.adds_to_one == "as asked" and moe.normalise
        )
        names = ["scores", "choices"] + (["plain weights", "sum of weights"] if adds_to_one else [])
    if has_balance:
        # Under global scope shares come from the step before, and the pass keeps none.
        names += ["shares"] if moe.aux_scope != "global" else []
        names += [] if moe.gate_facts.scores_add_up else ["sum of scores"]
    return tuple(names + (["logits", "log-sum-exp of logits"] if moe.z_coefficient else []))
