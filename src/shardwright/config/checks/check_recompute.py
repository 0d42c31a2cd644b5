"""Check that the fields of a plan about recomputation agree."""

from shardwright.config.plan import PlanSpec
from shardwright.config.recompute_policy import OPERATORS, policy_faults


def recompute_faults(plan: PlanSpec, layers: int, mtp_layers: int = 0) -> list[str]:
    """Contradictions among the fields about recomputation."""
    faults = []
    operators = plan.recompute_operators
    if plan.recompute == "selective":
        if not operators:
            faults.append(
                'plan.recompute = "selective" without plan.recompute_operators recomputes nothing; '
                f'name some of {", ".join(OPERATORS)}, or use plan.recompute = "none"'
            )
        faults += policy_faults("plan.recompute_operators", frozenset(operators))
    elif operators != ["attention"]:
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
    if plan.recompute == "budget" and mtp_layers:
        faults.append(
            f'plan.recompute = "budget" weighs the layers of a stage, and those of model.mtp_layers {mtp_layers} '
            'keep more than a layer; use "full" or "selective", or name the layers in plan.recompute_layers'
        )
    if plan.recompute == "layers":
        if len(plan.recompute_layers) != layers:
            faults.append(
                f"plan.recompute_layers says for {len(plan.recompute_layers)} layers what they compute again, and the "
                f"model has {layers}; give {layers} lists"
            )
        for layer, names in enumerate(plan.recompute_layers):
            faults += policy_faults(f"plan.recompute_layers[{layer}]", frozenset(names))
    elif plan.recompute_layers:
        faults.append(
            f'plan.recompute_layers is for plan.recompute = "layers", and that is {plan.recompute!r}; '
            'use plan.recompute = "layers"'
        )
    if plan.offload_activations and plan.recompute != "full":
        faults.append(
            "plan.offload_activations sends away the one tensor that a recomputed layer keeps, and plan.recompute is "
            f'{plan.recompute!r}; use plan.recompute = "full", or plan.offload_activations = false'
        )
    return faults
