"""Small jobs on made-up tokens, and the steps that tests run on them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.plan import PlanSpec
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.layers.recompute_cost import Again
from shardwright.measure.verdict import Record, Verdict, compare
from shardwright.memory.step_collectives import Traffic
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.tensor.parameter import placed_parameters
from shardwright.sharding.token_marks import FILLING, UNCOUNTED
from shardwright.train.build import Replica, build
from shardwright.train.train_step import StepResult, evaluate, train_step
from support.ranks import leaves_nothing, run_on_mesh

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 4, "ffn": 48},
    "llama-tied": {"kv_heads": 8, "ffn": 48, "tied_embeddings": True},
    "gpt": {
        "norm": "layernorm", "positions": "learned", "gated_mlp": False, "activation": "gelu-tanh", "bias": True,
    },
    "gpt-tied": {
        "norm": "layernorm", "positions": "learned", "gated_mlp": False, "activation": "gelu-tanh", "bias": True,
        "tied_embeddings": True, "kv_heads": 4,
    },
}  # fmt: skip
# Other kinds of attention, which tests of attention add.
LATENT = {"kv_rank": 12, "q_rank": 10, "nope_dim": 4, "rope_dim": 4, "value_dim": 6}
ATTENTIONS: dict[str, dict[str, Any]] = {
    "qwen": {"kv_heads": 4, "ffn": 48, "qk_norm": "head"},
    "latent": {"ffn": 48, "latent": LATENT},
    "latent-plain-queries": {"ffn": 48, "latent": LATENT | {"q_rank": 0}},
}  # fmt: skip
# Attention by other rules and with other positions, which tests of these add.
RULES: dict[str, dict[str, Any]] = {
    "olmo": {"kv_heads": 4, "ffn": 48, "qk_norm": "full", "qkv_bias": True},
    "gemma": {
        "kv_heads": 4, "ffn": 48, "attention_softcap": 2.0, "attention_scale": 0.4,
        "window": {"size": 5, "full_every": 2, "rotary_base": 100.0},
    },
    "gpt-oss": {"kv_heads": 4, "ffn": 48, "bias": True, "sinks": True, "window": {"size": 6, "full_every": 2}},
    "bloom": {"ffn": 48, "positions": "alibi", "bias": True},
    "llama4": {
        "kv_heads": 4, "ffn": 48, "qk_norm": "l2", "no_rotary_every": 2, "clip_qkv": 0.4,
        "temperature_tuning": {"scale": 0.3, "floor": 4}, "window": {"size": 5, "full_every": 2, "chunked": True},
    },
    "smollm": {"kv_heads": 4, "ffn": 48, "no_rotary_every": 2, "rotary_dim": 2},
    "hunyuan": {
        "kv_heads": 4, "ffn": 48, "qk_norm": "head-turned",
        "temperature_tuning": {"scale": 0.3, "floor": 4, "in_all_layers": True},
    },
}  # fmt: skip
# Kinds of experts, which tests of experts add.
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": KINDS["llama"] | {
        "moe": {"experts": 4, "softmax_over": "chosen", "aux_loss": "switch", "z_coefficient": 1e-3},
    },
    "deepseek": ATTENTIONS["latent"] | {
        "moe": {
            "experts": 8, "top_k": 3, "ffn": 16, "shared_experts": 2, "first_dense": 1, "gate": "sigmoid",
            "num_groups": 4, "groups_kept": 2, "routed_scaling": 2.5, "bias_update": 0.01, "aux_loss": "switch",
            "aux_scope": "sequence",
        },
    },
    "qwen-moe": ATTENTIONS["qwen"] | {
        "moe": {
            "experts": 4, "ffn": 24, "shared_experts": 1, "shared_ffn": 40, "shared_gate": True, "normalise": False,
            "aux_loss": "switch", "aux_scope": "global",
        },
    },
    "switch": KINDS["gpt"] | {
        "moe": {"experts": 4, "gate": "switch", "every": 2, "aux_loss": "switch", "capacity_factor": 1.0},
    },
    "gshard": KINDS["gpt-tied"] | {
        "moe": {
            "experts": 4, "gate": "gshard", "every": 2, "aux_loss": "gshard", "capacity_factor": 1.0,
            "overflow": "drop-probability",
        },
    },
    "expert-choice": KINDS["llama"] | {"moe": {"experts": 4, "gate": "expert-choice"}},
    "correlation": KINDS["llama"] | {
        "moe": {
            "experts": 8, "gate": "correlation", "top_k": 3, "partners": 3, "ffn": 16, "capacity_factor": 1.2,
            "overflow": "reroute",
        },
    },
}  # fmt: skip

# Kinds that predict further tokens, which tests of that add.
FURTHER: dict[str, dict[str, Any]] = {
    "llama-mtp": KINDS["llama"] | {"mtp_layers": 1},
    "gpt-tied-mtp": KINDS["gpt-tied"] | {"mtp_layers": 2},
    "deepseek-mtp": EXPERTS["deepseek"] | {"mtp_layers": 1},
}
# Other blocks: norms elsewhere, scales, both halves at once; and experts as gpt-oss and Llama 4 have them.
BLOCKS: dict[str, dict[str, Any]] = {
    "after": KINDS["llama"] | {
        "norm_place": "after", "residual_scale": 0.5, "embedding_scale": 3.0, "logit_scale": 0.5, "activation": "relu2",
    },
    "around": KINDS["gpt-tied"] | {
        "norm_place": "around", "logit_softcap": 2.0, "position_offset": 2, "activation": "relu",
    },
    "unweighed": KINDS["gpt"] | {
        "norm_weight": False, "embedding_norm": True, "positions": "rotary", "activation": "quick-gelu",
    },
    "one-norm": KINDS["llama"] | {"parallel_block": "one-norm", "bias": True, "embedding_norm": True},
    "gpt-j": KINDS["gpt"] | {
        "parallel_block": "one-norm", "bias": False, "mlp_bias": True, "head_bias": True, "positions": "rotary",
    },
    "command": KINDS["llama"] | {
        "norm": "layernorm", "norm_bias": False, "parallel_block": "one-norm", "attention_bias": True,
    },
    "two-norms": KINDS["gpt"] | {"parallel_block": "two-norms", "residual_scale": 0.5},
}  # fmt: skip
EXPERT_BLOCKS: dict[str, dict[str, Any]] = {
    "gpt-oss-moe": KINDS["llama"] | {
        "bias": True, "activation": "clamped-silu",
        "moe": {"experts": 4, "softmax_over": "chosen", "router_bias": True, "aux_loss": "switch"},
    },
    "llama4-moe": KINDS["llama"] | {
        "norm_place": "after",
        "moe": {
            "experts": 4, "top_k": 1, "gate": "sigmoid", "normalise": False, "weigh": "input", "shared_experts": 1,
            "aux_loss": "switch",
        },
    },
    "plain-input": KINDS["gpt"] | {
        "norm_place": "around", "activation": "relu", "moe": {"experts": 4, "weigh": "input", "every": 2},
    },
}  # fmt: skip


def small_job(kind: str = "llama", batch: int = 0, layers: int = 0, **plan: Any) -> JobSpec:
    """A model of some thousand parameters, whose vocabulary does not divide by 2 or 4.

    Layers of 0 are those that the plan speaks of, or two, or one a stage. A batch of 0 is eight samples, or four where
    each is many collectives over tp.
    """
    batch = batch or (4 if plan.get("tp", 1) > 1 else 8)
    layers = layers or sum(plan.get("layout", ())) or len(plan.get("recompute_layers", ()))
    layers = layers or max(2, PlanSpec(**plan).num_stages)
    kinds = KINDS | ATTENTIONS | RULES | EXPERTS | FURTHER | BLOCKS | EXPERT_BLOCKS
    model = {"layers": layers, "hidden": 32, "heads": 8, "vocab": 61, "sequence": 16} | kinds[kind]
    return make_job(
        {
            "model": model,
            "plan": plan,
            "batch": {"global_batch_size": batch},
            # A norm that clips, and a rate that moves the weights visibly in a few steps. Adam divides a gradient by
            # its own size: with a tiny epsilon, elements that are nearly zero would turn rounding into full steps.
            "optimizer": {
                "learning_rate": 3e-3, "warmup_steps": 2, "steps": 10, "clip_grad_norm": 0.5, "epsilon": 1e-5,
            },
        }
    )  # fmt: skip


def context_bytes(job: JobSpec) -> float:
    """Bytes over cp in the forward of one layer, of one microbatch, as the ledger counts them."""
    exchanges = (e for operator in Again.of(job).chain for e in operator.forward if e.axis == "cp")
    # Around a ring a rank passes on what the others have.
    return sum(float(e.size * ((job.plan.cp - 1) / job.plan.cp if e.kind == "ring" else 1)) for e in exchanges)


def with_optimizer(job: JobSpec, **optimizer: Any) -> JobSpec:
    """A job with some fields of its optimizer, and others for which these have no use as they are."""
    fields = job.model_dump(exclude_unset=True)
    return make_job(fields | {"optimizer": fields["optimizer"] | optimizer})


def made_up_tokens(job: JobSpec, step: int) -> torch.Tensor:
    """The global batch of a step, [B, S + 1]: skewed, so that there is something to learn."""
    tokens, begins = skewed_tokens(job, step)
    if not job.data.separate_documents:
        return tokens
    begins[0] = True  # nothing in this sample has a loss
    begins[1, 8:] = True
    return marked(tokens, begins)


def marked(tokens: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    """Tokens with the marks of separate documents, as data give them: some of the large ones have no loss. The end of
    the third sample only fills it up, and so does all of the fourth."""
    asked = torch.where(tokens % 5 == 4, tokens + UNCOUNTED, tokens)
    result = torch.where(begins, -1 - tokens, asked)
    for sample, first in ((2, 2 * tokens.shape[1] // 3), (3, 0)):
        result[sample : sample + 1, first:] = UNCOUNTED + FILLING
        result[sample : sample + 1, first : first + 1] = -1 - FILLING
    return result


def skewed_tokens(job: JobSpec, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of a global batch, small ones more often than large, and where documents may begin, both [B, S + 1]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (job.batch.global_batch_size, job.model.sequence + 1)
    tokens = (torch.rand(shape, generator=generator).square() * job.model.vocab).long()
    return tokens, torch.rand(shape, generator=generator) < 0.15


def my_tokens(mesh: Mesh, job: JobSpec, step: int) -> torch.Tensor:
    """The samples of a made-up batch that a rank of `mesh` trains on, [B / dp, S + 1]."""
    job = job.at_step(step)
    share = job.batch.global_batch_size // job.plan.dp
    return made_up_tokens(job, step)[mesh.dp.index * share :][:share]


def train(replica: Replica, mesh: Mesh, job: JobSpec, num_steps: int) -> list[StepResult]:
    """Train a replica that was just built on the made-up batches 0, 1, ..., one each step."""
    return [train_step(replica, step, my_tokens(mesh, job, step)) for step in range(num_steps)]


def record_after(steps: list[StepResult], replica: Replica, mesh: Mesh, job: JobSpec) -> Record:
    """The record of a replica that has trained those steps; it evaluates the made-up batch that follows them."""
    boxes = []
    with replica.gathered():
        for stage in replica.stages.values():
            boxes += [(p.place, p.detach().clone()) for p in placed_parameters(stage).values()]
    job = job.grown()
    return Record(steps, boxes, evaluate(replica, my_tokens(mesh, job, len(steps))))


@leaves_nothing
def record(mesh: Mesh, job: JobSpec, num_steps: int) -> Record:
    """Build a job on this rank, train some steps, and take the record."""
    replica = build(job, mesh)
    return record_after(train(replica, mesh, job, num_steps), replica, mesh, job)


_remembered: dict[tuple[Callable[..., Any], str, tuple[Any, ...]], list[Any]] = {}


def remembered(job: JobSpec, function: Callable[..., Any], *args: Any) -> list[Any]:
    """The results of `function(mesh, job, *args)` on every rank of the job, from one run. Nobody may change them.

    For what many tests compare with.
    """
    key = function, job.model_dump_json(), args
    if key not in _remembered:
        _remembered[key] = run_on_mesh(job, function, job, *args)
    return _remembered[key]


def by_one_rank(job: JobSpec, function: Callable[..., Any], *args: Any) -> Any:
    """The same of the job on one rank, in this process."""
    (result,) = remembered(job.as_one_rank(), function, *args)
    return result


def against_one_rank(job: JobSpec, num_steps: int = 2) -> Verdict:
    """Run a plan on Gloo ranks, and one rank in this process, and compare.

    The second step is of weights and an optimizer that the first has moved; a third would only do the same again.
    """
    return compare(run_on_mesh(job, record, job, num_steps), by_one_rank(job, record, num_steps))


def shapes() -> Any:
    """Hypothesis: (name, ranks, microbatches, stages a rank) of any schedule by name that is made without a search."""
    from hypothesis import strategies as st

    from support.programs import schedule_faults

    names = [name for name in SCHEDULES if name != "auto"]
    looped = [name for name in names if SCHEDULES[name].stages_per_rank == 0]
    any_name = st.tuples(st.sampled_from(names), st.integers(1, 16), st.integers(1, 64), st.integers(2, 4))
    fitting = any_name.map(lambda s: (s[0], max(1, s[1] // s[3]), s[2], s[3]) if s[0] in looped else (*s[:3], 1))
    return fitting.filter(lambda shape: not schedule_faults(*shape))


def of_replicas(traffic: Mapping[str, Traffic]) -> dict[str, Traffic]:
    """The entries of the axes of data parallel."""
    return {name: entry for name, entry in traffic.items() if name.split(" ", 1)[1].startswith(("dp", "edp"))}


def ring_bytes(traffic: Mapping[str, Traffic], num_ranks: Mapping[str, int]) -> float:
    """The bytes that a rank sends if every collective is a ring, by hand; `num_ranks` is by axis.

    A ring of d ranks sends (d - 1) / d of the payload in an all-gather or a reduce-scatter, and twice that in an
    all-reduce, which is one after the other (Patarasuk and Yuan 2009, J. Parallel Distrib. Comput. 69, section 3).
    """
    passes = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
    total = 0.0
    for name, entry in traffic.items():
        collective, axis = name.split(" ", 1)
        total += passes[collective] * entry.payload_bytes * (num_ranks[axis] - 1) / num_ranks[axis]
    return total
