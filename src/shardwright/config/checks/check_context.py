"""Check that the ranks of cp can share the sequence as the plan says."""

import math

from shardwright.config.context_facts import sharing_tokens
from shardwright.config.divisors import all_divisors, nearest_divisors
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
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
    way_out = say(
        "use a sequence that is a multiple of {unit}, such as {multiple}",
        unit=unit,
        multiple=sequence // unit * unit or unit,
    )
    if sequence % chunks:
        pieces: str = f"plan.cp {plan.cp}"
        if per_rank > 1:
            pieces = say(
                "{pieces} x {per_rank} chunks a rank = {chunks}", pieces=pieces, per_rank=per_rank, chunks=chunks
            )
        cp_fix = nearest_divisors(sequence // per_rank, plan.cp) if sequence % per_rank == 0 else "1"
        return [
            say(
                "{method} attention cuts {sequence} tokens into {pieces} equal parts ({sequence} / {chunks} = "
                "{quotient:.2f}); {way_out}, or plan.cp = {cp_fix}",
                method=plan.cp_method,
                sequence=sequence,
                pieces=pieces,
                chunks=chunks,
                quotient=sequence / chunks,
                way_out=way_out,
                cp_fix=cp_fix,
            )
        ]
    if sequence // plan.cp % shared:
        return [
            say(
                "sequence parallel shards the {sequence} / cp {cp} = {tokens} tokens of a rank over tp {tp} "
                "({tokens} / {tp} = {quotient:.2f}); {way_out}, or plan.sequence_parallel = false",
                sequence=sequence,
                cp=plan.cp,
                tokens=sequence // plan.cp,
                tp=plan.tp,
                quotient=sequence / plan.cp / plan.tp,
                way_out=way_out,
            )
        ]
    return []


def _head_faults(job: JobSpec) -> list[str]:
    plan, model, method = job.plan, job.model, job.plan.cp_method
    if model.is_latent:
        return [
            say(
                "{method} trades tokens for groups of heads with keys and values of their own, and latent attention "
                "makes those of one latent for all heads; use plan.cp_method = {choices}",
                method=method,
                choices=sharing_tokens(),
            )
        ]
    if model.heads % plan.tp or model.num_kv_heads % plan.tp:
        return []  # another check reports this
    heads, kv_heads = model.heads // plan.tp, model.num_kv_heads // plan.tp
    division = "" if plan.tp == 1 else f" / tp {plan.tp} = {heads}"
    faults: list[str] = []
    if heads % plan.cp:
        faults.append(
            say(
                "{method} gives each of plan.cp {cp} ranks as many of {num_heads}{division} heads ({heads} / {cp} = "
                '{quotient:.2f}); use plan.cp = {choices}, or plan.cp_method = "ring"',
                method=method,
                cp=plan.cp,
                num_heads=model.heads,
                division=division,
                heads=heads,
                quotient=heads / plan.cp,
                choices=nearest_divisors(heads, plan.cp),
            )
        )
    elif kv_heads % plan.cp and plan.cp % kv_heads:
        division = "" if plan.tp == 1 else f" / tp {plan.tp} = {kv_heads}"
        faults.append(
            say(
                "{method} gives each of plan.cp {cp} ranks as many of {num_kv_heads}{division} kv heads, or each kv "
                "head to as many ranks, and neither divides the other ({kv_heads} / {cp} = {quotient:.2f}); use "
                'plan.cp = {choices}, or plan.cp_method = "ring"',
                method=method,
                cp=plan.cp,
                num_kv_heads=model.num_kv_heads,
                division=division,
                kv_heads=kv_heads,
                quotient=kv_heads / plan.cp,
                choices=all_divisors(kv_heads),
            )
        )
    return faults
