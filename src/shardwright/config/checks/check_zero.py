"""Faults of how a plan shards state over replicas and keeps it in host memory."""

from shardwright.config.divisors import all_divisors
from shardwright.config.phrase import say
from shardwright.config.plan import PlanSpec
from shardwright.config.schedule_facts import SCHEDULES


def zero_faults(plan: PlanSpec) -> list[str]:
    """Faults of a plan's ZeRO stage, of the ranks over which it shards, and of what its host keeps."""
    return [*_hybrid_faults(plan), *_offload_faults(plan)]


def _hybrid_faults(plan: PlanSpec) -> list[str]:
    """Faults of plan.zero_ranks, the number of ranks over which ZeRO shards."""
    faults, replicas = list[str](), plan.replicas
    if plan.zero_ranks and replicas % plan.zero_ranks:
        product = f"plan.dp {plan.dp}" if plan.cp == 1 else f"dp {plan.dp} x cp {plan.cp} = {replicas}"
        faults.append(
            say(
                "plan.zero_ranks {zero_ranks} does not divide {product} ({replicas} / {zero_ranks} = "
                "{quotient:.2f}); use {choices}",
                zero_ranks=plan.zero_ranks,
                product=product,
                replicas=replicas,
                quotient=replicas / plan.zero_ranks,
                choices=all_divisors(replicas),
            )
        )
    if plan.zero_ranks and not plan.zero:
        faults.append(
            say(
                "plan.zero_ranks {zero_ranks} says over how many ranks ZeRO shards, and plan.zero is 0; set "
                "plan.zero to 1, 2 or 3, or plan.zero_ranks to 0",
                zero_ranks=plan.zero_ranks,
            )
        )
    if 0 < plan.zero_ranks < replicas and plan.num_copies > 1:
        faults.append(
            say(
                "{schedule} holds each stage twice, so its replicas are 2 x {replicas} = {num_replicas} ranks, which "
                "hybrid sharding over plan.zero_ranks {zero_ranks} does not cut; set plan.zero_ranks to 0",
                schedule=plan.schedule,
                replicas=replicas,
                num_replicas=2 * replicas,
                zero_ranks=plan.zero_ranks,
            )
        )
    return faults


def _offload_faults(plan: PlanSpec) -> list[str]:
    """Faults of what ZeRO shards or the host keeps, against the schedule and plan.zero."""
    faults: list[str] = []
    if plan.offload_parameters and plan.zero < 3:
        faults.append(
            say(
                "plan.offload_parameters keeps shards of the parameters in host memory until they are gathered, and "
                "plan.zero {zero} holds them whole; set plan.zero to 3, or plan.offload_parameters to false",
                zero=plan.zero,
            )
        )
    if plan.offload_optimizer and not SCHEDULES[plan.schedule].drains:
        faults.append(
            say(
                "schedule {schedule} updates weights while the pipeline is full, and plan.offload_optimizer "
                "{offload_optimizer:g} would make each update wait for the host; set plan.offload_optimizer to 0",
                schedule=repr(plan.schedule),
                offload_optimizer=plan.offload_optimizer,
            )
        )
    if plan.zero and not SCHEDULES[plan.schedule].drains:
        faults.append(
            say(
                "schedule {schedule} keeps several versions of the whole weights, and plan.zero {zero} shards what "
                "an update works on; set plan.zero to 0, or use a schedule that drains, such as 1f1b",
                schedule=repr(plan.schedule),
                zero=plan.zero,
            )
        )
    return faults
