"""FLOPs per token as the source of a measured run counts them, from its statement of its convention.

The default is model FLOPs with attention over the full sequence (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).
A source may state hardware FLOPs, which count the forward that full recomputation repeats (Narayanan et al. 2021, arXiv
2104.04473, equation 3); attention halved, for causality; or no attention at all, 6 per parameter.
"""

import re
from dataclasses import replace

from shardwright.layers.query import Run

_NOT = r"(?:no|not|non|without|excl\w*|ignor\w*|leav\w* out)"


def stated_flops(convention: str, run: Run, parameters: float = 0.0) -> float:
    """FLOPs per token, forward and backward. `parameters` is the number that the source states, 0 if it does not."""
    text = convention.lower()
    if _says(text, rf"\b{_NOT}[ -](?:any |the )?attention|\b6 ?\*? ?nd?\b(?!.*(?:attention|12))"):
        flops = 6.0 * parameters or replace(run.shape, sequence=0).flops_per_token()
    else:
        is_halved = _says(text, r"causal") and not _says(text, rf"\b{_NOT}[ -]?causal")
        flops = run.shape.flops_per_token(causal=is_halved)
    return flops * (4 / 3 if _counts_again(text) and run.grid.recompute == "full" else 1.0)


def _counts_again(text: str) -> bool:
    """True if recomputed FLOPs are counted."""
    if re.match(r"\s*(?:mfu|model)", text) or _says(text, rf"\b{_NOT}\W+(?:\w+ )?recomput"):
        return False
    return _says(text, r"recomput|hardware|hfu|factor 4|\b96 ?\*")


def _says(text: str, pattern: str) -> bool:
    return re.search(pattern, text) is not None
