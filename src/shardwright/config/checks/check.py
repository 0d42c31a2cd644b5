"""Check that the plan fits the model, the batch and the cluster. Every fault has its arithmetic and a way out.

These checks are arithmetic on the job and need nothing else. Facts of the machine (free memory, CUDA devices, files)
are checked where they are used.
"""

from shardwright.config import catalog
from shardwright.config.catalog_entry import entry_faults
from shardwright.config.checks.check_adapters import adapter_faults
from shardwright.config.checks.check_cluster import part_faults, topology_faults
from shardwright.config.checks.check_context import context_faults
from shardwright.config.checks.check_data import data_faults
from shardwright.config.checks.check_division import batch_faults, tensor_faults, world_faults
from shardwright.config.checks.check_experts import expert_faults
from shardwright.config.checks.check_model import model_faults
from shardwright.config.checks.check_precision import float8_faults, master_faults, moment_faults
from shardwright.config.checks.check_recompute import recompute_faults
from shardwright.config.checks.check_recovery import checkpoint_faults, health_faults
from shardwright.config.checks.check_size import rank_faults, size_faults
from shardwright.config.checks.check_zero import zero_faults
from shardwright.config.cluster import DeviceSpec
from shardwright.config.cluster_facts import node_devices
from shardwright.config.compression_facts import COMPRESSIONS
from shardwright.config.divisors import all_divisors
from shardwright.config.job import JobSpec
from shardwright.config.phrase import both, either, fixed, say
from shardwright.config.plan import PlanSpec, ep_ranks_of_node
from shardwright.config.rank_order import DEFAULT_ORDER, ORDERS, inside_pipeline, number_of
from shardwright.config.software import SoftwareSpec, software_of
from shardwright.config.units import counted_phrase

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
        *zero_faults(job.plan),
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
    """Faults of sections by themselves. Faults of the batch are in `batch_faults`, whose other rules need it right."""
    sections = (
        job.cluster,
        job.plan,
        job.precision,
        job.data,
        job.optimizer,
        job.run,
        job.checkpoint,
        job.health,
    )
    return [*model_faults(job.model), *(fault for section in sections for fault in section.faults())]


def _name_faults(name: str) -> list[str]:
    """Faults of the job's name, which is the name of the run's folder."""
    shown = repr(name if len(name) <= 60 else name[:60] + "...")
    way_out = say("use letters, digits, '-', '_' and '.', such as \"my-job\", and run.folder for another place")
    if not name.strip():
        return [
            say(
                "name {shown} is empty, and the run's folder is called after the job; {way_out}",
                shown=shown,
                way_out=way_out,
            )
        ]
    if len(name.encode(errors="surrogatepass")) > LONGEST_NAME:
        return [
            say(
                "name {shown} has {count} characters, and a folder called after it at most {most}; {way_out}",
                shown=shown,
                count=len(name),
                most=LONGEST_NAME,
                way_out=way_out,
            )
        ]
    if name in (".", "..") or "/" in name or "\\" in name or not name.isprintable():
        return [
            say(
                "name {shown} is no name of a folder, and the run's is called after the job; {way_out}",
                shown=shown,
                way_out=way_out,
            )
        ]
    return []


def _compress_faults(job: JobSpec) -> list[str]:
    plan = job.plan
    return [
        say(
            "plan.{field} is {value}, and plan.compress = {compression} has no {what}; leave it out, or use "
            'plan.compress = "{name}"',
            field=field,
            value=getattr(plan, field),
            compression=repr(plan.compress),
            what=fixed(what),
            name=facts.name,
        )
        for facts in COMPRESSIONS.values()
        for field, what in facts.reads.items()
        if getattr(plan, field) != PlanSpec.model_fields[field].default and plan.compress != facts.name
    ]


def _pipeline_faults(job: JobSpec) -> list[str]:
    plan, layers = job.plan, job.model.layers
    if plan.layout:
        return _layout_faults(plan, layers)
    if plan.num_stages <= layers:
        return []
    # Embedding and head are work for two further stages, but only if the user asks for that.
    hint = say(", or say so in plan.layout") if plan.num_stages <= layers + 2 else ""
    return [
        say(
            "{product} stages for {layers} leaves stages without a layer; use at most {most}{hint}",
            product=_product_of_stages(plan),
            layers=counted_phrase(layers, "layer"),
            most=layers,
            hint=hint,
        )
    ]


def _layout_faults(plan: PlanSpec, layers: int) -> list[str]:
    """Faults of plan.layout, which places so many layers on each stage."""
    if len(plan.layout) != plan.num_stages:
        return [
            say(
                "plan.layout names {stages}, and {product}; give {numbers}",
                stages=counted_phrase(len(plan.layout), "stage"),
                product=_product_of_stages(plan),
                numbers=counted_phrase(plan.num_stages, "number"),
            )
        ]
    if sum(plan.layout) != layers:
        return [
            say(
                "plan.layout places {terms} = {placed} layers, and the model has {layers}; for example {example}",
                terms=" + ".join(map(str, plan.layout)),
                placed=sum(plan.layout),
                layers=layers,
                example=plan.model_copy(update={"layout": []}).stage_layers(layers),
            )
        ]
    empty = [stage for stage, count in enumerate(plan.layout) if count == 0]
    return [
        say(
            "plan.layout leaves stage {stage} with nothing to do; only the first stage (embedding) and the "
            "last (head and loss) can be without layers",
            stage=stage,
        )
        for stage in empty
        if 0 < stage < plan.num_stages - 1
    ]


