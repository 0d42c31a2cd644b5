"""Kernels that a layer launches, and its host's work around them, as a description of software has them."""

from dataclasses import dataclass

import numpy as np

from shardwright.config.layer_kind import has_experts
from shardwright.config.product_modules import PRODUCT_MODULES
from shardwright.config.software import SoftwareSpec
from shardwright.cost.adapter_kernels import adapter_kernels, updated_of_expert
from shardwright.layers.arrays import Numbers
from shardwright.layers.chains import Chain
from shardwright.layers.operators import Exchange
from shardwright.layers.query import Run


@dataclass(frozen=True)
class Launches:
    """Numbers of kernels, and the work of the host for and around them in launches of a kernel; of each the
    (forward, backward)."""

    kernels: tuple[Numbers, Numbers]
    host: tuple[Numbers, Numbers]


@dataclass(frozen=True)
class LayerLaunches:
    """The launches of a run's layers; `is_narrow` where their products are in fp8."""

    run: Run
    software: SoftwareSpec
    is_narrow: bool

    def before_experts(self, kind: str, chain: Chain) -> Launches:
        """The launches of a layer without its experts, whose operators are a chain."""
        software, shape, grid = self.software, self.run.shape, self.run.grid
        plain = (software.layer_norm_kernels if shape.layer_norm else None) or software.kernels
        matrices = [matrix for matrix in shape.matrices(kind) if not matrix.experts]
        kernels = _total(
            (1, plain),
            (self.is_narrow, software.float8_kernels),
            (len(shape.block_norms) - 2, software.norm_kernels),
            (grid.cp * (grid.cp > 1) * (not grid.trades_heads), software.ring_kernels),
            (shape.head_norms, software.head_norm_kernels),
            (shape.latent is not None, software.latent_kernels),
            (self.is_narrow and software.float8_weight_gradients, (0.0, software.float8_gradient_kernels)),
            *adapter_kernels(shape, software, matrices),
        )
        gates = shape.gate_matrices if has_experts(kind) else ()  # products in float32, by torch itself
        return self._with_modules(kernels, sum(matrix not in gates for matrix in matrices), chain)

    def of_experts(self, chain: Chain) -> Launches:
        """The launches of a layer's experts, and of the operators around them in a chain."""
        w, shape, num_local = self.software, self.run.shape, self._local_experts()
        matrices, updated_share = shape.routed_matrices, updated_of_expert(shape) / len(shape.routed_matrices)
        kernels = _total(
            (1, w.routing_kernels),
            (shape.mixture.topk, w.choice_kernels),
            (num_local * updated_share, w.expert_kernels),
            (num_local * self.is_narrow, w.float8_expert_kernels),
            (num_local * (shape.bias or shape.mlp_bias), w.expert_bias_kernels),
            *adapter_kernels(shape, w, matrices),
        )
        return self._with_modules(kernels, len(matrices), chain)

    def of_hooks(self, kind: str) -> Numbers:
        """Work of the host around a layer's modules in each pass under ZeRO-3, in launches of a kernel."""
        zero = self.software.zero
        return zero.hooks + (zero.expert_hooks * self._local_experts() if has_experts(kind) else 0.0)

    def _with_modules(self, kernels: tuple[Numbers, Numbers], num_modules: int, chain: Chain) -> Launches:
        modules = PRODUCT_MODULES[self.software.modules]
        collectives = sum(_num_over_tp(o.forward) for o in chain), sum(_num_over_tp(o.backward) for o in chain)
        return Launches(
            kernels, _total((1, kernels), (num_modules, modules.launches), (modules.collective, collectives))
        )

    def _local_experts(self) -> Numbers:
        return np.maximum(1, self.run.shape.mixture.num // np.asarray(self.run.grid.ep))


def _num_over_tp(exchanges: tuple[Exchange, ...]) -> Numbers:
    """The number of collectives over tp that plans have."""
    return sum(np.where(np.asarray(e.size) > 0, 1.0, 0.0) for e in exchanges if e.axis == "tp")


def _total(*counted: tuple[Numbers, tuple[Numbers, Numbers]]) -> tuple[Numbers, Numbers]:
    forward, backward = (sum(count * kernels[number] for count, kernels in counted) for number in (0, 1))
    return forward, backward
