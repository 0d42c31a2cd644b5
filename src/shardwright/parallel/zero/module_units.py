"""The submodules of a module that are units, and the places of its parameters.

Units are the children of repeated containers: of each ModuleList, and of each Sequential whose children with
parameters are all of one class. If such a child is itself a repeated container, its children are the units. So the
blocks of a ResNet are units, and the layers of an encoder. A parameter in no unit belongs to the root, and so does a
parameter that two units share. Or the user names the units.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwright.config.base import shortened
from shardwright.config.catalog import nearest
from shardwright.config.phrase import any_of, both, say
from shardwright.parallel.tensor.initial_values import Initial
from shardwright.parallel.tensor.parameter import PlacedParameter, no_memory
from shardwright.parallel.zero.module_stage import ROOT
from shardwright.sharding.parameter_shard import ParameterShard

# Norms divide by a measured size, so they are computed in float32 whatever the other modules use, as in autocast.
_EXACT = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)


@dataclass(frozen=True)
class ModuleUnits:
    """The units of a module by name, and the trained parameters of each region. Regions are the root, which comes
    first, and the units."""

    units: Mapping[str, nn.Module]
    regions: Mapping[str, Sequence[nn.Parameter]]
    names: Mapping[nn.Parameter, str]  # of each parameter; the first one if it has several
    exact: frozenset[nn.Parameter]

    def place(self, parameter: nn.Parameter, in_16_bits: bool) -> ParameterShard:
        """The place of a parameter: not split over tp. Matrices have weight decay, as randomly initialised parameters
        have in our models; norms are exact if other modules compute `in_16_bits`."""
        shape = tuple(parameter.shape)
        init = "normal" if parameter.dim() > 1 else "zeros"
        return ParameterShard(
            shape,
            tuple((0, size) for size in shape),
            init,
            name=self.names[parameter],
            is_exact=in_16_bits and parameter in self.exact,
        )


def module_units(module: nn.Module, named: Sequence[str] | None = None) -> ModuleUnits:
    """The units of a module: those `named`, or by the rule at the top of this file."""
    names: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.numel():
            names[parameter] = name
    chosen = set(named) if named is not None else {name for name, _ in _repeated(module, "")}
    units = {
        name: unit
        for name, unit in module.named_modules()
        if name in chosen and any(p in names for p in unit.parameters())
    }
    enclosing: dict[nn.Parameter, list[str]] = {}  # the units that contain all uses of a parameter, inner ones first
    for path, parameter in module.named_parameters(remove_duplicate=False):
        units_of_use = sorted((name for name in units if path.startswith(f"{name}.")), key=len, reverse=True)
        enclosing[parameter] = [name for name in enclosing.get(parameter, units_of_use) if name in units_of_use]
    regions: dict[str, list[nn.Parameter]] = {ROOT: []} | {name: [] for name in units}
    for parameter in names:
        regions[next(iter(enclosing[parameter]), ROOT)].append(parameter)
    exact = {p for part in module.modules() if isinstance(part, _EXACT) for p in part.parameters(recurse=False)}
    return ModuleUnits(units, regions, names, frozenset(exact & set(names)))


def _repeated(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        name = f"{path}.{key}" if path else key
        if _is_repeated(module) and not _is_repeated(child):
            if any(True for _ in child.parameters()):
                yield name, child
        else:
            yield from _repeated(child, name)


def _is_repeated(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList):
        return True
    kinds = {type(child) for child in module.children() if any(True for _ in child.parameters())}
    return isinstance(module, nn.Sequential) and len(kinds) == 1


def unit_faults(module: nn.Module, named: Sequence[str] | None) -> list[str]:
    """Faults in the names of units."""
    are_names = isinstance(named, Sequence) and all(isinstance(name, str) for name in named)
    if named is not None and (isinstance(named, str) or not are_names):
        return [
            say(
                "units is {named}; give a list of names of submodules, such as ['layers.0']",
                named=shortened(repr(named)),
            )
        ]
    known_names = {name for name, _ in module.named_modules() if name}
    examples = ", ".join(sorted(known_names)[:8]) + (", ..." if len(known_names) > 8 else "")
    faults = list[str]()
    for name in named or ():
        if name in known_names and name:
            continue
        hint = say("it has {examples}", examples=examples)
        if near := nearest(name, sorted(known_names), most=3):
            hint = say("did you mean {names}?", names=any_of(near))
        faults.append(say("units has {name}, and the module has no such submodule; {hint}", name=repr(name), hint=hint))
    return faults


def kind_faults(module: object) -> list[str]:
    """The fault of an argument that is not a module."""
    if isinstance(module, nn.Module):
        return []
    if isinstance(module, type):
        return [
            say(
                "the class {name} is given, and an nn.Module is wanted; make one, {made}",
                name=module.__name__,
                made=f"{module.__name__}()",
            )
        ]
    kind = type(module).__name__
    return [say("a value of type {kind} is given, and an nn.Module is wanted; give the module itself", kind=kind)]


def parameter_faults(module: nn.Module, may_be_meta: bool = False) -> list[str]:
    """Faults of a module's parameters. If it `may_be_meta`, its parameters need no values: it is counted, not
    sharded."""
    faults, devices = list[str](), set[str]()
    for name, parameter in module.named_parameters():
        devices.add(str(parameter.device))
        if isinstance(parameter, PlacedParameter):
            faults.append(say("{name} is sharded already; give shard() the module itself, once", name=name))
        elif parameter.is_meta and not may_be_meta:
            faults.append(
                say("{name} has no values (device meta); build the module with values on a device", name=name)
            )
        elif parameter.requires_grad and parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            faults.append(
                say(
                    "{name} is of {dtype}, and what is trained is float32, bfloat16 or float16",
                    name=name,
                    dtype=parameter.dtype,
                )
            )
    if not may_be_meta:
        faults += [
            say("buffer {name} has no values (device meta); build the module with values on a device", name=name)
            for name, buffer in module.named_buffers()
            if buffer.is_meta
        ]
    faults += [
        say(
            "{name} is an Embedding with sparse gradients, and these are summed dense; make it with sparse=False",
            name=name,
        )
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
    ]
    if len(devices) > 1:
        faults.append(
            say("its parameters lie on {devices}; move the module to one device", devices=both(sorted(devices)))
        )
    if not any(parameter.requires_grad and parameter.numel() for parameter in module.parameters()):
        faults.append(say("it has no parameter that requires a gradient"))
    return faults


def compiled_faults(units: ModuleUnits, module: nn.Module) -> list[str]:
    """Faults of units that cannot be gathered: they are compiled, or lie in compiled modules, and a compiled program
    runs no hooks."""
    return [
        say(
            "{name} is compiled, and the values of {inner} are gathered around calls that Python makes; compile what "
            "lies inside of units, or use plan.zero = 2",
            name=name or say("the module"),
            inner=tuple(inner[:3]),
        )
        for name, part in module.named_modules()
        if (getattr(part, "_compiled_call_impl", None) is not None or type(part).__name__ == "OptimizedModule")
        and (inner := [unit for unit in units.units if f"{unit}.".startswith(f"{name}." if name else "")])
    ]


Placed = dict[nn.Parameter, PlacedParameter]  # by the parameter that it replaces


def place_parameters(module: nn.Module, units: ModuleUnits, compute: torch.dtype) -> Placed:
    """Replace each trained parameter, in all its uses, by a parameter with a place. The new ones have no memory yet."""
    placed: Placed = {}
    for parameter in units.names:
        place = units.place(parameter, in_16_bits=compute != torch.float32)
        dtype = torch.float32 if place.is_exact else compute
        placed[parameter] = PlacedParameter(no_memory(place.shape, parameter.device, dtype), place)
    for part in module.modules():
        for key, old in list(part._parameters.items()):
            if old is not None and old in placed:
                setattr(part, key, placed[old])  # setattr, since recurrent layers keep a list of their parameters
    return placed


def values_of(values: Mapping[str, Tensor]) -> Initial:
    """Initial values from given tensors, by name."""

    def write(place: ParameterShard, start: int, out: Tensor) -> None:
        out.copy_(values[place.name].reshape(-1)[start : start + out.numel()])

    return write
