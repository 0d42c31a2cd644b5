"""Check that the plan fits the model, the batch and the cluster. Every fault has its arithmetic and a way out.

These checks are arithmetic on the job and need nothing else. Facts of the machine (free memory, CUDA devices, files)
are checked where they are used.
"""

from shardwright.config.catalog_entry import entry_faults
from shardwright.config.checks.check_adapters import adapter_faults
from shardwright.config.checks.check_cluster import part_faults, topology_faults
from shardwright.config.checks.check_context import context_faults
from shardwright.config.checks.check_data import data_faults
from shardwright.config.checks.check_division import batch_faults, tensor_faults, world_faults
from shardwright.config.checks.check_experts import expert_faults
from shardwright.config.checks.check_precision import float8_faults, master_faults, moment_faults
from shardwright.config.checks.check_recompute import recompute_faults
from shardwright.config.checks.check_recovery import checkpoint_faults, health_faults
from shardwright.config.checks.check_size import rank_faults, size_faults
from shardwright.config.cluster import DeviceSpec
from shardwright.config.cluster_facts import node_devices
from shardwright.config.compression_facts import COMPRESSIONS
from shardwright.config.divisors import all_divisors
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.plan import PlanSpec, ep_ranks_of_node
from shardwright.config.rank_order import DEFAULT_ORDER, ORDERS, inside_pipeline, number_of
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.software import SoftwareSpec
from shardwright.config.units import counted, counted_phrase

# In bytes. File systems allow 255; names of files beside the folder may add an ending.
LONGEST_NAME = 200


def job_faults(job: JobSpec) -> list[str]:
    """All faults of a job whose fields are each valid. Empty if it can run."""
    if faults := rank_faults(job):  # ways out of other faults are divisors of these numbers, slow if they are large
        return faults
    return [*faults_on_any_cluster(job), *world_faults(job), *_fallback_faults(job)]


def faults_without_plan(job: JobSpec) -> list[str]:
    """All faults of a job for which a plan is to be searched; its own plan is ignored."""
    return faults_on_any_cluster(job.model_copy(update={"plan": job.plan.unsearched()}))


def faults_on_any_cluster(job: JobSpec) -> list[str]:
    """All faults of a job, except a number of ranks that differs from the number of the cluster's devices."""
    return [
        *size_faults(job),
        *_name_faults(job.name),
        *_section_faults(job),
        *tensor_faults(job),
        *context_faults(job),
        *data_faults(job.data),
        *_pipeline_faults(job),
        *_fold_faults(job),
        *expert_faults(job),
        *_zero_faults(job),
        *recompute_faults(job.plan, job.model.layers, job.model.mtp_layers),
        *batch_faults(job),
        *_cluster_faults(job),
        *topology_faults(job.cluster),
        *part_faults(job),
        *_optimizer_faults(job),
        *moment_faults(job),
        *master_faults(job),
        *adapter_faults(job),
        *float8_faults(job),
        *_compress_faults(job),
        *health_faults(job),
        *checkpoint_faults(job),
    ]


def _section_faults(job: JobSpec) -> list[str]:
    """Faults of sections by themselves. Those of the batch are in `batch_faults`, whose other rules need it right."""
    sections = (
        job.model,
        job.cluster,
        job.plan,
        job.precision,
        job.data,
        job.optimizer,
        job.run,
        job.checkpoint,
        job.health,
    )
    return [fault for section in sections for fault in section.faults()]


def _name_faults(name: str) -> list[str]:
    """Faults of the job's name, which is the name of the run's folder."""
    shown = repr(name if len(name) <= 60 else name[:60] + "...")
    way_out = "use letters, digits, '-', '_' and '.', such as \"my-job\", and run.folder for another place"
    if not name.strip():
        return [f"name {shown} is empty, and the run's folder is called after the job; {way_out}"]
    if len(name.encode(errors="surrogatepass")) > LONGEST_NAME:
        return [
            f"name {shown} has {len(name)} characters, and a folder called after it at most {LONGEST_NAME}; {way_out}"
        ]
    if name in (".", "..") or "/" in name or "\\" in name or not name.isprintable():
        return [f"name {shown} is no name of a folder, and the run's is called after the job; {way_out}"]
    return []


