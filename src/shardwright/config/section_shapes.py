"""The shapes of a model's sections: of its experts, and of its latent attention."""

import math
from dataclasses import dataclass

from shardwright.config.moe import Routing


@dataclass(frozen=True)
class ExpertShape:
    """A mixture of experts: each token goes to `topk` of `num` MLPs of width `ffn`, and to one of width `shared_ffn`.

    The first `dense_layers` have no experts; after them, the last of every `every` layers has some. A token chooses
    among a share `reach` of the experts, below 1 if its gate limits the groups of experts. `shared_gate`: one more
    product weighs the output of the shared experts. `weighs_input`: weights of choices multiply the input of experts,
    not their output. `routing`: tokens are spread evenly at random (forced), or each gets the next experts in
    their order (in-turn); by a gate whose biases follow its loads (biased), by one with a loss of balance alone
    (balanced), or by one without a rule (free). No expert gets more than
    `most_load` times the mean's rows. `limited`: the inputs of their activation have limits.
    """

    num: int
    topk: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0
    every: int = 1
    reach: float = 1.0
    shared_gate: bool = False
    weighs_input: bool = False
    routing: Routing = "forced"
    most_load: float = math.inf
    limited: bool = False


@dataclass(frozen=True)
class LatentShape:
    """Multi-head latent attention: queries and keys through low ranks (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    A head's query and key have `plain` elements without position and `rotary` elements, its value `value` elements.
    """

    query_rank: int
    key_rank: int
    plain: int = 128
    rotary: int = 64
    value: int = 128
