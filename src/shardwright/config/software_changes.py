"""Changes of software beside its description, as rows of measured runs and files of other systems name them.

A change is the name of another attention kernel or dispatcher of tokens; CUDA graphs of the step (graphs-step) or of
parts of layers (graphs-parts); experts that are computed one after the other (experts-in-turn); an update in host
memory by all cores that a process has (host-cores), and copies of pinned memory (host-pinned); dropout, whose masks are
kept (dropout); a loss of single operators (plain-loss), of those that torch.compile fuses (compiled-loss) or by parts
of the tokens (loss-by-parts); a gate of single operators (plain-gate); parameters that are gathered in fp8
(float8-gather); products alone in 16 bits (autocast); inputs of recomputed layers that are split over tp ranks
(split-inputs); gradients that are scattered once a step (whole-gradients); experts that ZeRO leaves whole
(whole-experts); more overlap or less (overlap-tp, no-overlap-tp; of dp, pp and a2a, too).
"""

from collections.abc import Mapping
from typing import Any

from shardwright.config.attention_kernels import ATTENTION_KERNELS
from shardwright.config.catalog import did_you_mean
from shardwright.config.elementwise_kernels import in_autocast
from shardwright.config.phrase import say
from shardwright.config.token_dispatchers import TOKEN_DISPATCHERS

# The fields that say whether the communication of an axis is overlapped; a2a is of experts.
OVERLAPS = {
    "tp": ("tensor_overlap",),
    "dp": ("reduce_overlap", "gather_overlap"),
    "pp": ("message_overlap",),
    "a2a": ("expert_overlap",),
}
OVERLAP_WORDS = (*OVERLAPS, *(f"no-{axis}" for axis in OVERLAPS))
# A graph of a whole step asks its host nothing, so experts are one fused operator, which adds their biases and limits
# the inputs of their activation, too (Megatron-LM, TEGroupedMLP: _apply_bias is never in a graph;
# use_transformer_engine_op_fuser of the recipes).
_OF_EXPERTS = ("expert_bias", "expert_limits", "expert_kernels", "float8_expert_kernels", "expert_bias_kernels")
_IN_ONE_GRAPH = {"graphs_step": True, **dict.fromkeys(_OF_EXPERTS, (0.0, 0.0))}
# SequentialMLP of Megatron-LM (April 2024), with 2 bytes an element. Forward: results are zeros, into which each
# expert's are copied. Backward, for each expert: a copy of all gradients of results, zeros for all gradients of inputs
# and their sum with those of the experts before; beside it, copies of the slices.
_IN_TURN = {"expert_slices": (6.0, 4.0), "one_expert_slices": (0.0, 12.0)}
# Megatron Core without Transformer Engine's loss (VocabParallelCrossEntropy at d98e8a6). Memory by logit: 16 bits and
# float32, in which maximum, difference, exponentials and quotient follow in place; in the backward float32 and the
# gradient in 16 bits.
_PLAIN_LOSS = {"logit_peak": 6.0, "loss": "vocab-parallel"}
# The head and its loss by some tokens after others, whose logits are computed again in the backward (TRL at f2cd5771,
# _chunked_cross_entropy_loss: 256 tokens at a time). By logit of all tokens, where these are 25,000 or more: the 10
# bytes of transformers' loss for a hundredth of them.
_LOSS_BY_PARTS = {"logit_peak": 0.1}
# Megatron Core's default fusion, cross_entropy_fusion_impl = native (fused_vocab_parallel_cross_entropy at
# core_v0.14.0), whose four functions torch.compile fuses: softmax, its copy and the gradient at once.
_COMPILED_LOSS = {"logit_peak": 10.0, "loss": "vocab-parallel-compiled"}
# Without bias_activation_fusion (MLP.forward of Megatron Core at core_v0.14.0, glu): the product keeps what silu gives.
_PLAIN_GATE = {"activation": "torch-joined", "activation_kept": 2.0}
_SINGLE_CHANGES: dict[str, Mapping[str, object]] = {
    "graphs-step": _IN_ONE_GRAPH,
    "graphs-parts": {"graphs_parts": True},
    "experts-in-turn": _IN_TURN,
    "plain-loss": _PLAIN_LOSS,
    "compiled-loss": _COMPILED_LOSS,
    "plain-gate": _PLAIN_GATE,
    "loss-by-parts": _LOSS_BY_PARTS,
    "dropout": {"dropout": True},
    "float8-gather": {"float8_gather": True},
    "split-inputs": {"splits_inputs": True},
}
# As the launcher set OMP_NUM_THREADS, or left it, and as a configuration has pin_memory.
HOST_CHANGES = {"host-cores": {"one_thread": False}, "host-pinned": {"pinned": True}}


# FullyShardedDataParallel without a MixedPrecision, under torch.autocast, gathers and scatters float32.
_IN_AUTOCAST = {"gathers_wide": True, "scattered_bytes": 4}
# FullyShardedDataParallel.no_sync and FSDPModule.set_requires_gradient_sync, for all microbatches but the last.
# fully_shard with experts among its ignored_params.
_ZERO_CHANGES = {"whole-gradients": {"whole_gradients": True}, "whole-experts": {"whole_experts": True}}


def changed_fields(change: str, fields: Mapping[str, Any]) -> dict[str, object]:
    """The fields of a description of software that a change says, from all `fields` before it. KeyError if there is no
    such change."""
    host, zero = fields["host"], fields["zero"]
    for prefix, is_hidden in (("overlap-", True), ("no-overlap-", False)):
        if change.startswith(prefix) and (axis := change.removeprefix(prefix)) in OVERLAPS:
            return dict.fromkeys(OVERLAPS[axis], is_hidden)
    if change in _SINGLE_CHANGES:
        return dict(_SINGLE_CHANGES[change])
    if change == "autocast":
        kernels = {name: in_autocast(fields[name], name) for name in ("norm", "residual", "rotary", "loss")}
        return {"autocast": True, "masters": False, "zero": zero.model_copy(update=_IN_AUTOCAST), **kernels}
    if change in _ZERO_CHANGES:
        return {"zero": zero.model_copy(update=_ZERO_CHANGES[change])}
    if change in HOST_CHANGES:
        return {"host": host.model_copy(update=HOST_CHANGES[change])}
    if change in TOKEN_DISPATCHERS:
        facts = TOKEN_DISPATCHERS[change]
        apart = {} if facts.permutes else {"dispatch": facts.dispatch, "combine": facts.combine}
        return {
            **dict.fromkeys(("expert_dedupe", "rank_dedupe"), facts.sends_once),
            "expert_pipelined": facts.is_pipelined,
            "expert_gather": facts.gathers,
            "float32_weights": facts.float32_weights,
            **apart,
        }
    if change not in ATTENTION_KERNELS:
        others = (
            *_SINGLE_CHANGES,
            "autocast",
            *_ZERO_CHANGES,
            *HOST_CHANGES,
            *(f"overlap-{axis}" for axis in OVERLAPS),
        )
        known = [*ATTENTION_KERNELS, *TOKEN_DISPATCHERS, *others]
        raise KeyError(
            say("no change of software is called {name}; {hint}", name=repr(change), hint=did_you_mean(change, known))
        )
    return {"attention": change, "causal": not ATTENTION_KERNELS[change].computes_masked, "softmax": None}