def _product_of_stages(plan: PlanSpec) -> str:
    """ "pp 4 x virtual_stages 2 = 8", the number of stages with its arithmetic."""
    if plan.stages_per_rank == plan.virtual_stages:
        return say(
            "pp {pp} x virtual_stages {stages} = {all}", pp=plan.pp, stages=plan.virtual_stages, all=plan.num_stages
        )
    return say(
        "pp {pp} x {stages} stages a rank with {schedule} = {all}",
        pp=plan.pp,
        stages=plan.stages_per_rank,
        schedule=plan.schedule,
        all=plan.num_stages,
    )


def _fold_faults(job: JobSpec) -> list[str]:
    plan, faults = job.plan, list[str]()
    if plan.expert_tp_size not in (1, plan.tp):
        return [
            say(
                "plan.expert_tp {expert_tp} is neither 1 nor plan.tp {tp}: experts are cut over tp like the other "
                "matrices, or not at all; use {choices}",
                expert_tp=plan.expert_tp,
                tp=plan.tp,
                choices=either(["1"] if plan.tp == 1 else ["1", str(plan.tp)]),
            )
        ]
    ranks = plan.stage_ranks // plan.expert_tp_size
    if ranks % plan.ep:
        axes = f"dp {plan.dp} x cp {plan.cp}" + (f" x tp {plan.tp}" if plan.expert_tp_size < plan.tp else "")
        faults.append(
            say(
                "plan.ep {ep} does not divide {axes} = {ranks}, the ranks of a stage that experts are spread over "
                "({ranks} / {ep} = {quotient:.2f}); use {choices}",
                ep=plan.ep,
                axes=axes,
                ranks=ranks,
                quotient=ranks / plan.ep,
                choices=all_divisors(ranks),
            )
        )
    if plan.expert_tp_size < plan.tp and not plan.sequence_parallel:
        faults.append(
            say(
                "plan.expert_tp 1 has each of the {tp} ranks of tp send its own tokens to whole experts, and without "
                "sequence parallel they all have the same ones; set plan.sequence_parallel to true, or "
                "plan.expert_tp to {tp}",
                tp=plan.tp,
            )
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
        say(
            "plan.order {order} has {axes} inside pp, which are {dense} neighbouring ranks of a stage and {experts} "
            "as experts fold them, and neither divides the other; put ep outside of pp, or use the order {default}",
            order=plan.order,
            axes=both(inside),
            dense=dense,
            experts=experts,
            default=DEFAULT_ORDER,
        )
    ]


def _dispatch_faults(plan: PlanSpec, devices_per_node: int) -> list[str]:
    if devices_per_node == 0:
        return [
            say(
                "plan.dispatch 'node-aware' sends a token once to each node, and cluster.devices_per_node does not "
                "say where nodes end; set it, or plan.dispatch to 'direct'"
            )
        ]
    try:
        ep_ranks_of_node(plan, devices_per_node)
    except ValueError as error:
        return [
            say(
                "plan.dispatch 'node-aware': {error}; use a plan.ep for which one divides the other, or 'direct'",
                error=error.args[0],
            )
        ]
    return []


def _cluster_faults(job: JobSpec) -> list[str]:
    cluster = job.cluster
    faults = _software_faults(cluster.software)
    if cluster.device != "unknown":
        faults += entry_faults("cluster.device", "devices", cluster.device, DeviceSpec)
    return faults


def _software_faults(name: str) -> list[str]:
    """Faults of the entry that names the software, or of the changes behind it (NAME+CHANGE+...)."""
    entry, *changes = [name] if catalog.is_file(name) else name.split("+")
    faults = entry_faults("cluster.software", "software", entry, SoftwareSpec)
    if faults or not changes:
        return faults
    try:
        software_of(name)
    except KeyError as error:
        return [f"cluster.software {name!r}: {error.args[0]}"]
    return []


def _fallback_faults(job: JobSpec) -> list[str]:
    """Faults of the fallback plans, without the faults that the job has with its first plan."""
    if not job.plan.fallback:
        return []
    plans = [job.plan, *(job.plan.fallback_plan(number) for number in range(len(job.plan.fallback)))]
    known_faults, faults = set(faults_on_any_cluster(job)), list[str]()
    for number, plan in enumerate(plans[1:]):
        field = f"plan.fallback[{number}]"
        fallback = job.model_copy(update={"plan": plan})
        plan_faults = rank_faults(fallback) or faults_on_any_cluster(fallback)
        faults += [
            say("{field}: {fault}", field=field, fault=fault) for fault in plan_faults if fault not in known_faults
        ]
        worlds = [earlier.world for earlier in plans[: number + 1]]
        if plan.world in worlds:
            first = worlds.index(plan.world)
            taken = f"plan.fallback[{first - 1}]" if first else say("the plan itself")
            faults.append(
                say(
                    "{field}: {degrees} = {ranks}, for which {taken} is taken; leave it out, or use other degrees",
                    field=field,
                    degrees=plan.degrees,
                    ranks=counted_phrase(plan.world, "rank"),
                    taken=taken,
                )
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
