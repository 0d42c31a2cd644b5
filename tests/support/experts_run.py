"""The metrics of a made-up run of a model with experts."""

import json
from pathlib import Path
from typing import Any


def load_of(step: int, layer: int, num_experts: int) -> list[int]:
    """As uneven as can be in the first steps, even in the end."""
    return [
        1 + (step * 3 + layer + expert * expert) % (num_experts + 5 - min(step, 5)) for expert in range(num_experts)
    ]


def write_run(folder: Path, steps: int = 6, layers: int = 2, num_experts: int = 4, has_nodes: bool = True) -> None:
    """metrics.jsonl as a run writes it: pairs are counted in every second step, and other lines lie in between."""

    def of_layer(step: int, layer: int) -> dict[str, Any]:
        load = load_of(step, layer, num_experts)
        values: dict[str, Any] = {
            "layer": layer * 2 + 1, "load": load, "largest_load": max(load) * num_experts / sum(load),
            "dropped_share": 0.25 / step, "unserved_share": 0.125, "entropy": 0.5 + layer,
        }  # fmt: skip
        if step % 2 == 0 and num_experts <= 32:
            values["together"] = [
                [0 if i == j else step + 5 * i + j for j in range(num_experts)] for i in range(num_experts)
            ]
        return values

    lines: list[dict[str, Any]] = [{"memory": {}}]
    for step in range(1, steps + 1):
        sent = (5 << 20, 3 << 20, 4 << 20, 1 << 20) if has_nodes else (None,) * 4
        names = (
            "inside_nodes_bytes",
            "between_nodes_bytes",
            "experts_inside_nodes_bytes",
            "experts_between_nodes_bytes",
        )
        experts = [of_layer(step, layer) for layer in range(layers)]
        lines += [
            {"step": step, **dict(zip(names, sent, strict=True)), "experts": experts},
            {"step": step, "loss": 1.0},
        ]
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
