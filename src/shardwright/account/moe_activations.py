"""What a layer with experts keeps in place of an MLP, operator by operator: model/router.py and moe_block.py.

How many rows arrive at a rank's experts is the gate's choice: on average as many as leave it, which is top_k for each
token. Given counts make it exact. What is kept of them is not divided by ep: tokens are traded, not removed.

Letters: T tokens of a rank (X where it sends all of its tp line), K choices of a token, E experts, R rows that leave
the rank, N rows that arrive, H hidden, F inner width of an expert on this rank. Sizes are bytes on one rank.
"""

from dataclasses import dataclass

from shardwright.account.kept_tensors import FLOAT32, INT64, Chain, KeptTensors, Share
from shardwright.config.job import JobSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.moe import MoeSpec


@dataclass(frozen=True)
class Rows:
    """Rows of one microbatch in one layer: that leave this rank, and that arrive at its experts; and the choices that
    the routing has room for, of each token."""

    sent: int
    arrived: int
    choices: int


def expected_rows(job: JobSpec) -> Rows:
    """On average, if no choice of a gate is taken back: a gate of GShard takes some, and capacity may."""
    moe, tokens = job.model.moe, _tokens_sent(job)
    sent = tokens * moe.num_chosen
    capacity = moe.capacity(job.model.sequence * job.plan.microbatch_size)
    if capacity is not None:
        share = tokens / (job.model.sequence * job.plan.microbatch_size)
        sent = min(sent, round(moe.experts * capacity * share))
    return Rows(sent, sent, moe.num_chosen)


def _tokens_sent(job: JobSpec) -> int:
    share = Share.of(job)
    return share.tokens if job.plan.expert_tp_size == job.plan.tp else share.tokens_here


def experts_of(job: JobSpec, rows: Rows | None = None) -> tuple[dict[str, int], Chain, Chain]:
    """Sizes of the tensors of any layer with experts, its operators, and those of its shared experts."""
    share, moe, model = Share.of(job), job.model.moe, job.model
    rows = rows or expected_rows(job)
    element, tokens, sent_tokens = share.element, share.tokens_here, _tokens_sent(job)
    inner = moe.ffn_size(model.ffn_size) // job.plan.expert_tp_size
    up_width = shape_of(model).gates * inner
    is_moved = job.plan.ep > 1 and moe.experts > job.plan.ep
    sizes = _router_sizes(moe, tokens, job.plan.microbatch_size, rows.choices) | {
        "weights": FLOAT32 * sent_tokens * rows.choices,
        "trip": INT64 * (2 * sent_tokens * rows.choices + (rows.arrived if is_moved else 0)),
        "dispatched": element * rows.arrived * share.hidden,
        "expert up": element * rows.arrived * up_width,
        "expert inner": element * rows.arrived * inner,
        "expert output": element * rows.arrived * share.hidden,
        "returned": element * (rows.sent + 1) * share.hidden,  # a last row of zeros is that of dropped choices
    }
    kept = _router_keeps(moe)
    chain = (
        # By names of their own: a policy's "norm" is not this one, whose result several operators need.
        KeptTensors("norm before experts", "middle", ("middle", "mlp statistics"), "mlp normal"),
        KeptTensors("router", "mlp normal", ("mlp normal", *kept), "weights", ("mlp normal", "logits")),
        KeptTensors("dispatch", "mlp normal", ("trip",), "dispatched"),
        KeptTensors("up", "dispatched", ("dispatched",), "expert up", ("dispatched", "expert up")),
        KeptTensors("activation", "expert up", ("expert up",), "expert inner"),
        KeptTensors("down", "expert inner", ("expert inner",), "expert output", ("expert inner", "expert output")),
        KeptTensors("combine", "expert output", ("returned", "weights"), "output"),
    )
    shared_sizes, shared = _shared(job, share)
    return sizes | shared_sizes, chain, shared


def _router_sizes(moe: MoeSpec, tokens: int, batch: int, choices: int) -> dict[str, int]:
    return {
        "logits": FLOAT32 * tokens * moe.experts,
        "scores": FLOAT32 * tokens * moe.experts,
        "sum of scores": FLOAT32 * tokens,
        "log-sum-exp of logits": FLOAT32 * tokens,
        "choices": INT64 * tokens * choices,
        "plain weights": FLOAT32 * tokens * choices,
        "sum of weights": FLOAT32 * tokens,
        "shares": FLOAT32 * moe.experts * (batch if moe.aux_scope == "sequence" else 1),
    }


def _router_keeps(moe: MoeSpec) -> tuple[str, ...]:
    """Tensors that the gate and the losses keep, besides what goes into the product."""
    has_balance = moe.aux_loss != "none"
    if moe.softmax_over == "chosen":
        names = ["choices", "plain weights"] + (["scores"] if has_balance else [])
    else:
        adds_to_one = moe.gate == "gshard" or (moe.normalise and moe.gate in ("softmax", "sigmoid", "correlation"))
        names = ["scores", "choices"] + (["plain weights", "sum of weights"] if adds_to_one else [])
    if has_balance:
        names += ["shares"] + (["sum of scores"] if moe.gate == "sigmoid" else [])
    return tuple(names + (["logits", "log-sum-exp of logits"] if moe.z_coefficient else []))


def _shared(job: JobSpec, share: Share) -> tuple[dict[str, int], Chain]:
    """The shared experts, an MLP whose input is the router's too."""
    model, moe, element = job.model, job.model.moe, share.element
    inner = moe.shared_size(model.ffn_size) // share.tp
    if not inner:
        return {}, ()
    up_width = shape_of(model).gates * inner
    sizes = {
        "shared up": element * share.tokens * up_width,
        "biased shared up": element * share.tokens * up_width,
        "shared inner": element * share.tokens * inner,
        "shared output": share.stream,
        "shared gate": (element + (FLOAT32 if element != FLOAT32 else 0)) * share.tokens_here,
        "shared gate logits": FLOAT32 * share.tokens_here,
    }
    chain = [
        KeptTensors("up", "mlp normal", ("mlp normal",), "shared up", ("whole mlp normal", "shared up")),
        KeptTensors("activation", "shared up", ("biased shared up" if model.bias else "shared up",), "shared inner"),
        KeptTensors("down", "shared inner", ("shared inner",), "shared output", ("shared inner", "whole output")),
    ]
    if moe.shared_gate:
        chain.append(
            KeptTensors(
                "gate", "shared output", ("mlp normal", "shared output", "shared gate"), "output",
                ("mlp normal", "shared gate logits"),
            )
        )  # fmt: skip
    return sizes, tuple(chain)
