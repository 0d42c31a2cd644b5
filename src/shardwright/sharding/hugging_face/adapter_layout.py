"""The tensors of an adapter's files that make up each adapter of a model, as peft names them.

Of each map there is lora_A [rank, inputs] and lora_B [outputs, rank], under the name of the map in the model's family.
Shapes: G key/value heads, Q query heads of each, D width of a head, R rank.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwright.config.adapter import AdapterSpec, Target
from shardwright.config.base import PlanError
from shardwright.config.matrix import Matrix
from shardwright.config.model import ModelSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.phrase import say
from shardwright.sharding.adapter_shapes import down_shape, up_shape
from shardwright.sharding.hugging_face.family_names import FamilyNames
from shardwright.sharding.hugging_face.layout import Layout, names_of
from shardwright.sharding.hugging_face.released_piece import ReleasedPiece, seen_as, whole

_PREFIX = "base_model.model."


def adapter_layout(family: str, model: ModelSpec) -> Layout:
    """The pieces of each of our adapters' tensors, by its name. Raises PlanError if the family has maps that are
    targets side by side in one matrix, because such a matrix has one adapter there."""
    _refuse_fused(family, model)
    names, spec = names_of(family, model), model.adapter
    modules = module_names(names)
    layout: Layout = {}
    for layer in range(model.layers):
        prefix = _PREFIX + names.layer.format(n=layer)
        for part, matrix in _matrices(model):
            pieces = _Pieces(spec, matrix, prefix, modules, _interleaved(names, model))
            name = f"layers.{layer}.{part}.{matrix.name}.adapter"
            if targets := spec.targets_of(matrix):
                layout[f"{name}.a"] = tuple(pieces.downs())
                layout |= {f"{name}.b_{target}": (pieces.up(target),) for target in targets}
    return layout


def _refuse_fused(family: str, model: ModelSpec) -> None:
    """Raise PlanError if maps that are targets lie side by side in one matrix of the family."""
    if fused := [target for target in model.adapter.targets if target in _fused(names_of(family, model), model)]:
        raise PlanError(
            say("adapters of a {family} model", family=family),
            [
                say(
                    "{targets} are side by side with others in one matrix of this family, which peft gives one "
                    "adapter; leave them out of model.adapter.targets, or export with --names own",
                    targets=tuple(fused),
                )
            ],
        )


def target_modules(family: str, model: ModelSpec) -> list[str]:
    """Names of the modules with an adapter, as in peft's target_modules: the ends of their full names that no other map
    of a layer has."""
    modules = module_names(names_of(family, model))
    ends = [module.rpartition(".")[2] for module in modules.values()]
    targets = [target for _, matrix in _matrices(model) for target in model.adapter.targets_of(matrix)]
    last = {target: modules[target].rpartition(".")[2] for target in targets}
    return [end if ends.count(end) == 1 else modules[target] for target, end in last.items()]


def adapter_keys(family: str, model: ModelSpec) -> dict[str, Any]:
    """The keys of adapter_config.json. Raises PlanError if peft has no such adapter, or if no released model is its
    base."""
    if not model.weights:
        raise PlanError(
            say("adapters for peft"),
            [
                say(
                    "they were trained beside random weights, and peft opens them beside a released model's; use "
                    "--names own"
                )
            ],
        )
    _refuse_fused(family, model)
    alpha = model.adapter.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.weights,
        "r": model.adapter.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "target_modules": target_modules(family, model),
        "bias": "none",
        "fan_in_fan_out": names_of(family, model).transposed,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }


def module_names(names: FamilyNames) -> dict[Target, str]:
    """The name of each map's module within a layer; maps that a family has in one matrix have its name, or none."""
    return {
        "query": names.q,
        "key": names.k,
        "value": names.v,
        "out": names.out,
        "gate": names.gate,
        "up": names.up,
        "down": names.down,
    }


def _fused(names: FamilyNames, model: ModelSpec) -> set[str]:
    """The maps that a family has side by side in one matrix."""
    fused = {"query", "key", "value"} if names.fused != "apart" else set()
    return fused | ({"gate", "up"} if model.gated_mlp and not names.gate else set())


def _interleaved(names: FamilyNames, model: ModelSpec) -> int:
    """Elements of a head whose pairs are neighbours in the family's files."""
    return model.rotary_width if names.interleaved and model.positions == "rotary" else 0


def _matrices(model: ModelSpec) -> Iterator[tuple[str, Matrix]]:
    """The matrices of a dense layer, with the part of the layer that has them."""
    shape = shape_of(model)
    yield from (("attention", matrix) for matrix in shape.attention_matrices)
    yield from (("mlp", matrix) for matrix in shape.mlp_matrices)


@dataclass(frozen=True)
class _Pieces:
    """The pieces of the adapters of one matrix of a layer. `interleaved` counts a head's elements in pairs."""

    spec: AdapterSpec
    matrix: Matrix
    prefix: str
    modules: dict[Target, str]
    interleaved: int

    def downs(self) -> Iterator[ReleasedPiece]:
        """lora_A of each map, which are a stack here."""
        _, *shape = down_shape(self.spec, self.matrix)
        for number, target in enumerate(self.spec.targets_of(self.matrix)):
            region, view = ((number, number + 1), *whole(shape)), (1, *shape)
            yield ReleasedPiece(self._name(target, "A"), tuple(shape), region, view, tuple(range(len(view))))

    def up(self, target: Target) -> ReleasedPiece:
        """lora_B of a map: [G, Q, D, R] of queries."""
        shape, name = up_shape(self.spec, self.matrix, target), self._name(target, "B")
        num_outputs = math.prod(shape[:-1])
        if not (self.interleaved and target in ("query", "key")):
            return seen_as(name, (num_outputs, shape[-1]), shape)
        return ReleasedPiece(
            name,
            (num_outputs, shape[-1]),
            whole(shape),
            shape,
            tuple(range(len(shape))),
            interleaved=self.interleaved,
            pairs_dim=2,
        )

    def _name(self, target: Target, factor: str) -> str:
        return f"{self.prefix}.{self.modules[target]}.lora_{factor}.weight"
