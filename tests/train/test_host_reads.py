"""The host reads numbers of a device in one watched place, so that a hang there names who waits for whom."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwright

SOURCE = Path(shardwright.__file__).parent
ROOMS = ("model", "parallel", "precision", "train")  # of the runtime
DATA = "train/data/"  # arrays of numpy
WATCHED = "parallel/device_streams.py"
# Methods of a tensor for which the host waits; `cpu` copies, and waits too.
READS = ("item", "tolist", "nonzero", "synchronize", "cpu")
NUMBERS = ("int", "float", "bool")
# Methods and functions that give tensors of one number.
METHODS = ("all", "any", "sum", "max", "min", "argmax", "argmin", "long")
COLLECTIVES = ("all_reduce", "all_reduce_max", "broadcast")
# Functions whose results are in host memory; what is read from them is no wait.
ON_HOST = ("on_host", "on_host_or_ones", "numbers", "numbers_or_ones")
# Reads of arrays, and of tensors that are in host memory already, by file.
OF_HOST_MEMORY = {
    "parallel/expert/grouped_linear.py": {"(counts_e.cumsum(0) - counts_e).tolist()", "counts_e.tolist()"},
    "train/checkpoint/boxes.py": {"values.cpu()"},
    "train/checkpoint/layer_state.py": {"values.tolist()"},
    "train/held_out.py": {"samples_once.weights[first:first + per_replica].tolist()"},
    "train/own_module/module_checkpoint.py": {"row[:n].tolist()"},
    "train/own_module/module_state.py": {"int(values.long())"},
    "train/prompt.py": {"np.concatenate((first, ids)).tolist()"},
    "train/router_update.py": {"totals.chosen_E.tolist()", "float(totals.chosen_E.sum())", "pairs.tolist()"},
    "train/text_generation.py": {"tokenizer.encode(job.run.sample_prompt).tolist()"},
}


def called_name(call: ast.AST) -> str:
    """The name of the function or method that is called; "" if this is no call."""
    if not isinstance(call, ast.Call):
        return ""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def host_names(tree: ast.AST) -> set[str]:
    """The names that are given to results of functions whose results are in host memory."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(called_name(part) in ON_HOST for part in ast.walk(node.value)):
            names |= {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return names


def tensor_names(tree: ast.AST) -> set[str]:
    """The names that are declared as tensors, or made by a function of torch."""
    names = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg) and is_tensor_type(node.annotation)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and is_of_torch(node.value):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def is_tensor_type(annotation: ast.AST | None) -> bool:
    return annotation is not None and ast.unparse(annotation) in ("Tensor", "torch.Tensor")


def is_of_torch(value: ast.AST) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func).startswith("torch.")


def reads_of(tree: ast.AST) -> Iterator[str]:
    """The reads of the host in one file, but for those in a watched block and of what is in host memory by name."""
    watched = {
        id(part)
        for block in ast.walk(tree)
        if isinstance(block, ast.With) and any(called_name(i.context_expr) == "host_reading" for i in block.items)
        for part in ast.walk(block)
    }
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            on_host, tensors = host_names(function), tensor_names(function)
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and id(call) not in watched and is_read(call, on_host, tensors):
                    yield ast.unparse(call)


def is_read(call: ast.Call, on_host: set[str], tensors: set[str]) -> bool:
    """True if a call reads numbers of a tensor."""
    name, is_method = called_name(call), isinstance(call.func, ast.Attribute)
    if name in READS and is_method:
        return not is_on_host(call.func.value, on_host)  # type: ignore[attr-defined]
    if name in NUMBERS and not is_method and call.args:
        value = call.args[0]
        if isinstance(value, ast.Call) and not is_on_host(value, on_host):
            has_method = isinstance(value.func, ast.Attribute) and value.func.attr in METHODS
            return has_method or called_name(value) in COLLECTIVES
        return isinstance(value, ast.Name) and value.id in tensors - on_host
    return False


def is_on_host(value: ast.AST, on_host: set[str]) -> bool:
    """True if a value comes from what is in host memory."""
    parts = list(ast.walk(value))
    return any(called_name(part) in ON_HOST for part in parts) or any(
        isinstance(part, ast.Name) and part.id in on_host for part in parts
    )


def test_the_host_reads_numbers_of_a_device_only_where_it_is_watched() -> None:
    unwatched: dict[str, set[str]] = {}
    for room in ROOMS:
        for path in sorted((SOURCE / room).rglob("*.py")):
            file = str(path.relative_to(SOURCE))
            if file != WATCHED and not file.startswith(DATA):
                reads = set(reads_of(ast.parse(path.read_text(encoding="utf-8"))))
                unwatched |= {file: reads} if reads else {}
    assert unwatched == OF_HOST_MEMORY


@pytest.mark.parametrize(
    "body",
    [
        "return x.item()",
        "return x.tolist()",
        "return (x != 0).nonzero()",
        "end.synchronize()",
        "return int(x)",
        "y = torch.zeros(1)\n    return int(y)",
        "return bool(x.isfinite().all())",
        "return int(all_reduce_max(x, mesh.world))",
        "return float(x.sum())",
        "return x.cpu()",
    ],
)
def test_a_read_that_nobody_watches_is_told(body: str) -> None:
    assert list(reads_of(ast.parse(f"def read(x: Tensor):\n    {body}\n")))


def test_a_read_that_is_watched_is_not_told() -> None:
    for body in ("with host_reading(streams, x):\n        return x.tolist()", "return mesh.on_host(x).tolist()"):
        assert not list(reads_of(ast.parse(f"def read(x: Tensor):\n    {body}\n")))