def _compress_faults(job: JobSpec) -> list[str]:
    plan = job.plan
    return [
        f"plan.{field} is {getattr(plan, field)}, and plan.compress = {plan.compress!r} has no {what}; "
        f'leave it out, or use plan.compress = "{facts.name}"'
        for facts in COMPRESSIONS.values()
        for field, what in facts.reads.items()
        if getattr(plan, field) != PlanSpec.model_fields[field].default and plan.compress != facts.name
    ]


def _pipeline_faults(job: JobSpec) -> list[str]:
    plan, layers = job.plan, job.model.layers
    faults: list[str] = []
    if plan.stages_per_rank == plan.virtual_stages:
        product: str = f"pp {plan.pp} x virtual_stages {plan.virtual_stages} = {plan.num_stages}"
    else:
        product = say(
            "pp {pp} x {stages} stages a rank with {schedule} = {all}",
            pp=plan.pp,
            stages=plan.stages_per_rank,
            schedule=plan.schedule,
            all=plan.num_stages,
        )
    if plan.layout:
        if len(plan.layout) != plan.num_stages:
            faults.append(
                f"plan.layout names {counted(len(plan.layout), 'stage')}, and {product}; "
                f"give {counted(plan.num_stages, 'number')}"
            )
        elif sum(plan.layout) != layers:
            faults.append(
                f"plan.layout places {' + '.join(map(str, plan.layout))} = {sum(plan.layout)} layers, and the "
                f"model has {layers}; for example {plan.model_copy(update={'layout': []}).stage_layers(layers)}"
            )
        else:
            empty = [stage for stage, count in enumerate(plan.layout) if count == 0]
            faults += [
                f"plan.layout leaves stage {stage} with nothing to do; only the first stage (embedding) and the last "
                f"(head and loss) can be without layers"
                for stage in empty
                if 0 < stage < plan.num_stages - 1
            ]
    elif plan.num_stages > layers:
        # Embedding and head are work for two further stages, but only if the user asks for that.
        hint = say(", or say so in plan.layout") if plan.num_stages <= layers + 2 else ""
        faults.append(
            say(
                "{product} stages for {layers} leaves stages without a layer; use at most {most}{hint}",
                product=product,
                layers=counted_phrase(layers, "layer"),
                most=layers,
                hint=hint,
            )
        )
    return faults


def _zero_faults(job: JobSpec) -> list[str]:
    plan, faults = job.plan, []
    replicas = plan.replicas
    if plan.zero_ranks and replicas % plan.zero_ranks:
        product = f"plan.dp {plan.dp}" if plan.cp == 1 else f"dp {plan.dp} x cp {plan.cp} = {replicas}"
        faults.append(
            f"plan.zero_ranks {plan.zero_ranks} does not divide {product} ({replicas} / {plan.zero_ranks} = "
            f"{replicas / plan.zero_ranks:.2f}); use {all_divisors(replicas)}"
        )
    if plan.zero_ranks and not plan.zero:
        faults.append(
            f"plan.zero_ranks {plan.zero_ranks} says over how many ranks ZeRO shards, and plan.zero is 0; "
            f"set plan.zero to 1, 2 or 3, or plan.zero_ranks to 0"
        )
    if 0 < plan.zero_ranks < replicas and plan.num_copies > 1:
        faults.append(
            f"{plan.schedule} holds each stage twice, so its replicas are 2 x {replicas} = {2 * replicas} ranks, which "
            f"hybrid sharding over plan.zero_ranks {plan.zero_ranks} does not cut; set plan.zero_ranks to 0"
        )
    if plan.offload_parameters and plan.zero < 3:
        faults.append(
            f"plan.offload_parameters keeps shards of the parameters in host memory until they are gathered, and "
            f"plan.zero {plan.zero} holds them whole; set plan.zero to 3, or plan.offload_parameters to false"
        )
    if plan.offload_optimizer and not SCHEDULES[plan.schedule].drains:
        faults.append(
            f"schedule {plan.schedule!r} updates weights while the pipeline is full, and plan.offload_optimizer "
            f"{plan.offload_optimizer:g} would make each update wait for the host; set plan.offload_optimizer to 0"
        )
    if plan.zero and not SCHEDULES[plan.schedule].drains:
        faults.append(
            f"schedule {plan.schedule!r} keeps several versions of the whole weights, and plan.zero {plan.zero} shards "
            f"what an update works on; set plan.zero to 0, or use a schedule that drains, such as 1f1b"
        )
    return faults


