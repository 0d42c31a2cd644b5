"""Jinja's sandbox, in which chat templates of strangers are run: of a version without a known way out, and with
arithmetic that is bounded.

Jinja computes operators between constants while it compiles a template, where there is no chat yet to name. Operators
that can make a number of any size are called through the sandbox instead, which has a limit.
"""

import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

# In older ones a template reaches str.format by |attr, and with it any module: CVE-2025-27516.
LOWEST_JINJA = "3.1.6"
# Of a number that a template makes: far beyond what any writes, and computed in a microsecond.
_MOST_BITS = 1 << 16


class UnsafeJinjaError(ValueError):
    """A Jinja that is installed, but whose sandbox can be left; in one sentence with a way out."""


def template_sandbox(extensions: list[Any], filters: Mapping[str, Any]) -> "ImmutableSandboxedEnvironment":
    """An environment for templates of strangers, with these extensions and filters beside Jinja's own. Raises
    UnsafeJinjaError."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    refuse_unsafe(version("jinja2"))

    class Sandbox(ImmutableSandboxedEnvironment):
        """The sandbox whose products and powers are bounded."""

        intercepted_binops = frozenset(["*", "**"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            """A product or a power. Raises ValueError for one that is too large."""
            num_bits = _num_bits(operator, left, right)
            if num_bits > _MOST_BITS:
                raise ValueError(f"a number of more than {_MOST_BITS:,} bits ({operator})")
            return super().call_binop(context, operator, left, right)

    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    sandbox.filters.update(filters)
    return sandbox


def refuse_unsafe(installed: str) -> None:
    """Raises UnsafeJinjaError for a version of Jinja older than the lowest that is safe: what a package asks for is
    looked at when it is installed, and an environment may have changed since."""
    if _numbers(installed) < _numbers(LOWEST_JINJA):
        raise UnsafeJinjaError(
            f"Jinja2 {installed} is installed, and a chat template can leave its sandbox and run any program "
            f"(CVE-2025-27516); install a later one: pip install 'jinja2>={LOWEST_JINJA}'"
        )


def _numbers(of_version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", of_version)[:3])


def _num_bits(operator: str, left: Any, right: Any) -> int:
    """About how many bits the result has where both sides are whole numbers, else 0."""
    if not (isinstance(left, int) and isinstance(right, int)):
        return 0
    return left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * max(0, right)
