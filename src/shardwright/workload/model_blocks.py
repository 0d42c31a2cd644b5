"""What a decoder may have in place of plain blocks: mixtures of experts, latent attention."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertShape:
    """A mixture of experts: each token goes to `topk` of `num` MLPs of width `ffn`, and to one of `shared_ffn`.

    The first `dense_layers` have none, and of the others the last of every `every` has some. A token chooses among a
    `reach` of them, where its gate limits the groups of experts.
    """

    num: int
    topk: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0
    every: int = 1
    reach: float = 1.0


@dataclass(frozen=True)
class LatentShape:
    """Multi-head latent attention: queries and keys through low ranks (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    A head's query and key have `plain` elements and `rotary` ones, its value `value` elements.
    """

    query_rank: int
    key_rank: int
    plain: int = 128
    rotary: int = 64
    value: int = 128
