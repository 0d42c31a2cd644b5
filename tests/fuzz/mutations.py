"""Changes that make valid input wrong: to values, nested fields, text and bytes. All from one Random."""

import copy
import json
from collections.abc import Sequence
from random import Random
from typing import Any

Json = Any

NUMBERS: tuple[Json, ...] = (
    0, 1, -1, 2, 3, 5, 7, 8, 16, 63, 64, 65, 1000, 4096, 65535, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63,
    -(2**63), 10**12, 10**18, 10**30, 0.0, -0.0, 0.5, 1.5, 1e-300, 5e-324, 1e-9, 1e9, 1e15, 1e300, 1e308,
    float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
STRINGS = (
    "", " ", "x", "none", "full", "nan", "0", "1e9", "true", "null", "../../etc/passwd", "/dev/zero", "/proc", "a.toml",
    "no-such.toml", "quickstart", "llama3-8b", "h100-sxm", "this-machine", "=1+1", "\u0000", "\ufeff", "ä😀\u202e",
    "x" * 300,
    "x" * 70_000, "'", '"', "a\nb", "%s%n", "{}", "model.layers", ".", "/", "~", "$HOME", "*", "[", "tp=4",
)  # fmt: skip


def value(random: Random, old: Json = None) -> Json:
    """A value in the place of an old one: near it, special, or of another type."""
    kind = random.randrange(10)
    if kind < 4 and isinstance(old, int | float) and not isinstance(old, bool):
        return _near(random, old)
    if kind < 6:
        return random.choice(NUMBERS)
    if kind < 8:
        return random.choice(STRINGS)
    if kind == 8:
        return random.choice([True, False, [], {}, [1], [[1, 2], [3]], [None], {"name": "x"}, [""] * 3, {"": 0}])
    return nested(random, old)


def _near(random: Random, old: float) -> Json:
    return random.choice(
        [old + 1, old - 1, old * 2, old * 3, old // 2, old * 10, old * 1000, -old, float(old), old / 3, str(old), [old]]
    )


def nested(random: Random, old: Json) -> Json:
    """The old value, deep within lists or tables."""
    result = old
    for _ in range(random.choice([1, 2, 5, 11, 14, 60])):
        result = [result] if random.random() < 0.6 else {random.choice(["a", "layers", "name"]): result}
    return result


def fields(random: Random, given: Json, names: Sequence[str]) -> Json:
    """Nested fields with some of them changed, removed, renamed, added or moved."""
    made = copy.deepcopy(given)
    for _ in range(random.choice([1, 1, 1, 2, 2, 3, 6])):
        path = _paths(made)
        if not path:
            return value(random, made)
        holder, key = random.choice(path)
        kind = random.randrange(10)
        if kind < 6:
            holder[key] = value(random, holder[key])
        elif kind == 6:
            del holder[key]
        elif isinstance(holder, dict):
            name = random.choice([*names, "", "x", str(key).upper(), f"{key}s", "name"])
            holder[name] = holder.pop(key) if kind == 7 else value(random, holder[key])
        else:
            holder.append(value(random, holder[key]))
    return made


def _paths(given: Json) -> list[tuple[Any, Any]]:
    results: list[tuple[Any, Any]] = []
    left = [given]
    while left:
        holder = left.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in keys:
            results.append((holder, key))
            left.append(holder[key])
    return results


def toml(given: dict[str, Json]) -> str:
    """Nested fields as TOML; not always valid, for some values are none of TOML's."""
    plain = {key: one for key, one in given.items() if not isinstance(one, dict)}
    lines = [f"{_key(key)} = {toml_value(one)}" for key, one in plain.items()]
    for name, section in given.items():
        if isinstance(section, dict):
            lines += ["", f"[{_key(name)}]"] + [f"{_key(key)} = {toml_value(one)}" for key, one in section.items()]
    return "\n".join(lines) + "\n"


def _key(name: object) -> str:
    text = str(name)
    return text if text and all((c.isalnum() and c.isascii()) or c in "-_" for c in text) else json.dumps(text)


def toml_value(one: Json) -> str:
    """One value."""
    if isinstance(one, dict):
        return "{ " + ", ".join(f"{_key(key)} = {toml_value(of)}" for key, of in one.items()) + " }"
    if isinstance(one, list):
        return "[" + ", ".join(map(toml_value, one)) + "]"
    if isinstance(one, float):
        return repr(one)
    return '"none"' if one is None else json.dumps(one)


def broken(random: Random, given: bytes) -> bytes:
    """Bytes with some changed, cut, doubled, moved or put in."""
    made = bytearray(given)
    for _ in range(random.choice([1, 1, 2, 4, 16])):
        at = random.randrange(len(made) + 1)
        kind = random.randrange(9)
        if kind == 0:
            del made[at:]
        elif kind == 1:
            del made[at : at + random.choice([1, 2, 8, 100])]
        elif kind == 2 and made:
            made[at % len(made)] = random.randrange(256)
        elif kind == 3 and made:
            made[at % len(made)] ^= 1 << random.randrange(8)
        elif kind == 4:
            made[at:at] = made[at : at + random.choice([1, 10, 1000])] * random.choice([1, 2, 50])
        elif kind == 5:
            made[at:at] = random.choice(
                [b"\0", b"\xff", b"\xef\xbb\xbf", b"\r\n", b'"', b"[" * 500, b"{" * 5000, b"9" * 5000]
            )
        elif kind == 6:
            made[at:at] = random.randbytes(random.choice([1, 4, 200]))
        elif kind == 7 and random.random() < 0.2:
            return random.choice([b"", made.decode("latin-1").encode("utf-16"), bytes(made[::-1]), b"\0" * 1000])
        else:
            other = random.randrange(len(made) + 1)
            made[at:at] = made[other : other + 40]
    return bytes(made)
