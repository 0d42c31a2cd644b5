"""NeMo 2's performance scripts: set_primary_perf_configs(), which sets the plan, the batch and the number types of a
recipe. Source: NeMo 25.07, scripts/performance.

A recipe of NeMo's own library stands for its model then, since all else that a plan is made of is set here.
"""

from typing import Any

from shardwright.config.phrase import say
from shardwright.interchange.reading.python_values import Named, ParsedCall, Unread

_FIRST = (
    *("recipe", "task", "num_nodes", "num_gpus_per_node", "mbs", "gbs", "max_steps"),
    *("tp_size", "pp_size", "cp_size", "vp_size", "ep_size", "etp_size"),
)
_LIBRARY = "_library"  # where a recipe keeps the name of NeMo's own
_RECIPES = ("pretrain_recipe", "finetune_recipe")
_DEGREES = {
    "tp_size": "tensor_model_parallel_size",
    "pp_size": "pipeline_model_parallel_size",
    "cp_size": "context_parallel_size",
    "ep_size": "expert_model_parallel_size",
    "etp_size": "expert_tensor_parallel_size",
}
_FLOAT8 = {
    "ds": "bf16_with_fp8_mixed",
    "cs": "bf16_with_fp8_current_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "ss": "bf16_with_fp8_subchannel_scaling_mixed",
}


def set_primary_perf_configs(positional: list[Any], keywords: dict[str, Any]) -> Any:
    """The recipe that the function returns: that of its first argument, changed."""
    given = dict(zip(_FIRST, positional, strict=False)) | keywords
    recipe = _of_library(given.get("recipe"))
    if not isinstance(recipe, ParsedCall):
        return Unread("set_primary_perf_configs(...)", "")
    trainer, strategy = _part(recipe, "trainer"), _part(recipe, "trainer", "strategy")
    names = {"num_nodes": "num_nodes", "num_gpus_per_node": "devices", "max_steps": "max_steps"}
    trainer.keywords |= {names[name]: given[name] for name in names if name in given}
    sizes = {"mbs": "micro_batch_size", "gbs": "global_batch_size"}
    _part(recipe, "data").keywords.update({sizes[name]: given[name] for name in sizes if name in given})
    strategy.keywords |= {_DEGREES[name]: given[name] for name in _DEGREES if given.get(name) is not None}
    virtual, tp = given.get("vp_size"), given.get("tp_size")
    strategy.keywords["virtual_pipeline_model_parallel_size"] = None if virtual == 1 else virtual
    strategy.keywords["sequence_parallel"] = tp > 1 if isinstance(tp, int) else False
    if given.get("use_mcore_fsdp"):
        strategy.keywords["fsdp"] = "megatron"
    _set_number_types(trainer, given)
    _set_recomputation(_part(recipe, "model", "config"), given)
    return recipe


def _of_library(recipe: Any) -> Any:
    """The parts of a recipe of NeMo's library, whose files are not here: its model and its optimizer."""
    if not isinstance(recipe, ParsedCall) or recipe.callee.rpartition(".")[2] not in _RECIPES:
        return recipe
    module = recipe.callee.rpartition(".")[0].rpartition(".")[2]
    optimizer = ParsedCall("distributed_fused_adam_with_cosine_annealing")
    optimizer.keywords |= {"config": ParsedCall("run.Config"), "lr_scheduler": ParsedCall("run.Config")}
    strategy = ParsedCall("run.Config", {"ddp": ParsedCall("run.Config")}, [Named("MegatronStrategy")])
    parts = {
        "model": ParsedCall("run.Config", {"config": ParsedCall("")}, [Named(module)]),
        "trainer": ParsedCall("run.Config", {"strategy": strategy}),
        "data": ParsedCall("run.Config", {}, [Named("MockDataModule")]),
        "optim": ParsedCall("run.Config", optimizer.keywords),
    }
    return ParsedCall("run.Partial", parts | recipe.keywords | {_LIBRARY: module})


def library_notes(recipe: ParsedCall) -> list[str]:
    """A note on a recipe of NeMo's library that stands for its model."""
    if (module := recipe.keywords.pop(_LIBRARY, None)) is None:
        return []
    return [
        say(
            "the recipe {name} is NeMo's own and is not read: it says the model, and what set_primary_perf_configs "
            "does not set has its default",
            name=str(module),
        )
    ]


def _set_number_types(trainer: ParsedCall, given: dict[str, Any]) -> None:
    number = given.get("compute_dtype")
    if number is None and "plugins" in trainer.keywords:
        return
    is_narrow = str(number).lower() == "fp8"
    kind = str(given.get("fp8_recipe") or "ds").lower()
    name = _FLOAT8.get(kind, f"bf16_with_fp8_{kind}") if is_narrow else "bf16_mixed"
    trainer.keywords["plugins"] = ParsedCall(name, {"grad_reduce_in_fp32": False})


def _set_recomputation(config: ParsedCall, given: dict[str, Any]) -> None:
    if layers := given.get("recompute_layers"):
        config.keywords |= {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": layers,
        }
    if layers := given.get("activation_offload_layers"):
        config.keywords |= {"cpu_offloading": True, "cpu_offloading_num_layers": layers}
    if modules := given.get("recompute_modules"):
        config.keywords |= {"recompute_granularity": "selective", "recompute_modules": modules}


def _part(recipe: ParsedCall, *path: str) -> ParsedCall:
    """The part of a recipe at a path, which is made where there is none."""
    holder = recipe
    for name in path:
        part = holder.keywords.get(name)
        if not isinstance(part, ParsedCall):
            part = holder.keywords[name] = ParsedCall("")
        holder = part
    return holder
