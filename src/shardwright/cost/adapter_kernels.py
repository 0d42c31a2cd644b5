"""Numbers of kernels that adapters and matrices in NF4 launch more, and of matrices of experts with gradients."""

from collections.abc import Sequence

from shardwright.config.adapter_code import adapter_code
from shardwright.config.matrix import Matrix
from shardwright.config.model_shape import ModelShape
from shardwright.config.software import SoftwareSpec


def adapter_kernels(
    shape: ModelShape, software: SoftwareSpec, matrices: Sequence[Matrix]
) -> tuple[tuple[int, tuple[float, float]], ...]:
    """Numbers of the maps of some matrices with adapters and of the matrices in NF4, each with the kernels of one."""
    adapter = shape.adapter
    if not shape.is_adapted:
        return ()
    num_maps = sum(len(adapter.targets_of(matrix)) for matrix in matrices)
    num_stored = sum(1 for matrix in matrices if adapter.maps(matrix)) if adapter.row_format else 0
    return (num_maps, adapter_code(software.adapters).kernels), (num_stored, software.nf4_kernels)


def updated_of_expert(shape: ModelShape) -> int:
    """The number of matrices of an expert that have a gradient: its own, or the factors of its adapters."""
    if not shape.is_adapted:
        return len(shape.routed_matrices)
    targets = (shape.adapter.targets_of(matrix) for matrix in shape.routed_matrices)
    return sum(1 + len(maps) for maps in targets if maps)
