"""The registry of dispatchers, which send tokens to their experts and back, with their facts."""

from dataclasses import dataclass

from shardwright.config.registry import Registry


@dataclass(frozen=True, kw_only=True)
class TokenDispatcher:
    """The facts of a dispatcher.

    - `place` orders lists of dispatchers; `other_names` are its names in tables of measured runs.
    - `sends_once`: a token crosses the network once for each domain that has experts for it, and goes once to each rank
      that has; if not, once for each expert.
    - `is_pipelined`: a domain sends such tokens on to its ranks while it receives others.
    - `permutes`: rows are brought into the order of their experts while they travel, where software has it so.
    - `float32_weights`: the weights of choices are in float32.
    - `gathers`: all tokens are gathered on all ranks that share experts, and the results are summed and scattered.
    - `dispatch` and `combine` are bytes moved by element of the rows of experts, (forward, backward), where it does not
      permute; None is a copy for each order in which rows lie.
    """

    name: str
    place: int
    other_names: tuple[str, ...] = ()
    sends_once: bool
    is_pipelined: bool
    permutes: bool
    float32_weights: bool = False
    gathers: bool = False
    dispatch: tuple[float, float] | None = None
    combine: tuple[float, float] | None = None


FACTS = (
    # MoEAllGatherTokenDispatcher of Megatron-LM, the one that it takes if no other is asked for (April 2024), in single
    # operators of 2 bytes an element and with 2 choices: torch.gather twice (4 each), whose backwards scatter into
    # zeros (15); then zeros (2), scatter into a copy of them (8), the weights of choices (4) and scatter_add into a
    # copy of zeros for tokens (9), whose backwards are two gathers (8) and products with a sum (12).
    TokenDispatcher(
        name="all-gather",
        place=5,
        other_names=("allgather",),
        sends_once=False,
        is_pipelined=False,
        permutes=False,
        gathers=True,
        dispatch=(8.0, 15.0),
        combine=(23.0, 20.0),
    ),
    # MoEAlltoAllTokenDispatcher of Megatron-LM, by collectives of NCCL.
    TokenDispatcher(
        name="all-to-all",
        place=10,
        other_names=("alltoall",),
        sends_once=False,
        is_pipelined=False,
        permutes=False,
    ),
    # deepseek-ai/DeepEP: README (kernels that forward from RDMA to NVLink) and csrc/kernels (is_token_in_rank). Weights
    # must be in float32, as for HybridEP (both managers of the flex dispatcher, Megatron-LM at d98e8a6).
    TokenDispatcher(
        name="deepep",
        place=20,
        sends_once=True,
        is_pipelined=True,
        permutes=False,
        float32_weights=True,
    ),
    # DeepEP's branch hybrid-ep, and a profile of Megatron-Bridge at 067f987 (docs/mechanisms.md).
    TokenDispatcher(
        name="hybridep",
        place=30,
        sends_once=True,
        is_pipelined=False,
        permutes=True,
        float32_weights=True,
    ),
)

TOKEN_DISPATCHERS: Registry[TokenDispatcher] = Registry("a dispatcher", __name__, TokenDispatcher)


def dispatcher_names() -> dict[str, str]:
    """Names of dispatchers by the names that tables of measured runs have for them."""
    return {name: facts.name for facts in TOKEN_DISPATCHERS.values() for name in (facts.name, *facts.other_names)}
