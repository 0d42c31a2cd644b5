"""Jinja's sandbox for chat templates of strangers: a version without a known escape, and with bounded arithmetic.

Jinja computes operators between constants while it compiles a template. Operators that can make numbers of any size are
called through the sandbox instead, when the template runs; the sandbox limits their results.
"""

import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from shardwright.config.phrase import say

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

# In older versions a template reaches str.format by |attr, and with it any module: CVE-2025-27516.
LOWEST_JINJA = "3.1.6"
# The most bits of a number that a template computes: far more than any needs, and computed in a microsecond.
_MOST_BITS = 1 << 16


class UnsafeJinjaError(ValueError):
    """The installed Jinja has a sandbox that templates can escape; the message has a way out."""


def template_sandbox(extensions: list[Any], filters: Mapping[str, Any]) -> "ImmutableSandboxedEnvironment":
    """A Jinja environment for templates of strangers, with `extensions` and `filters` beside Jinja's own. Raises
    UnsafeJinjaError."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    refuse_unsafe(version("jinja2"))

    class Sandbox(ImmutableSandboxedEnvironment):
        """A sandbox with bounded products and powers."""

        intercepted_binops = frozenset(["*", "**"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            """Compute a product or a power. Raises ValueError if it is too large."""
            num_bits = _num_bits(operator, left, right)
            if num_bits > _MOST_BITS:
                raise ValueError(
                    say(
                        "a number of more than {most_bits:,} bits ({operator})", most_bits=_MOST_BITS, operator=operator
                    )
                )
            return super().call_binop(context, operator, left, right)

    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    sandbox.filters.update(filters)
    return sandbox


def refuse_unsafe(installed: str) -> None:
    """Raises UnsafeJinjaError for a version of Jinja older than the lowest safe one. The package's requirement is
    checked only when it is installed, and the environment may have changed since."""
    if _numbers(installed) < _numbers(LOWEST_JINJA):
        raise UnsafeJinjaError(
            say(
                "Jinja2 {installed} is installed, and a chat template can leave its sandbox and run any program "
                "(CVE-2025-27516); install a later one: pip install 'jinja2>={lowest_jinja}'",
                installed=installed,
                lowest_jinja=LOWEST_JINJA,
            )
        )


def _numbers(version_text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version_text)[:3])


def _num_bits(operator: str, left: Any, right: Any) -> int:
    """About how many bits the result has if both operands are integers, else 0."""
    if not (isinstance(left, int) and isinstance(right, int)):
        return 0
    return left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * max(0, right)
