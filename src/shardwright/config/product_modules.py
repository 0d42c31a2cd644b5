"""The registry of modules around products, by those who made them, with what they cost their host."""

from dataclasses import dataclass
from typing import Annotated

from shardwright.config.registry import NameOf, Registry


@dataclass(frozen=True, kw_only=True)
class ProductModules:
    """The facts of modules around products.

    `place` orders lists. `launches` is the work of the host in one, (forward, backward), beyond launching the kernels
    of its product, in launches of a kernel; `collective` the same for a collective over tp ranks beside it.
    """

    name: str
    place: int
    launches: tuple[float, float]
    collective: float = 0.0


FACTS = (
    # torch.nn.Linear: 13.5 us forward beside an H100 (TransformerEngine, issue 2053), where a launch is taken for 16.
    ProductModules(name="torch", place=10, launches=(0.0, 0.0)),
    # Forward: 115 us for TEColumnParallelLinear in bf16 (TransformerEngine, pull request 1191), of which 16 are the
    # launch of its product. Both ways: te.Linear took 398 us more than torch's Linear on an H100 (issue 445).
    # Megatron-LM's own tests of 12 layers of 512 on DGX H100 (d98e8a6, golden values of gpt3_mcore_te_tp1_pp1 and pp4)
    # take 2.5 to 3.5 ms a layer and microbatch, where launches alone are 1.0 and these with them 2.6. With tp 2 and 4
    # (tp2_pp1, tp2_pp2, tp4_pp1) they take 0.9 ms more for the 4 collectives of a layer.
    ProductModules(name="transformer-engine", place=20, launches=(6.2, 18.7), collective=14.0),
)

PRODUCT_MODULES: Registry[ProductModules] = Registry("a maker of modules around products", __name__, ProductModules)
ModuleMaker = Annotated[str, NameOf(PRODUCT_MODULES)]
