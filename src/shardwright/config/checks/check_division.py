"""Faults of degrees that do not divide: heads over tp, the batch over replicas, the cluster's devices over the plan."""

from shardwright.config.divisors import all_divisors, nearest_divisors
from shardwright.config.job import JobSpec
from shardwright.config.phrase import either, say
from shardwright.config.units import counted_phrase


def tensor_faults(job: JobSpec) -> list[str]:
    """Faults of plan.tp against the model's widths and its sequence."""
    model, tp = job.model, job.plan.tp
    faults: list[str] = []
    for count, counted, divisors in (
        (model.heads, say("{count} heads", count=model.heads), all_divisors(model.heads)),
        (model.num_kv_heads, say("{count} kv heads", count=model.num_kv_heads), all_divisors(model.num_kv_heads)),
        (model.ffn_size, say("{count} ffn", count=model.ffn_size), nearest_divisors(model.ffn_size, tp)),
    ):
        if count % tp:
            faults.append(
                say(
                    "plan.tp {tp} does not divide {counted} ({count} / {tp} = {quotient:.2f}); use {choices}",
                    tp=tp,
                    counted=counted,
                    count=count,
                    quotient=count / tp,
                    choices=divisors,
                )
            )
    if tp > model.vocab:
        faults.append(
            say(
                "plan.tp {tp} leaves ranks without a row of a vocabulary of {vocab}; use at most {vocab}",
                tp=tp,
                vocab=model.vocab,
            )
        )
    if job.plan.cp == 1 and job.plan.sequence_parallel and model.sequence % tp:
        faults.append(
            say(
                "sequence parallel shards {sequence} tokens over tp {tp} ({sequence} / {tp} = {quotient:.2f}); use a "
                "sequence that is a multiple of {tp}, such as {multiple}, or plan.sequence_parallel = false",
                sequence=model.sequence,
                tp=tp,
                quotient=model.sequence / tp,
                multiple=model.sequence // tp * tp or tp,
            )
        )
    return faults


def batch_faults(job: JobSpec) -> list[str]:
    """Faults of the batch by itself; else those of its sizes against replicas and microbatches."""
    plan, batch = job.plan, job.batch.global_batch_size
    share = plan.dp * plan.microbatch_size
    if faults := job.batch.faults():
        return faults
    if batch % share == 0:
        odd = [size for size in job.batch.sizes() if size % share]
        return [
            say(
                "batch.ramp has a batch of {odd} on its way from {start} to {batch}, which does not split into dp "
                "{dp} x microbatch_size {size} = {share}; use a start and an increment that are multiples of {share}",
                odd=odd[0],
                start=job.batch.ramp.start,
                batch=batch,
                dp=plan.dp,
                size=plan.microbatch_size,
                share=share,
            )
            for _ in odd[:1]
        ]
    batches = [str(b) for b in (batch // share * share, (batch // share + 1) * share) if b]
    plan_fix = say("another plan.dp")
    if batch % plan.dp == 0:
        sizes = nearest_divisors(batch // plan.dp, plan.microbatch_size)
        plan_fix = say("plan.microbatch_size {sizes}", sizes=sizes)
    return [
        say(
            "batch.global_batch_size {batch} does not split into dp {dp} x microbatch_size {size} = {share} ({batch} / "
            "{share} = {quotient:.2f}); use a batch of {batches}, or {plan_fix}",
            batch=batch,
            dp=plan.dp,
            size=plan.microbatch_size,
            share=share,
            quotient=batch / share,
            batches=either(batches),
            plan_fix=plan_fix,
        )
    ]


def world_faults(job: JobSpec) -> list[str]:
    """The fault of a plan whose degrees do not make the cluster's devices."""
    cluster, plan = job.cluster, job.plan
    if not cluster.num_devices or plan.world == cluster.num_devices:
        return []
    ranks_of_replica = plan.world // plan.dp
    way_out = (
        say("use dp {dp}", dp=cluster.num_devices // ranks_of_replica)
        if cluster.num_devices % ranks_of_replica == 0
        else say("use degrees whose product is {devices}", devices=cluster.num_devices)
    )
    nodes = [(part.nodes, part.devices_per_node) for part in cluster.parts]
    nodes = nodes or [(cluster.nodes, cluster.devices_per_node)]
    devices: str = ""
    for num_nodes, per_node in nodes:
        product = say(
            "{nodes} x {devices}", nodes=counted_phrase(num_nodes, "node"), devices=counted_phrase(per_node, "device")
        )
        devices = say("{terms} + {term}", terms=devices, term=product) if devices else product
    return [
        say(
            "{degrees} = {ranks} ranks, and cluster {cluster} has {devices} = {all}; {way_out}",
            degrees=plan.degrees,
            ranks=plan.world,
            cluster=repr(cluster.name),
            devices=devices,
            all=cluster.num_devices,
            way_out=way_out,
        )
    ]
