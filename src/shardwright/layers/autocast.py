"""Weights under torch.autocast: they are in float32, and each pass casts them to 16 bits for its products."""

from collections.abc import Iterable

from shardwright.config.software import SoftwareSpec
from shardwright.layers.arrays import Numbers
from shardwright.layers.layer_tensors import FLOAT32, HALF
from shardwright.layers.operators import MatrixProduct, Operator


def with_casts(software: SoftwareSpec, operator: Operator) -> Operator:
    """An operator with the traffic of its casts: of all weights in the forward, and in the backward of the gradients
    of those that are trained. Casts are kernels of their own, also of compiled layers, whose weights have no other."""
    if not software.autocast:
        return operator
    of_weights = (FLOAT32 + HALF) * _weight_elements(operator.products)
    of_gradients = (FLOAT32 + HALF) * _weight_elements(p for p in operator.products if not p.is_frozen)
    return operator.with_more_traffic(of_weights, of_gradients)


def cast_bytes(chain: Iterable[Operator], software: SoftwareSpec) -> Numbers:
    """Bytes of the casts of a chain's weights that products keep under autocast; 0 without."""
    return HALF * sum(_weight_elements(o.products) for o in chain) if software.autocast else 0.0


def _weight_elements(products: Iterable[MatrixProduct]) -> Numbers:
    return sum(p.batch * p.inner * p.columns for p in products if p.weight)
