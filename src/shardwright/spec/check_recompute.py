"""Is what a plan says about recomputation of one piece?"""

from shardwright.spec.plan import PlanSpec
from shardwright.spec.recompute import NEEDS, OPERATORS


def recompute_faults(plan: PlanSpec) -> list[str]:
    """What contradicts itself among the fields about recomputation."""
    faults = []
    chosen = plan.recompute_operators
    if plan.recompute == "selective":
        if not chosen:
            faults.append(
                'plan.recompute = "selective" without plan.recompute_operators recomputes nothing; '
                f'name some of {", ".join(OPERATORS)}, or use plan.recompute = "none"'
            )
        faults += [
            f"plan.recompute_operators has {product!r} without {follower!r}: what {product} gives is needed by "
            f"{follower} alone, so computing it again frees nothing; add {follower!r}, or leave {product!r} out"
            for product, follower in NEEDS.items()
            if product in chosen and follower not in chosen
        ]
    elif chosen != ["attention"]:
        faults.append(
            f"plan.recompute_operators is for selective recomputation, and plan.recompute is {plan.recompute!r}; "
            'use plan.recompute = "selective"'
        )
    if plan.recompute_every > 1 and plan.recompute not in ("full", "selective"):
        faults.append(
            f"plan.recompute_every {plan.recompute_every} needs something to recompute, and plan.recompute is "
            f'{plan.recompute!r}; use plan.recompute = "full" or "selective"'
        )
    if plan.recompute == "budget" and plan.memory_limit_gib == 0:
        faults.append(
            'plan.recompute = "budget" needs a limit; set plan.memory_limit_gib to the GiB of a rank that activations '
            "may take"
        )
    if plan.memory_limit_gib > 0 and plan.recompute != "budget":
        faults.append(
            f'plan.memory_limit_gib {plan.memory_limit_gib:g} is for plan.recompute = "budget", and that is '
            f'{plan.recompute!r}; use plan.recompute = "budget"'
        )
    if plan.offload_activations and plan.recompute != "full":
        faults.append(
            "plan.offload_activations sends away the one tensor that a recomputed layer keeps, and plan.recompute is "
            f'{plan.recompute!r}; use plan.recompute = "full", or plan.offload_activations = false'
        )
    return faults