def _fold_faults(job: JobSpec) -> list[str]:
    plan, faults = job.plan, []
    if plan.expert_tp_size not in (1, plan.tp):
        return [
            f"plan.expert_tp {plan.expert_tp} is neither 1 nor plan.tp {plan.tp}: experts are cut over tp like the "
            f"other matrices, or not at all; use {'1' if plan.tp == 1 else f'1 or {plan.tp}'}"
        ]
    ranks = plan.stage_ranks // plan.expert_tp_size
    if ranks % plan.ep:
        axes = f"dp {plan.dp} x cp {plan.cp}" + (f" x tp {plan.tp}" if plan.expert_tp_size < plan.tp else "")
        faults.append(
            f"plan.ep {plan.ep} does not divide {axes} = {ranks}, the ranks of a stage that experts are spread over "
            f"({ranks} / {plan.ep} = {ranks / plan.ep:.2f}); use {all_divisors(ranks)}"
        )
    if plan.expert_tp_size < plan.tp and not plan.sequence_parallel:
        faults.append(
            f"plan.expert_tp 1 has each of the {plan.tp} ranks of tp send its own tokens to whole experts, and without "
            f"sequence parallel they all have the same ones; set plan.sequence_parallel to true, or plan.expert_tp to "
            f"{plan.tp}"
        )
    if not faults:
        faults += _order_faults(plan)
    if plan.dispatch == "node-aware" and plan.ep > 1 and not faults:
        faults += _dispatch_faults(plan, node_devices(job.cluster))
    return faults


def _order_faults(plan: PlanSpec) -> list[str]:
    inside = ORDERS[number_of(plan.order)].inside
    if inside is None or plan.pp == 1:
        return []
    dense, experts = inside_pipeline(plan, inside)
    if max(dense, experts) % min(dense, experts) == 0:
        return []
    return [
        f"plan.order {plan.order} has {' and '.join(inside)} inside pp, which are {dense} neighbouring ranks of a "
        f"stage and {experts} as experts fold them, and neither divides the other; put ep outside of pp, or use the "
        f"order {DEFAULT_ORDER}"
    ]


def _dispatch_faults(plan: PlanSpec, devices_per_node: int) -> list[str]:
    if devices_per_node == 0:
        return [
            "plan.dispatch 'node-aware' sends a token once to each node, and cluster.devices_per_node does not say "
            "where nodes end; set it, or plan.dispatch to 'direct'"
        ]
    try:
        ep_ranks_of_node(plan, devices_per_node)
    except ValueError as error:
        return [f"plan.dispatch 'node-aware': {error}; use a plan.ep for which one divides the other, or 'direct'"]
    return []


def _cluster_faults(job: JobSpec) -> list[str]:
    cluster = job.cluster
    faults = entry_faults("cluster.software", "software", cluster.software, SoftwareSpec)
    if cluster.device != "unknown":
        faults += entry_faults("cluster.device", "devices", cluster.device, DeviceSpec)
    return faults


def _fallback_faults(job: JobSpec) -> list[str]:
    """Faults of the fallback plans, without the faults that the job has with its first plan."""
    plans = [job.plan, *(job.plan.fallback_plan(number) for number in range(len(job.plan.fallback)))]
    known_faults, faults = set(faults_on_any_cluster(job)), list[str]()
    for number, plan in enumerate(plans[1:]):
        field = f"plan.fallback[{number}]"
        fallback = job.model_copy(update={"plan": plan})
        plan_faults = rank_faults(fallback) or faults_on_any_cluster(fallback)
        faults += [f"{field}: {fault}" for fault in plan_faults if fault not in known_faults]
        worlds = [earlier.world for earlier in plans[: number + 1]]
        if plan.world in worlds:
            first = worlds.index(plan.world)
            faults.append(
                f"{field}: {plan.degrees} = {counted(plan.world, 'rank')}, for which "
                f"{f'plan.fallback[{first - 1}]' if first else 'the plan itself'} is taken; leave it out, or use other "
                "degrees"
            )
    return faults


def _optimizer_faults(job: JobSpec) -> list[str]:
    optimizer = job.optimizer
    if optimizer.warmup_steps > optimizer.steps:
        return [
            say(
                "optimizer.warmup_steps {warmup} is more than optimizer.steps {steps}, so the peak learning rate is "
                "never reached; use at most {steps}",
                warmup=optimizer.warmup_steps,
                steps=optimizer.steps,
            )
        ]
    return []
