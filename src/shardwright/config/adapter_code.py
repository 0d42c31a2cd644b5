"""The registry of code for adapters (LoRA), by its maker: what it moves, keeps and launches beside the products."""

from dataclasses import dataclass
from typing import Annotated

from shardwright.config.registry import NameOf, Registry

Passes = tuple[float, float]  # in the forward, in the backward


@dataclass(frozen=True, kw_only=True)
class AdapterCode:
    """The facts of adapters by one hand.

    `place` orders lists. Elementwise kernels move `of_input` bytes by element of the input of each map, and `of_output`
    by element of its output. If `copies`, each map keeps a copy of its input in 16 bits, else maps of one input share
    it. `kernels` are launched more for each map of a layer. If `is_counted`, a test holds the numbers against the code.
    """

    name: str
    place: int
    of_input: Passes = (0.0, 0.0)
    of_output: Passes = (0.0, 0.0)
    copies: bool = False
    kernels: Passes
    is_counted: bool = False


FACTS = (
    # This runtime's (parallel/tensor/low_rank.py): an adapter's products, their sums and the scaling of its gradients.
    AdapterCode(name="shardwright", place=10, kernels=(2.3, 6.3), is_counted=True),
    # peft (tuners.lora.layer, Linear.forward) under autocast, whose adapters are in float32: the input is cast to
    # float32 6, and back for the product 6; what B gives is scaled 4 and added to the map's result 6. Backward: the
    # scaled gradient 4; two casts 12 and a sum of gradients of the input 6. Launches: two casts of the input, of A
    # and of B, their products, scaling and sum; in the backward twice the products, and sums over microbatches.
    AdapterCode(
        name="peft",
        place=20,
        of_input=(12.0, 18.0),
        of_output=(10.0, 4.0),
        copies=True,
        kernels=(8.0, 12.0),
        is_counted=True,
    ),
    # In the number type of the base, without casts: torchtune (modules.peft.lora, LoRALinear.forward), LitGPT, and NeMo
    # (megatron.bridge.peft, LoRALinear and ParallelLinearAdapter).
    AdapterCode(name="uncast", place=30, of_input=(0.0, 6.0), of_output=(10.0, 4.0), kernels=(4.0, 8.0)),
)

ADAPTER_CODE: Registry[AdapterCode] = Registry("code for adapters", __name__, AdapterCode)
AdapterMaker = Annotated[str, NameOf(ADAPTER_CODE, others=("",))]
_BARE = AdapterCode(name="", place=0, kernels=(0.0, 0.0))


def adapter_code(maker: str) -> AdapterCode:
    """The code of a maker; without one, that of products alone."""
    return ADAPTER_CODE[maker] if maker else _BARE
