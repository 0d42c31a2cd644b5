"""FLOPs per token as the source of a measured run counts them, by the word of its column `flops_counted`.

model: model FLOPs with attention over the full sequence (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).
hardware: FLOPs that include the forward that full recomputation repeats (Narayanan et al. 2021, arXiv 2104.04473,
equation 3). Either with -causal, attention halved, or with -6n, no attention at all, 6 per parameter.
"""

from dataclasses import replace

from shardwright.layers.query import Run

FLOPS_COUNTED = tuple(f"{base}{part}" for base in ("model", "hardware") for part in ("", "-causal", "-6n"))


def counted_flops(counted: str, run: Run, parameters: float = 0.0) -> float:
    """FLOPs per token, forward and backward; of a row that does not say how they are counted, model FLOPs. `parameters`
    is the number that the source states, 0 if it does not."""
    if counted.endswith("-6n"):
        flops = 6.0 * parameters or replace(run.shape, sequence=0).flops_per_token()
    else:
        flops = run.shape.flops_per_token(causal=counted.endswith("-causal"))
    return flops * (4 / 3 if counted.startswith("hardware") and run.grid.recompute == "full" else 1.0)
