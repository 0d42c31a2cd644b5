"""Check that the ranks of cp can share the sequence as the plan says."""

import math

from shardwright.config.context_facts import sharing_tokens
from shardwright.config.divisors import all_divisors, nearest_divisors
from shardwright.config.job import JobSpec
from shardwright.config.plan import chunks_per_rank


def context_faults(job: JobSpec) -> list[str]:
    """Reasons why the ranks of cp can't share sequences, each with its arithmetic and a way out."""
    if job.plan.cp == 1:
        return []
    return _sequence_faults(job) + (_head_faults(job) if job.plan.trades_heads else [])


def _sequence_faults(job: JobSpec) -> list[str]:
    plan, sequence = job.plan, job.model.sequence
    per_rank = chunks_per_rank(plan.cp_method)
    chunks = per_rank * plan.cp
    shared = plan.tp if plan.sequence_parallel else 1
    unit = math.lcm(chunks, plan.cp * shared)
    way_out = f"use a sequence that is a multiple of {unit}, such as {sequence // unit * unit or unit}"
    if sequence % chunks:
        pieces = f"plan.cp {plan.cp}" + (f" x {per_rank} chunks a rank = {chunks}" if per_rank > 1 else "")
        cp_fix = nearest_divisors(sequence // per_rank, plan.cp) if sequence % per_rank == 0 else "1"
        return [
            f"{plan.cp_method} attention cuts {sequence} tokens into {pieces} equal parts "
            f"({sequence} / {chunks} = {sequence / chunks:.2f}); {way_out}, or plan.cp = {cp_fix}"
        ]
    if sequence // plan.cp % shared:
        return [
            f"sequence parallel shards the {sequence} / cp {plan.cp} = {sequence // plan.cp} tokens of a rank over tp "
            f"{plan.tp} ({sequence // plan.cp} / {plan.tp} = {sequence / plan.cp / plan.tp:.2f}); {way_out}, or "
            f"plan.sequence_parallel = false"
        ]
    return []


def _head_faults(job: JobSpec) -> list[str]:
    plan, model, method = job.plan, job.model, job.plan.cp_method
    if model.is_latent:
        return [
            f"{method} trades tokens for groups of heads with keys and values of their own, and latent attention makes "
            f"those of one latent for all heads; use plan.cp_method = {sharing_tokens()}"
        ]
    if model.heads % plan.tp or model.num_kv_heads % plan.tp:
        return []  # another check reports this
    heads, kv_heads = model.heads // plan.tp, model.num_kv_heads // plan.tp
    division = "" if plan.tp == 1 else f" / tp {plan.tp} = {heads}"
    faults = []
    if heads % plan.cp:
        faults.append(
            f"{method} gives each of plan.cp {plan.cp} ranks as many of {model.heads}{division} heads ({heads} / "
            f"{plan.cp} = {heads / plan.cp:.2f}); use plan.cp = {nearest_divisors(heads, plan.cp)}, or "
            'plan.cp_method = "ring"'
        )
    elif kv_heads % plan.cp and plan.cp % kv_heads:
        division = "" if plan.tp == 1 else f" / tp {plan.tp} = {kv_heads}"
        faults.append(
            f"{method} gives each of plan.cp {plan.cp} ranks as many of {model.num_kv_heads}{division} kv heads, or "
            f"each kv head to as many ranks, and neither divides the other ({kv_heads} / {plan.cp} = "
            f'{kv_heads / plan.cp:.2f}); use plan.cp = {all_divisors(kv_heads)}, or plan.cp_method = "ring"'
        )
    return faults
