"""Jobs drawn at random over the whole space of fields that decide what a step computes.

Most draws are legal: shapes are drawn after the degrees that must divide them. Some are left to chance, so that checks
are asked too. A draw is a function of (seed, number) alone.
"""

import math
import random
from typing import Any

from fuzz.draw_attention import draw_attention
from shardwright.config.adapter import EXPERT_TARGETS, TARGETS
from shardwright.config.float8_facts import FLOAT8_RECIPES
from shardwright.config.gate_facts import GATES
from shardwright.config.network_facts import NETWORKS
from shardwright.config.rank_order import AXES, ORDERS
from shardwright.config.rate_schedules import DECAY_SHAPES, RAMP_UP_RULES, RATE_SCHEDULES
from shardwright.config.recompute_policy import OPERATORS
from shardwright.config.schedule_facts import SCHEDULES

Fields = dict[str, Any]

DRAWN = [name for name in SCHEDULES.names if name != "sequential"]
MOST_RANKS = 8


def draw(seed: int, number: int) -> Fields:
    """The fields of one job, of at most MOST_RANKS ranks and a few thousand parameters."""
    rng = random.Random(f"{seed}:{number}")
    plan = _degrees(rng)
    _stages(rng, plan)
    model = _model(rng, plan)
    _state(rng, plan)
    _recompute(rng, plan, model["layers"])
    per_replica = plan["microbatch_size"] * rng.choice(_microbatches(plan))
    fields: Fields = {
        "model": model,
        "plan": plan,
        "batch": {"global_batch_size": plan["dp"] * per_replica + (rng.random() < 0.02)},
        "precision": _precision(rng),
        "optimizer": {
            "learning_rate": rng.choice([1e-3, 3e-3]), "warmup_steps": rng.choice([0, 2]), "steps": 8,
            "weight_decay": rng.choice([0.0, 0.1]), "beta1": rng.choice([0.0, 0.9]), "beta2": rng.choice([0.5, 0.95]),
            "epsilon": rng.choice([1e-5, 1e-3]), "clip_grad_norm": rng.choice([0.0, 0.3, 1.0]),
        },
        "run": {"seed": rng.randrange(2**40)},
    }  # fmt: skip
    if plan["schedule"].startswith("pipedream"):
        fields["optimizer"]["clip_grad_norm"] = 0.0
    if rng.random() < 0.25:
        fields["data"] = {"separate_documents": True} | _sources(random.Random(fields["run"]["seed"]))
    if plan.get("dispatch") == "node-aware" or rng.random() < 0.2:
        world = plan["dp"] * plan["cp"] * plan["tp"] * plan["pp"]
        here = rng.choice([n for n in (1, 2, 4, 8) if world % n == 0])
        fields["cluster"] = {"devices_per_node": here, "nodes": world // here}
    if rng.random() < 0.4:
        plan["order"] = _order(rng)
    if rng.random() < 0.15:
        plan["fallback"] = _fallback(rng, plan)
        fields["run"] |= {"max_restarts": rng.randint(0, 3), "restart_window_s": rng.choice([1e-3, 60.0])}
    if rng.random() < 0.3:
        health = fields["health"] = _health(rng, plan)
        if "rewind" in health.values() and rng.random() < 0.9:
            fields["checkpoint"] = {"every_steps": rng.choice([1, 4])}
    if rng.random() < 0.1:
        fields["checkpoint"] = fields.get("checkpoint", {}) | {"auto": True}
        if rng.random() < 0.8:  # else it is refused
            fields["cluster"] = fields.get("cluster", {}) | {"hours_between_failures": rng.choice([1e-3, 1e3])}
    if rng.random() < 0.05:
        fields["run"] |= {"profile_steps": rng.choice([0, 1, 3]), "profile_first_step": rng.choice([1, 2])}
    if rng.random() < 0.3:
        fields["checkpoint"] = _checkpoint(rng) | fields.get("checkpoint", {})
    if "moe" in fields["model"] and rng.random() < 0.3:
        fields["precision"]["float8_dispatch"] = True
    if rng.random() < 0.15:
        fields["precision"]["moments"] = "bf16"
        if rng.random() < 0.05:  # refused
            fields["optimizer"]["beta2"] = 0.999
    _masters(random.Random(f"masters {seed}:{number}"), fields)
    _further(random.Random(f"further {seed}:{number}"), fields)
    draw_attention(random.Random(f"attention {seed}:{number}"), fields["model"])
    _block(random.Random(f"block {seed}:{number}"), fields)
    _network(random.Random(f"network {seed}:{number}"), fields)
    _adapter(random.Random(f"adapter {seed}:{number}"), fields)
    _optimizer(random.Random(f"optimizer {seed}:{number}"), fields)
    if min(model["sequence"], model.get("window", {}).get("size", 2)) == 1 and fields["optimizer"]["name"] == "lion":
        # It steps by the sign of a gradient. A softmax over one key has none, and the sign is that of rounding.
        fields["optimizer"]["name"] = "adamw"
    return fields


def _masters(rng: random.Random, fields: Fields) -> None:
    """Weights without masters: of bf16, or refused."""
    if rng.random() < 0.1 and (fields["precision"].get("compute") == "bf16" or rng.random() < 0.1):
        fields["precision"]["master"] = "none"
        if rng.random() < 0.9:
            fields["precision"]["gradients"] = "compute"


def _block(rng: random.Random, fields: Fields) -> None:
    """Norms, the residual stream, activations and experts as some families have them; now and then what is refused."""
    model = fields["model"]
    if rng.random() < 0.5:
        return
    if rng.random() < 0.2:
        model["norm_weight"] = False
    if rng.random() < 0.5:
        model["norm_place"] = rng.choice(["after", "around"])
    elif rng.random() < (0.02 if "moe" in model or "latent" in model else 0.5):
        model["parallel_block"] = rng.choice(["one-norm", "two-norms"])
    if rng.random() < 0.2:
        model["embedding_norm"] = True
    for name in ("embedding_scale", "residual_scale", "logit_scale"):
        if rng.random() < 0.3:
            model[name] = rng.choice([0.25, 0.7, 3.0])
    if rng.random() < 0.3:
        model["logit_softcap"] = rng.choice([2.0, 30.0])
    if rng.random() < 0.5:
        model["activation"] = rng.choice(["relu", "relu2", "quick-gelu", "clamped-silu"])
        model["gated_mlp"] |= model["activation"] == "clamped-silu" and rng.random() < 0.95
    if rng.random() < (0.4 if model["positions"] == "learned" else 0.02):
        model["position_offset"] = rng.choice([1, 2])
    if "moe" in model:
        model["moe"] |= {"router_bias": rng.random() < 0.5, "weigh": rng.choice(["input", "output"])}
    is_refused = rng.random() < 0.03
    if rng.random() < 0.3 and (is_refused or not (model.get("tied_embeddings") or model.get("mtp_layers"))):
        model["head_bias"] = True
    if rng.random() < 0.3 and (is_refused or not (model.get("bias") or "moe" in model)):
        name = "attention_bias" if "latent" not in model and not model.get("qkv_bias") else "mlp_bias"
        model[rng.choice([name, "mlp_bias"])] = True
    if rng.random() < 0.3 and (is_refused or (model["norm"] == "layernorm" and model.get("norm_weight", True))):
        model["norm_bias"] = False


def _adapter(rng: random.Random, fields: Fields) -> None:
    """Adapters of some maps of layers and of their experts; now and then beside what they are refused with."""
    model, plan = fields["model"], fields["plan"]
    is_refused = (
        {"latent", "mtp_layers"} & model.keys()
        or model.get("parallel_block", "none") != "none"
        or fields["precision"].get("float8", "none") != "none"
        or plan.get("compress", "none") != "none"
        or plan["schedule"].startswith("pipedream")
    )
    if rng.random() < (0.01 if is_refused else 0.3):
        maps = (*TARGETS, *EXPERT_TARGETS) if "moe" in model else TARGETS
        targets = rng.sample(maps, rng.randint(1, len(maps)))
        adapter = {"rank": rng.choice([1, 3, 8]), "alpha": rng.choice([1.0, 8.0]), "targets": targets}
        model["adapter"] = adapter | _base(rng, model, plan["tp"])


def _base(rng: random.Random, model: Fields, tp: int) -> Fields:
    """A base in NF4, for models that are widened so that the parts of their rows on ranks of tp are whole blocks."""
    if rng.random() < 0.5:
        return {}
    block = 64 if rng.random() < 0.95 else 32  # which is refused
    model |= {"hidden": rng.choice([64, 128]), "head_dim": block, "ffn": 2 * block * tp}
    if "moe" in model:
        model["moe"] |= {"ffn": 2 * block * tp}
    return {"base": "nf4", "double_quantization": rng.random() < 0.5}


def _network(rng: random.Random, fields: Fields) -> None:
    """The network that joins the nodes, by name: a run does not read it, and `launch` does."""
    if rng.random() < 0.1:
        adapters = rng.choice([[], ["mlx5_0"], ["mlx5_0", "mlx5_1:1"]])
        network = {"kind": rng.choice(NETWORKS.names), "adapters": adapters}
        network["interface"] = rng.choice(["", "eth0"])
        fields["cluster"] = fields.get("cluster", {}) | {"network": network}


def _optimizer(rng: random.Random, fields: Fields) -> None:
    """Another optimizer and schedule, and a batch that grows; now and then with what is refused."""
    optimizer, plan, batch = fields["optimizer"], fields["plan"], fields["batch"]
    optimizer |= {
        "name": rng.choice(["adamw", "adamw", "adamw", "adam", "sgd", "lion", "adafactor", "muon", "muon"]),
        "momentum": rng.choice([0.0, 0.9, 0.95]), "newton_schulz_steps": rng.choice([2, 5]),
        "schedule": rng.choice(RATE_SCHEDULES.names),
        "decay_share": rng.choice([0.25, 1.0]), "decay_shape": rng.choice(DECAY_SHAPES.names),
        "batch_rule": rng.choice(RAMP_UP_RULES.names),
    }  # fmt: skip
    if optimizer["name"] == "sgd":
        optimizer["learning_rate"] = rng.choice([1e-2, 0.1])
    part = plan["dp"] * plan["microbatch_size"]
    most = batch["global_batch_size"] // part
    if most > 1 and rng.random() < 0.2 and not plan["schedule"].startswith("pipedream"):
        start = rng.randint(1, most - 1)
        increment = rng.choice([n for n in range(1, most - start + 1) if (most - start) % n == 0])
        times = (most - start) // increment
        samples = rng.choice([times, start * part + 1, 4 * most * part])
        batch["ramp"] = {"start": start * part, "increment": increment * part, "samples": max(times, samples)}


def _further(rng: random.Random, fields: Fields) -> None:
    """Layers that predict further tokens, where there is room for them; now and then beside a field that forbids it."""
    model, plan = fields["model"], fields["plan"]
    is_refused = plan["recompute"] == "budget" or (plan["schedule"].startswith("pipedream") and plan["pp"] > 1)
    if rng.random() < (0.02 if is_refused else 0.3):
        most = min(3, model["sequence"] - (rng.random() < 0.98))
        if most > 0:
            model["mtp_layers"] = min(most, rng.choice([1, 1, 1, 2, 3]))
            model["mtp_weight"] = rng.choice([0.3, 1.0])


def _fallback(rng: random.Random, plan: Fields) -> list[Fields]:
    """Plans for fewer ranks; now and then one for as many, which is refused."""
    world = plan["dp"] * plan["cp"] * plan["tp"] * plan["pp"]
    fewer = [{}, {"dp": plan["dp"]}, {"tp": plan["tp"], "zero": 0}, {"pp": plan["pp"], "schedule": "gpipe"}]
    result = {math.prod(one.get(axis, 1) for axis in ("dp", "tp", "pp")): one for one in rng.sample(fewer, 2)}
    return [one for ranks, one in result.items() if ranks < world or rng.random() < 0.1]


def _health(rng: random.Random, plan: Fields) -> Fields:
    """The checks that a run makes of itself, and now and then one that it can't make."""
    health: Fields = {"compare_replicas_every": rng.choice([0, 1, 2, 3]), "slow_share": rng.choice([0.0, 0.25])}
    is_asynchronous = plan["schedule"].startswith("pipedream")
    if not (is_asynchronous or "compress" in plan) or rng.random() < 0.05:
        health["repeat_every"] = rng.choice([0, 1, 2])
    if rng.random() < 0.3:
        health["not_finite"] = rng.choice(["stop", "rewind"] + ["skip"] * (not is_asynchronous))
        health["spike"] = rng.choice(["tell", "rewind", "stop", "ignore"] + ["skip"] * (not is_asynchronous))
        health |= {"spike_window": rng.choice([8, 100]), "spike_deviations": rng.choice([4.0, 8.0])}
        health["most_skips"] = rng.choice([1, 20])
    return health


def _checkpoint(rng: random.Random) -> Fields:
    """When checkpoints are written, how many are kept, and where: few, and in a folder that a run of its own has.
    `auto` is drawn with what it needs."""
    return {
        "every_steps": rng.choice([0, 1, 4]), "every_s": rng.choice([0.0, 0.5, 60.0]),
        "keep_last": rng.choice([1, 2]), "keep_every": rng.choice([0, 0, 2]), "path": rng.choice(["", "", "kept"]),
        "keep_best": rng.choice(["", "", "held-out"]),
    }  # fmt: skip


def _order(rng: random.Random) -> str:
    """Axes in any order, and now and then one that is refused; some are left out."""
    axes = list(rng.choice(ORDERS).axes) if rng.random() < 0.97 else rng.sample(AXES, len(AXES))
    return "-".join(axes if rng.random() < 0.8 else [axis for axis in axes if axis not in rng.sample(AXES, 2)])


def _sources(rng: random.Random) -> Fields:
    """Fields that data give of themselves: tokens are made up here, and bear the marks of chats."""
    chats = {"path": "chats.parquet", "chats": True, "weight": rng.choice([1.0, 0.3, 1e-9])}
    text = {"path": "text", "split": rng.choice(["train", "all"]), "end_of_document": 0, "weight": 0.7}
    answer: Fields = {"answers_only": False, "chat_template": "t.jinja", "cache": "cache", "workers": 3}
    answer["today"] = rng.choice(["", "2026-07-26"])
    drawn: Fields = rng.choice(
        [{}, {"chats": True}, {"sources": [chats, text], "cache": "cache"}, answer | {"sources": [chats]}]
    )
    sets = [{"name": name, "path": name, "format": "jsonl"} for name in ("code", "web")[: rng.randint(0, 2)]]
    drawn |= {"validation": sets} if sets else {}
    return drawn | {"begin_token": rng.choice(["auto", "none"]), "begin_new": rng.random() < 0.5}


def _degrees(rng: random.Random) -> Fields:
    world = rng.choice([1, 2, 2, 2, 4, 4, 4, 8])
    plan: Fields = {"dp": 1, "tp": 1, "pp": 1, "cp": 1}
    while world > 1:
        axis = rng.choice(["dp", "dp", "tp", "tp", "pp", "pp", "cp"])
        plan[axis] *= 2
        world //= 2
    if rng.random() < 0.06:
        plan[rng.choice(["dp", "tp", "pp", "cp"])] = 3
    while math.prod(plan.values()) > MOST_RANKS:
        axis = max(plan, key=lambda name: plan[name])
        plan[axis] = max(1, plan[axis] // 2)
    plan["sequence_parallel"] = rng.random() < (0.5 if plan["tp"] > 1 else 0.1)
    plan["cp_method"] = rng.choice(["ring", "all-gather", "ulysses"])
    return plan


def _stages(rng: random.Random, plan: Fields) -> None:
    """The schedule, and what belongs to it."""
    if plan["pp"] > 1:
        plan["schedule"] = rng.choice(DRAWN)
    else:
        plan["schedule"] = rng.choice(["1f1b"] * 5 + DRAWN)
    chosen = SCHEDULES[plan["schedule"]].stages_per_rank
    if plan["schedule"] == "auto":
        plan["virtual_stages"] = rng.choice([1, 2])
    elif chosen == 0:
        plan["virtual_stages"] = rng.choice([2, 2, 3])
    if plan["schedule"] == "1f1b" and rng.random() < 0.2:
        plan["extra_warmup"] = rng.randint(1, 3)
    if plan["schedule"] == "auto" and rng.random() < 0.3:
        plan["most_alive"] = float(rng.randint(1, 2 * plan["pp"]))
    plan["microbatch_size"] = rng.choice([1, 1, 2, 3])


def _microbatches(plan: Fields) -> list[int]:
    """Numbers of microbatches that the schedule takes, few."""
    pp, schedule = plan["pp"], plan["schedule"]
    if schedule.startswith("dualpipe"):
        return [2 * pp, 2 * pp + 2]
    if schedule == "pipedream-2bw":
        return [pp, pp + 1]
    return [1, 2, 3, 4, pp, 2 * pp]


def _num_stages(plan: Fields) -> int:
    return int(plan["pp"] * (SCHEDULES[plan["schedule"]].stages_per_rank or plan.get("virtual_stages", 1)))


def _model(rng: random.Random, plan: Fields) -> Fields:
    tp, cp, stages = plan["tp"], plan["cp"], _num_stages(plan)
    is_lucky = rng.random() < 0.96  # else divisibility is left to chance
    kv_heads = tp * rng.choice([1, 1, 2]) * (cp if plan["cp_method"] == "ulysses" and rng.random() < 0.8 else 1)
    heads = kv_heads * rng.choice([1, 2, 3])
    head_dim = rng.choice([2, 4, 6])
    model: Fields = {
        "layers": rng.choice([max(1, stages), max(2, stages), stages + 1]),
        "hidden": rng.choice([heads * head_dim, 24, 36]),
        "heads": heads if is_lucky else rng.randint(1, 8),
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn": tp * rng.choice([5, 8, 12]),
        "gated_mlp": rng.random() < 0.6,
        "activation": rng.choice(["silu", "gelu", "gelu-tanh"]),
        "norm": rng.choice(["rmsnorm", "layernorm"]),
        "norm_epsilon": rng.choice([1e-5, 1e-3]),
        "positions": rng.choice(["rotary", "rotary", "learned"]),
        "qk_norm": "head" if rng.random() < 0.25 else "none",
        "bias": rng.random() < 0.4,
        "tied_embeddings": rng.random() < 0.4,
        "vocab": rng.choice([max(2, tp), 17, 32, 61]),
        "sequence": math.lcm(2 * cp, cp * tp) * rng.choice([1, 2, 3]) if is_lucky else rng.randint(1, 24),
        "init_std": rng.choice([0.05, 0.2]),
    }
    if rng.random() < 0.2:
        model["dropout"] = rng.choice([0.1, 0.5])
    if model["positions"] == "rotary" and rng.random() < 0.2:
        model["rotary_base"] = rng.choice([10.0, 500.0])
        scaling = {"kind": "yarn", "factor": 4.0, "trained_sequence": 8, "fast": 2.0}
        model["rotary_scaling"] = scaling | {"slow": rng.choice([0.25, 1.0])}
    if rng.random() < 0.2:
        for name in ("head_dim", "kv_heads", "bias", "qk_norm"):
            del model[name]
        model["positions"] = "rotary"
        model["latent"] = {
            "kv_rank": rng.choice([6, 9]), "q_rank": rng.choice([0, 5, 8]), "nope_dim": rng.choice([0, 4]),
            "rope_dim": rng.choice([2, 4]), "value_dim": rng.choice([2, 3]),
        }  # fmt: skip
    if rng.random() < 0.4:
        model["moe"] = _experts(rng, plan)
        model["layers"] += model["moe"].get("first_dense", 0) + model["moe"].get("every", 1) - 1
    if rng.random() < 0.15 and SCHEDULES[plan["schedule"]].stages_per_rank in (0, 1):
        plan["layout"] = _layout(rng, model["layers"], stages)
    return model


def _layout(rng: random.Random, layers: int, stages: int) -> list[int]:
    """Uneven stages, of which only the ends may be empty."""
    cuts = sorted(rng.randint(0, layers) for _ in range(stages - 1))
    return [end - start for start, end in zip([0, *cuts], [*cuts, layers], strict=True)]


def _experts(rng: random.Random, plan: Fields) -> Fields:
    """Experts of the model, and how the plan spreads them."""
    ranks = plan["dp"] * plan["cp"]
    if plan["tp"] > 1 and rng.random() < 0.4:
        plan["expert_tp"], plan["sequence_parallel"] = 1, True
        ranks *= plan["tp"]
    plan["ep"] = rng.choice([n for n in range(1, ranks + 1) if ranks % n == 0])
    if plan["ep"] > 1 and rng.random() < 0.4:
        plan["dispatch"] = "node-aware"
    experts = plan["ep"] * rng.choice([1, 2, 3]) * (2 if plan["ep"] == 1 else 1)
    gate = rng.choice(GATES.names)
    facts = GATES[gate]
    moe: Fields = {"experts": experts, "gate": gate}
    if not facts.only_top_k:
        moe["top_k"] = rng.randint(facts.least_top_k, max(facts.least_top_k, min(3, experts)))
    if "partners" in facts.reads:
        moe["partners"] = rng.randint(moe["top_k"] - 1, max(moe["top_k"], experts - 1))
    if "normalise" in facts.reads and rng.random() < 0.4:
        moe["normalise"] = False
    if "softmax_over" in facts.reads and moe.get("normalise", True) and rng.random() < 0.3:
        moe["softmax_over"] = "chosen"
    if "num_groups" in facts.reads and experts % 2 == 0 and experts > 2 and rng.random() < 0.4:
        moe["num_groups"] = rng.choice([2, experts // 2])
        moe["groups_kept"] = rng.randint(1, moe["num_groups"])
        if moe["groups_kept"] == 1:
            del moe["groups_kept"]
        if experts == moe["num_groups"] or rng.random() < 0.4:
            moe["group_score"] = "max"
    if "bias_update" in facts.reads and rng.random() < 0.5:
        moe["bias_update"] = 0.05
    if rng.random() < 0.5:
        moe["routed_scaling"] = 2.5
    if rng.random() < 0.5:
        moe["ffn"] = plan["tp"] * rng.choice([4, 6])
    if rng.random() < 0.3:
        moe["shared_experts"] = rng.choice([1, 2])
        moe["shared_gate"] = rng.random() < 0.5
    if rng.random() < 0.2:
        moe["first_dense"] = 1
    if rng.random() < 0.2:
        moe["every"] = 2
    if not facts.sees_all and rng.random() < 0.5:
        moe["aux_loss"] = rng.choice(["switch", "gshard"])
        moe["aux_coefficient"] = 0.5
        moe["aux_scope"] = rng.choice(["microbatch", "sequence", "global"])
    if rng.random() < 0.3:
        moe["z_coefficient"] = 1e-2
    if rng.random() < 0.4:
        moe["capacity_factor"] = rng.choice([0.5, 1.0, 1.3])
        if not facts.sees_all:
            moe["overflow"] = rng.choice(["drop-position", "drop-probability", "reroute"])
    return moe


def _state(rng: random.Random, plan: Fields) -> None:
    """Who holds what of the state, where, and how gradients travel."""
    is_asynchronous = plan["schedule"].startswith("pipedream")
    if not is_asynchronous or rng.random() < 0.05:
        plan["zero"] = rng.randint(0, 3)
        replicas = plan["dp"] * plan["cp"]
        if plan["zero"] and rng.random() < 0.35:
            plan["zero_ranks"] = rng.choice([n for n in range(1, replicas + 1) if replicas % n == 0])
        if plan["zero"] >= 2:
            plan["reduce_each"] = rng.choice(["auto", "auto", "run", "microbatch"])
        if plan["zero"] == 3 and rng.random() < 0.25:
            plan["offload_parameters"] = True
        if rng.random() < 0.25:
            plan["offload_optimizer"] = rng.choice([0.3, 0.5, 1.0])
    plan["bucket_mib"] = rng.choice([25.0, 0.02, 0.002])
    plan["loss_chunk_mib"] = rng.choice([0.0, 0.002, 0.01])
    if rng.random() < 0.15:
        plan["compress"] = rng.choice(["bf16", "fp16", "int8", "powersgd", "topk"])
        plan["compress_least"] = rng.choice([1, 64, 4096])
        if plan["compress"] == "powersgd":
            plan["compress_rank"] = rng.choice([1, 2])
        if plan["compress"] == "topk":
            plan["compress_share"] = rng.choice([0.1, 1.0])


def _recompute(rng: random.Random, plan: Fields, layers: int) -> None:
    choice = rng.choice(["none", "none", "none", "stage", "full", "selective", "budget", "layers"])
    plan["recompute"] = choice
    if choice in ("full", "selective") and rng.random() < 0.4:
        plan["recompute_every"] = rng.choice([2, 3])
    if choice == "selective":
        plan["recompute_operators"] = _operators(rng) or ["attention"]
    if choice == "layers":
        plan["recompute_layers"] = [rng.choice([["layer"], _operators(rng)]) for _ in range(layers)]
    if choice == "budget":
        plan["memory_limit_gib"] = 10 ** rng.uniform(-5, -3)
    if choice == "full" and rng.random() < 0.4:
        plan["offload_activations"] = True


def _operators(rng: random.Random) -> list[str]:
    """Operators that may be recomputed together: a product only with the operator that needs it."""
    names = {name for name in OPERATORS if rng.random() < 0.5}
    if "attention" not in names:
        names.discard("qkv")
    if "activation" not in names:
        names.discard("up")
    return sorted(names)


def _precision(rng: random.Random) -> Fields:
    precision: Fields = {"compute": rng.choice(["float32"] * 5 + ["bf16", "fp16"])}
    if precision["compute"] != "float32":
        precision["gradients"] = rng.choice(["float32", "compute"])
        precision["reduce"] = rng.choice(["gradients", "float32"])
    if precision["compute"] == "fp16":
        precision["loss_scale"] = rng.choice([0.0, 1024.0, 2.0**26])
        precision["loss_scale_growth_steps"] = rng.choice([0, 1, 2000])
    if rng.random() < 0.15:
        precision["float8"] = rng.choice(FLOAT8_RECIPES.names)
        if precision["float8"] == "delayed":
            precision["float8_history"] = rng.choice([1, 2, 16])
        precision["float8_weight_gradients"] = rng.random() < 0.4
    return precision
