"""The tensors of an adapter's files that make up each adapter of a model, as peft names them.

Of each map there is lora_A [rank, inputs] and lora_B [outputs, rank], under the name of the map in the model's family.
Shapes: G key/value heads, Q query heads of each, D width of a head, R rank.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwright.config.adapter import EXPERT_TARGETS, AdapterSpec, Target
from shardwright.config.base import PlanError
from shardwright.config.matrix import Matrix
from shardwright.config.model import ModelSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.phrase import say
from shardwright.sharding.adapter_shapes import down_shape, up_shape
from shardwright.sharding.hugging_face.family_names import FamilyNames
from shardwright.sharding.hugging_face.layout import Layout, names_of
from shardwright.sharding.hugging_face.released_piece import ReleasedPiece, whole

_PREFIX = "base_model.model."


def adapter_layout(family: str, model: ModelSpec) -> Layout:
    """The pieces of each of our adapters' tensors, by its name. Raises PlanError if the family has maps that are
    targets side by side in one matrix, because such a matrix has one adapter there."""
    _refuse_fused(family, model)
    names, spec = names_of(family, model), model.adapter
    layout: Layout = {}
    for layer in range(model.layers):
        prefix = _PREFIX + names.layer.format(n=layer)
        for part, matrix in _matrices(model, layer):
            pieces = _Pieces(spec, matrix, prefix, module_names(names, part), _interleaved(names, model))
            name = f"layers.{layer}.{_place(part, matrix)}"
            if targets := spec.targets_of(matrix):
                layout[f"{name}.a"] = tuple(pieces.downs())
                layout |= {f"{name}.b_{target}": tuple(pieces.ups(target)) for target in targets}
    return layout


def _place(part: str, matrix: Matrix) -> str:
    """The place of the adapters of a matrix within a layer."""
    return f"{part}.adapter.{matrix.name}" if matrix.experts else f"{part}.{matrix.name}.adapter"


def _refuse_fused(family: str, model: ModelSpec) -> None:
    """Raise PlanError if maps that are targets lie side by side in one matrix of the family."""
    names, fused = names_of(family, model), dict[str, None]()
    for part, matrix in _every_matrix(model):
        targets = model.adapter.targets_of(matrix)
        fused |= dict.fromkeys(target for target in targets if target in _fused(names, model, part))
    if fused:
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
    of the model has. Experts are named one by one where their number is in that end."""
    names = names_of(family, model)
    modules, targets = dict[tuple[str, str], str](), list[tuple[str, str]]()
    for part, matrix in _every_matrix(model):
        by_map = module_names(names, part)
        modules |= {(part, name): by_map[name] for name in model.adapter.maps(matrix)}
        targets += [(part, name) for name in model.adapter.targets_of(matrix)]
    ends = dict.fromkeys(_end(modules, target, set(targets)) for target in targets)
    experts = range(model.moe.experts)
    return [name for end in ends for name in ([end.format(e=e) for e in experts] if "{e}" in end else [end])]


def _end(modules: dict[tuple[str, str], str], target: tuple[str, str], targets: set[tuple[str, str]]) -> str:
    """The shortest end of a module's name that no module without an adapter has."""
    parts = modules[target].split(".")
    others = [module.split(".") for key, module in modules.items() if key not in targets]
    for count in range(1, len(parts) + 1):
        if not any(other[-count:] == parts[-count:] for other in others):
            return ".".join(parts[-count:])
    return modules[target]


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


def module_names(names: FamilyNames, part: str = "mlp") -> dict[str, str]:
    """The name of each map's module within a layer, those of an MLP in a part of it; maps that a family has in one
    matrix have its name, or none."""
    gate, up, down = names.gate, names.up, names.down
    if part == "moe.shared":
        gate, up, down = names.shared_gate_proj, names.shared_up, names.shared_down
    return {
        "query": names.q,
        "key": names.k,
        "value": names.v,
        "out": names.out,
        "gate": gate,
        "up": up,
        "down": down,
        "expert_gate": names.expert_gate,
        "expert_up": names.expert_up,
        "expert_down": names.expert_down,
    }


