"""Claims about degrees of parallelism: they multiply, and a split into groups is not the one transposed."""

from shardwright.config.cluster_facts import node_devices
from shardwright.config.job import JobSpec
from shardwright.config.phrase import Phrase, say
from shardwright.explain.contradictions.told_claim import ToldClaim
from shardwright.sharding.stage_parameters import num_parameters

# The degrees of a model of a trillion parameters on 3,072 devices (Narayanan et al. 2021, arXiv 2104.04473, table 1).
_TRILLION_DEGREES = {"pp": 64, "dp": 6, "tp": 8}
_TRILLION = 1e12
# Degrees of Llama 3 405B (Grattafiori et al. 2024, arXiv 2407.21783, table 4): the first row has 8,192 devices and 64
# replicas, the second 16,384 and 128.
_LLAMA3_DEGREES, _LLAMA3_REPLICAS = {"tp": 8, "cp": 1, "pp": 16}, (64, 128)


def same_devices(job: JobSpec) -> Phrase | None:
    """Tensor and pipeline parallelism that each would fit a node, and together do not."""
    tp, pp, node = job.plan.tp, job.plan.pp, node_devices(job.cluster)
    if min(tp, pp) == 1 or not max(tp, pp) <= node < tp * pp:
        return None
    return say(
        "degrees multiply: tp {tp} x pp {pp} = {devices} devices, and a node has {node}",
        tp=tp,
        pp=pp,
        devices=tp * pp,
        node=node,
    )


def transposed_groups(job: JobSpec) -> Phrase | None:
    """A batch whose sequences a replica are as many as the devices of a node, and its replicas as many as nodes."""
    dp, node = job.plan.dp, node_devices(job.cluster)
    sequences = job.batch.global_batch_size // dp
    if min(dp, node) < 2 or job.plan.world != dp * node or sequences != node or sequences == dp:
        return None
    return say(
        "dp {dp} makes {dp} groups of {sequences} sequences; {sequences} groups of {dp} would be dp {sequences}",
        dp=dp,
        sequences=sequences,
    )


def trillion_degrees(job: JobSpec) -> Phrase | None:
    """The degrees of a trillion parameters, told of a smaller model."""
    parameters = num_parameters(job.model)
    if any(getattr(job.plan, axis) != degree for axis, degree in _TRILLION_DEGREES.items()):
        return None
    if parameters > _TRILLION / 2:
        return None
    return say(
        "64 x 6 x 8 = 3,072 devices trained 1,008 billion parameters (Narayanan et al. 2021, table 1); this model has "
        "{billions:,.0f} billion, and {layers} layers on 64 stages",
        billions=parameters / 1e9,
        layers=job.model.layers,
    )


def half_the_devices(job: JobSpec) -> Phrase | None:
    """The degrees of Llama 3 405B on 8,192 devices, told of 16,384."""
    plan = job.plan
    degrees = {axis: getattr(plan, axis) for axis in _LLAMA3_DEGREES}
    if degrees != _LLAMA3_DEGREES or plan.dp not in _LLAMA3_REPLICAS:
        return None
    fewer, more = _LLAMA3_REPLICAS
    return say(
        "8 x 1 x 16 x {fewer} = {product:,}, and 16,384 devices have {more} replicas (Grattafiori et al. 2024, table "
        "4); here dp {dp} makes {world:,}",
        fewer=fewer,
        product=8 * 16 * fewer,
        more=more,
        dp=plan.dp,
        world=plan.world,
    )


CLAIMS = (
    ToldClaim("same-devices", say("tp and pp over the same devices of a node"), same_devices),
    ToldClaim(
        "transposed-groups", say("the batch split into as many groups as a replica has sequences"), transposed_groups
    ),
    ToldClaim("trillion-degrees", say("64 x 6 x 8 devices trained GPT-3"), trillion_degrees),
    ToldClaim("half-the-devices", say("8 x 1 x 16 x 64 are 16,384 devices"), half_the_devices),
)
