"""The layout table in words and as JSON: DTensor's, SBP's and GSPMD's notation of each tensor."""

from collections.abc import Iterable, Sequence
from typing import Any

from shardwright.memory.tensor_table import RegionLayout
from shardwright.report.text_columns import aligned
from shardwright.sharding.placements import TensorLayout, TensorPlacement


def layout_text(regions: Sequence[RegionLayout]) -> str:
    """Tables of the parameters and activations of each piece: the shape of each full tensor, and how it is sharded."""
    parts = []
    for region in regions:
        for title, tensors in (("parameters", region.parameters), ("activations", region.activations)):
            if tensors:
                parts.append(f"{region.name}, {title}:\n\n{aligned(_rows(tensors), left=range(6))}")
    return "\n\n".join(parts)


def _rows(tensors: Iterable[TensorLayout]) -> list[list[str]]:
    """A header, then a row for each group of states in which a tensor is sharded alike."""
    rows = [["tensor", "state", "dims of the whole", "DTensor", "SBP", "GSPMD"]]
    for tensor in tensors:
        dims = " x ".join(f"{name} {size:,}" for name, size in zip(tensor.dims, tensor.shape, strict=True))
        name = tensor.name + (" (expected)" if tensor.rows_vary else "")
        for states in _alike(tensor):
            other_states = [state for state in tensor.states if state not in states]
            states_shown = (
                ", ".join(states)
                if len(states) < 3
                else f"all but {', '.join(other_states)}"
                if other_states
                else "all"
            )
            split_over = [p for p in tensor.states[states[0]] if p.size > 1]
            dtensor = ", ".join(f"{p.axis} {p.dtensor}" for p in split_over) or "whole"
            sbp = " ".join(f"{p.axis} {p.sbp}" for p in split_over) or "whole"
            rows.append([name, states_shown, dims, dtensor, sbp, tensor.gspmd(states[0])])
            name = dims = ""
    return rows


def _alike(tensor: TensorLayout) -> list[list[str]]:
    """The states of a tensor, grouped by equal placement."""
    groups: dict[tuple[TensorPlacement, ...], list[str]] = {}
    for state, placements in tensor.states.items():
        groups.setdefault(placements, []).append(state)
    return list(groups.values())


def layout_dict(regions: Sequence[RegionLayout]) -> list[dict[str, Any]]:
    """The layout as plain data, with axes of one rank too."""
    return [
        {
            "region": region.name,
            "stage": region.stage,
            "parameters": [_tensor_dict(tensor) for tensor in region.parameters],
            "activations": [_tensor_dict(tensor) for tensor in region.activations],
        }
        for region in regions
    ]


def _tensor_dict(tensor: TensorLayout) -> dict[str, Any]:
    states = {
        state: {
            "dtensor": {p.axis: p.dtensor for p in placements},
            "sbp": {p.axis: p.sbp for p in placements},
            "gspmd": tensor.gspmd(state),
        }
        for state, placements in tensor.states.items()
    }
    return {"name": tensor.name, "dims": tensor.dims, "shape": tensor.shape, "states": states}