def _fused(names: FamilyNames, model: ModelSpec, part: str) -> set[str]:
    """The maps that a family has side by side in one matrix of a part of a layer; of experts in one tensor all."""
    if part == "moe.experts":
        return set() if names.experts == "each" else set(EXPERT_TARGETS)
    fused = {"query", "key", "value"} if names.fused != "apart" else set()
    gate = names.shared_gate_proj if part == "moe.shared" else names.gate
    return fused | ({"gate", "up"} if model.gated_mlp and not gate else set())


def _interleaved(names: FamilyNames, model: ModelSpec) -> int:
    """Elements of a head whose pairs are neighbours in the family's files."""
    return model.rotary_width if names.interleaved and model.positions == "rotary" else 0


def _matrices(model: ModelSpec, layer: int) -> Iterator[tuple[str, Matrix]]:
    """The matrices of a layer that may have adapters, with the part of the layer that has them."""
    shape = shape_of(model)
    yield from (("attention", matrix) for matrix in shape.attention_matrices)
    if shape.is_dense(layer):
        yield from (("mlp", matrix) for matrix in shape.mlp_matrices)
        return
    yield from (("moe.experts", matrix) for matrix in shape.routed_matrices)
    if shape.mixture.shared_ffn:
        yield from (("moe.shared", matrix) for matrix in shape.shared_matrices)


def _every_matrix(model: ModelSpec) -> list[tuple[str, Matrix]]:
    """The matrices of all layers, each once."""
    return list(dict.fromkeys(pair for layer in range(model.layers) for pair in _matrices(model, layer)))


@dataclass(frozen=True)
class _Pieces:
    """The pieces of the adapters of one matrix of a layer. `interleaved` counts a head's elements in pairs."""

    spec: AdapterSpec
    matrix: Matrix
    prefix: str
    modules: dict[str, str]
    interleaved: int

    def downs(self) -> Iterator[ReleasedPiece]:
        """lora_A of each map, and of each expert, which are a stack here."""
        *_, rank, inner = down_shape(self.spec, self.matrix)
        shape = rank, inner
        for expert in self._experts:
            for number, target in enumerate(self.spec.targets_of(self.matrix)):
                region = (*_of_expert(expert), (number, number + 1), *whole(shape))
                view = (*(1 for _ in expert), 1, *shape)
                name = self._name(target, "A", expert)
                yield ReleasedPiece(name, shape, region, view, tuple(range(len(view))))

    def ups(self, target: Target) -> Iterator[ReleasedPiece]:
        """lora_B of a map: [G, Q, D, R] of queries; of each expert, if each has one."""
        for expert in self._experts:
            shape = up_shape(self.spec, self.matrix, target)[len(expert) :]
            name, num_outputs = self._name(target, "B", expert), math.prod(shape[:-1])
            is_turned = self.interleaved and target in ("query", "key")
            view = (*(1 for _ in expert), *shape)
            yield ReleasedPiece(
                name,
                (num_outputs, shape[-1]),
                (*_of_expert(expert), *whole(shape)),
                view,
                tuple(range(len(view))),
                interleaved=self.interleaved if is_turned else 0,
                pairs_dim=2 if is_turned else 0,
            )

    @property
    def _experts(self) -> list[tuple[int, ...]]:
        """The number of each expert that has a matrix, or none once."""
        return [(expert,) for expert in range(self.matrix.experts)] or [()]

    def _name(self, target: Target, factor: str, expert: tuple[int, ...]) -> str:
        module = self.modules[target].format(e=expert[0]) if expert else self.modules[target]
        return f"{self.prefix}.{module}.lora_{factor}.weight"


def _of_expert(expert: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((number, number + 1) for number in expert)
