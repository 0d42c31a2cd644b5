"""The registry of kernels of elementwise operators: norms, sums, activations, rotary positions and the loss.

Generations of software differ in whose kernels they have: torch's single operators, one kernel for each operator, or
what a compiler makes of them. Traffic is the bytes that these read and write, (forward, backward), by element of the
operator's tensor, with 2 bytes an element between products. It is counted from kernels, not fitted.
"""

from dataclasses import dataclass
from typing import Annotated, TypeVar

from shardwright.config.registry import NameOf, Registry

Facts = TypeVar("Facts")
Traffic = tuple[float, float]  # bytes by element: in the forward, in the backward


@dataclass(frozen=True, kw_only=True)
class NormTraffic:
    """Traffic of an RMSNorm and of a LayerNorm, by element of the residual stream, and of norms of heads, by element of
    queries and keys."""

    rms: Traffic
    layer: Traffic
    heads: Traffic


@dataclass(frozen=True, kw_only=True)
class ActivationTraffic:
    """Traffic of an MLP's activation with a gate and without, by element that leaves it; that element is counted
    apart."""

    gated: Traffic
    plain: Traffic


@dataclass(frozen=True, kw_only=True)
class RotaryTraffic:
    """Traffic before attention, by element of query, key and value: of elements that are turned, of those that are not
    (values, and parts of latent attention's heads without position), and of all where positions are learned; and of all
    what is more where a microbatch has several sequences."""

    turned: Traffic
    copied: Traffic
    learned: Traffic
    batched: Traffic = (0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class ElementwiseKernels:
    """The facts of kernels by one hand; None of operators that it has no kernels for.

    `place` orders lists. `residual` is the sum with the residual stream, with bias and dropout, and in the backward the
    sum of gradients of all that reads the stream, by its elements; `loss` is the cross entropy, by logit. With
    `drops_apart` dropout is a kernel of its own in the forward, before that sum. Kernels called `autocast` take their
    place under torch.autocast, where norms, the residual stream and the loss are in float32. Of kernels that are
    `is_counted` a test holds the numbers against the operators themselves.
    """

    name: str
    place: int
    norm: NormTraffic | None = None
    residual: Traffic | None = None
    drops_apart: bool = False
    autocast: str = ""
    is_counted: bool = False
    activation: ActivationTraffic | None = None
    rotary: RotaryTraffic | None = None
    loss: Traffic | None = None


FACTS = (
    # Single operators of torch, as huggingface/transformers has them (modeling_llama).
    ElementwiseKernels(
        name="torch",
        place=10,
        is_counted=True,
        autocast="torch-autocast",
        # LlamaRMSNorm.forward: to float32 6, pow 8, mean 4, times rsqrt 8, to 16 bits 6, times weight 4. Backward: by
        # the weight 4, for the weight 8, cast 6, by rsqrt 8, for rsqrt 16, of the mean 4, of pow (torch's pow_backward:
        # a power, a product, a product) 28, sum of two gradients 12, cast 6. torch's LayerNorm is one kernel forward,
        # two backward.
        norm=NormTraffic(rms=(36.0, 92.0), layer=(4.0, 10.0), heads=(36.0, 92.0)),
        # LlamaDecoderLayer.forward: a sum of 16 bits. Backward: for each half of a layer autograd adds the gradients of
        # the residual stream up, those of query, key and value (two sums) and of gate and up (one): five sums of 6
        # bytes a layer.
        residual=(6.0, 15.0),
        drops_apart=True,
        # LlamaMLP.forward: silu 4, product 6; backward: two products 12, silu 6. Without a gate torch's gelu.
        activation=ActivationTraffic(gated=(8.0, 16.0), plain=(2.0, 4.0)),
        # apply_rotary_pos_emb and rotate_half. Forward: times cos 4, half negated 2, cat 4, times sin 4, sum 6.
        # Backward: times sin 4, half negated 2, slices of which each is written into zeros 8, their sum 6, times cos 4,
        # sum 6. Values are views.
        rotary=RotaryTraffic(turned=(20.0, 30.0), copied=(0.0, 0.0), learned=(0.0, 0.0)),
        # ForCausalLMLoss of loss_utils since 4.51: to float32 6, log_softmax 8; backward: of nll 4, of
        # log_softmax 12, to 16 bits 6.
        loss=(14.0, 22.0),
    ),
    # The same before transformers 4.51 (LlamaForCausalLM.forward): to float32 6, shifted copy 8, log_softmax 8.
    # Backward: of nll 4, of log_softmax 12, of the shifted copy (zeros, and a copy) 12, to 16 bits 6.
    ElementwiseKernels(name="torch-shifted", place=11, loss=(22.0, 34.0)),
    # torch.nn.CrossEntropyLoss of logits in 16 bits: log_softmax 4; backward: of nll 2, of log_softmax 6.
    ElementwiseKernels(name="torch-half", place=12, is_counted=True, autocast="torch", loss=(4.0, 8.0)),
    # Single operators where query, key and value are one product, and gate and up: query, key and value are copied for
    # attention, which is 4 more each way, and the gradients of what a product gave are put together: of three 4, of two
    # halves 8 by element of one. Each half of a layer has one sum of the residual stream's gradients.
    ElementwiseKernels(
        name="torch-joined",
        place=13,
        is_counted=True,
        autocast="torch-joined-autocast",
        residual=(6.0, 6.0),
        drops_apart=True,
        activation=ActivationTraffic(gated=(8.0, 24.0), plain=(2.0, 4.0)),
        rotary=RotaryTraffic(turned=(24.0, 38.0), copied=(4.0, 8.0), learned=(4.0, 8.0)),
    ),
    # The same under torch.autocast. A norm reads and gives float32 without a cast. The sum with the residual stream
    # reads a result of 16 bits and float32 (10); inputs of products are cast (6 each, of five products a layer), and in
    # the backward their gradients (6 each) and the residual stream's for either half (6), and sums are in float32 (12
    # each). Tables of rotary positions are in float32, and so is what they turn, until attention casts it.
    ElementwiseKernels(
        name="torch-autocast",
        place=17,
        is_counted=True,
        norm=NormTraffic(rms=(28.0, 92.0), layer=(8.0, 20.0), heads=(36.0, 92.0)),
        residual=(25.0, 51.0),
        drops_apart=True,
        rotary=RotaryTraffic(turned=(36.0, 54.0), copied=(0.0, 0.0), learned=(0.0, 0.0)),
        loss=(14.0, 22.0),
    ),
    # Of one product in each half of a layer, whose thirds attention takes as views; the gradients of three are joined.
    ElementwiseKernels(
        name="torch-joined-autocast",
        place=18,
        is_counted=True,
        residual=(16.0, 24.0),
        drops_apart=True,
        rotary=RotaryTraffic(turned=(36.0, 58.0), copied=(0.0, 4.0), learned=(0.0, 4.0)),
    ),
    # Aleph-Alpha/scaling at 737f855, where query, key and value are one product, gate and up are two: three sums of the
    # residual stream's gradients a layer, and gradients of three are put together. Sequences are the second dim: where
    # there are several, query, key and value are copied, 4 each way, and what attention gives is brought into the order
    # of heads, and back (core/nn/attention, flash_attention and forward), 8 each way, by element of a third.
    ElementwiseKernels(
        name="torch-rearranged",
        place=14,
        residual=(6.0, 9.0),
        drops_apart=True,
        rotary=RotaryTraffic(turned=(20.0, 34.0), copied=(0.0, 4.0), learned=(0.0, 4.0), batched=(6.7, 6.7)),
    ),
    # Megatron-LM's loss over a vocabulary that tp ranks share, in single operators (VocabParallelCrossEntropy at
    # d98e8a6). Forward: to float32 6, maximum 4, difference 8, exponentials 8, sum 4, quotient 8. Backward: times the
    # gradient of the loss 8, to 16 bits 6.
    ElementwiseKernels(name="vocab-parallel", place=15, loss=(38.0, 14.0)),
    # The same, of which torch.compile fuses each function (Megatron Core's fused_vocab_parallel_cross_entropy at
    # core_v0.14.0), as Inductor of torch 2.13 does. Forward: to float32 with the maximum 6, exponentials over it with
    # their sum 8, quotient 8. Backward: a copy of the softmax, in which targets count, 8, and its product, over the
    # softmax and in 16 bits, 10.
    ElementwiseKernels(name="vocab-parallel-compiled", place=16, loss=(22.0, 18.0)),
    # One kernel for each operator and pass, written by hand or by torch's JIT: Megatron-LM's fusions, apex,
    # Transformer Engine, FlashAttention's layers, Liger. Each reads its inputs and writes its result once.
    ElementwiseKernels(
        name="fused",
        place=20,
        autocast="fused-autocast",
        # Backward: input and gradient are read, a gradient is written.
        norm=NormTraffic(rms=(4.0, 6.0), layer=(4.0, 6.0), heads=(4.0, 6.0)),
        # Backward: autograd adds the gradients of both that read the stream up.
        residual=(6.0, 6.0),
        # Forward: gate and up 4. Backward: both and the gradient 6, gradients of both 4, without the element that left.
        activation=ActivationTraffic(gated=(4.0, 8.0), plain=(2.0, 4.0)),
        rotary=RotaryTraffic(turned=(4.0, 4.0), copied=(4.0, 4.0), learned=(4.0, 4.0)),
        loss=(12.0, 8.0),
    ),
    # One kernel for each norm in float32, with torch's sums and casts around it, as torch.autocast has them.
    ElementwiseKernels(
        name="fused-autocast",
        place=21,
        is_counted=True,
        norm=NormTraffic(rms=(8.0, 12.0), layer=(8.0, 12.0), heads=(4.0, 6.0)),
        residual=(16.0, 24.0),
    ),
    # apex's LayerNorm, which Megatron-LM had until August 2021 (csrc/layer_norm_cuda_kernel.cu): in the backward one
    # kernel reads input and gradient for gradients of weights, another for that of the input.
    ElementwiseKernels(name="apex", place=22, norm=NormTraffic(rms=(4.0, 10.0), layer=(4.0, 10.0), heads=(4.0, 10.0))),
    # A loss that makes its gradient in the forward: logits are read twice and written over once. Liger's, in one with
    # the head (fused_linear_cross_entropy), and Transformer Engine's.
    ElementwiseKernels(name="gradient-in-forward", place=25, loss=(6.0, 0.0)),
    # torch.compile: Inductor makes each chain of elementwise operators one kernel, also with those around it. The loss
    # with the head in one graph: logits in 16 bits are read for their maximum and their sum, and again for their
    # gradient, which is in 16 bits.
    ElementwiseKernels(
        name="compiled",
        place=30,
        autocast="compiled-autocast",
        norm=NormTraffic(rms=(4.0, 6.0), layer=(4.0, 6.0), heads=(4.0, 6.0)),
        residual=(4.0, 4.0),
        activation=ActivationTraffic(gated=(4.0, 8.0), plain=(2.0, 4.0)),
        rotary=RotaryTraffic(turned=(4.0, 4.0), copied=(4.0, 4.0), learned=(0.0, 4.0)),
        loss=(8.0, 4.0),
    ),
    # The same loss in a model that returns its logits: zeros of their gradient are written, and added to it.
    ElementwiseKernels(name="compiled-returned", place=32, loss=(8.0, 8.0)),
    # The same under torch.autocast: casts are part of these kernels, whose residual stream is in float32.
    ElementwiseKernels(
        name="compiled-autocast",
        place=31,
        norm=NormTraffic(rms=(6.0, 10.0), layer=(6.0, 10.0), heads=(4.0, 6.0)),
        residual=(6.0, 8.0),
    ),
    # This runtime's, counted operator by operator in a step without values (tests/measure/test_kernel_traffic.py):
    # norms are one kernel (model/norm.py), and so are gated activations, turns and each pass over logits
    # (precision/fused_operator.py; activation.py, rotary.py, fused_softmax.py).
    ElementwiseKernels(
        name="shardwright",
        place=40,
        is_counted=True,
        norm=NormTraffic(rms=(4.0, 6.0), layer=(4.0, 6.0), heads=(4.1, 11.5)),
        residual=(6.0, 6.0),
        activation=ActivationTraffic(gated=(4.0, 8.0), plain=(2.0, 4.0)),
        rotary=RotaryTraffic(turned=(4.1, 4.3), copied=(4.0, 4.0), learned=(0.0, 4.0)),
        loss=(0.0, 14.1),
    ),
)

ELEMENTWISE_KERNELS: Registry[ElementwiseKernels] = Registry(
    "a set of elementwise kernels", __name__, ElementwiseKernels
)
NormKernels = Annotated[str, NameOf(ELEMENTWISE_KERNELS, where=lambda kernels: kernels.norm is not None)]
ResidualKernels = Annotated[str, NameOf(ELEMENTWISE_KERNELS, where=lambda kernels: kernels.residual is not None)]
ActivationKernels = Annotated[str, NameOf(ELEMENTWISE_KERNELS, where=lambda kernels: kernels.activation is not None)]
RotaryKernels = Annotated[str, NameOf(ELEMENTWISE_KERNELS, where=lambda kernels: kernels.rotary is not None)]
LossKernels = Annotated[str, NameOf(ELEMENTWISE_KERNELS, where=lambda kernels: kernels.loss is not None)]


def norm_traffic(kernels: str) -> NormTraffic:
    """Traffic of norms with the kernels of a name, which has some."""
    return _there(ELEMENTWISE_KERNELS[kernels].norm)


def residual_traffic(kernels: str) -> Traffic:
    """Traffic of a sum with the residual stream, by element of it."""
    return _there(ELEMENTWISE_KERNELS[kernels].residual)


def drops_apart(kernels: str) -> bool:
    """True where dropout is a kernel of its own before the sum with the residual stream."""
    return ELEMENTWISE_KERNELS[kernels].drops_apart


def activation_traffic(kernels: str) -> ActivationTraffic:
    """Traffic of the activation of an MLP."""
    return _there(ELEMENTWISE_KERNELS[kernels].activation)


def rotary_traffic(kernels: str) -> RotaryTraffic:
    """Traffic that makes query, key and value ready for attention."""
    return _there(ELEMENTWISE_KERNELS[kernels].rotary)


def loss_traffic(kernels: str) -> Traffic:
    """Traffic of the cross entropy, by logit."""
    return _there(ELEMENTWISE_KERNELS[kernels].loss)


def in_autocast(kernels: str, operator: str) -> str:
    """The name of the kernels of an operator (norm, residual, rotary, loss) that take the place of others under
    torch.autocast, which may be themselves."""
    autocast = ELEMENTWISE_KERNELS[kernels].autocast
    return autocast if autocast and getattr(ELEMENTWISE_KERNELS[autocast], operator) is not None else kernels


def _there(facts: Facts | None) -> Facts:
    """Facts that the kernels have: a field of software names no others."""
    assert facts is not None
    return facts
