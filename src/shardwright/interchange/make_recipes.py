"""Makefiles and justfiles as launch scripts: each recipe is a branch that runs where the first argument is its name, or
where there is none. Lines keep their numbers.

Sources: the manuals of GNU Make 4.4 ("Writing Recipes", "How to Use Variables"), just.systems (July 2026).
"""

import re
from collections.abc import Callable, Iterable
from pathlib import PurePath

_MAKE_NAMES, _JUST_NAMES = ("makefile", "gnumakefile"), ("justfile", ".justfile")
_MAKE_VARIABLE = re.compile(r"(?:(?:export|override)[ \t]+)?([A-Za-z_]\w*)[ \t]*(\?|\+|::?)?=[ \t]*(.*)")
_MAKE_CONDITION = re.compile(r"[ ]*(ifeq|ifneq|ifdef|ifndef)\b[ \t]*(.*)")
_MAKE_INCLUDE = re.compile(r"[ ]*include[ \t]+(.*)")  # -include is passed: its files need not be there
_JUST_VARIABLE = re.compile(r"(?:export[ \t]+)?([A-Za-z_][\w-]*)[ \t]*:=[ \t]*(.*)")
_NAME = re.compile(r"[\w./%-]{1,200}")
_JUST_TARGET = re.compile(r"@?([A-Za-z_][\w-]*)((?:[ \t]+[*+$]?[\w-]+(?:=(?:\"[^\"]*\"|'[^']*'|\S+))?)*)[ \t]*:(?!=)")
_PARAMETER = re.compile(r"([*+$]?)([\w-]+)(?:=(\"[^\"]*\"|'[^']*'|\S+))?")
_REFERENCE = re.compile(r"\$(?:\((\w+)\)|\{(\w+)\})")
_INTERPOLATED = re.compile(r"\{\{\s*([^}]*?)\s*\}\}")
_WITH_DEFAULT = re.compile(r"env(?:_var_or_default)?\(\s*[\"'](\w+)[\"']\s*,\s*[\"']([^\"']*)[\"']\s*\)")
_BRANCH = 'if [ "${1:-'  # how the branch of a target begins
_OUTPUT = "\0("  # $(shell ...) meanwhile
_MOST_CHARACTERS = 20_000  # of a value that is put in as text


def recipes_script(path: str, text: str) -> str:
    """The script of a Makefile or a justfile by its name; empty for another file."""
    name = PurePath(path).name.lower()
    if name in _MAKE_NAMES or name.endswith(".mk"):
        return _script(text.splitlines(), _of_make(text.splitlines(), is_included=name.endswith(".mk")), ("\t",))
    if name in _JUST_NAMES or name.endswith(".just"):
        return _script(text.splitlines(), _of_just, ("\t", " "))
    return ""


def _script(lines: Iterable[str], converted: Callable[[str, bool], str], indents: tuple[str, ...]) -> str:
    """The lines of a script in the place of those of a file; `converted` gives that of a line, in a recipe or not."""
    result, in_recipe, is_continued = list[str](), False, False
    for line in lines:
        if is_continued:
            result.append(converted(line, in_recipe))
        elif line.startswith(indents) and in_recipe:
            result.append(converted(line.lstrip(" \t@+-"), True))
        else:
            script_line = converted(line, False)
            begins = script_line.startswith(_BRANCH)
            result.append(f"fi; {script_line}" if begins and in_recipe else script_line)
            in_recipe = in_recipe or begins
        is_continued = line.rstrip().endswith("\\") and not line.lstrip().startswith("#")
    return "\n".join([*result, "fi" if in_recipe else "", ""])


def _script_name(name: str) -> str:
    """The name under which the script of an included file is read: other Makefiles get an ending of their own, and
    files of variables, such as .env, are scripts."""
    if name.endswith(".env"):
        return name if name.startswith(("/", "./", "$")) else f"./{name}"
    return f"{name}.sh"


def _branch(name: str, further: str = "") -> str:
    """The beginning of a branch that runs for a target."""
    return f'{_BRANCH}{name}}}" = "{name}" ]; then {further}:'


def _of_make(lines: Iterable[str], *, is_included: bool) -> Callable[[str, bool], str]:
    """A function that converts a line of a Makefile. Variables of one word stay variables, and others are put in as
    text, for make expands them before a shell splits words; those that a condition gives, and those of a file that
    another one includes, stay variables without quotes within."""
    texts: dict[str, str] = {}
    chosen = set[str]()  # variables that a condition of the Makefile gives, which a shell chooses then
    depth = 0
    for line in _joined(lines):
        depth += bool(_MAKE_CONDITION.match(line)) - line.lstrip().startswith("endif")
        if (match := _MAKE_VARIABLE.match(line.lstrip(" "))) and not line.startswith("\t"):
            name, value = match[1], match[3].split(" #")[0].strip()
            texts[name] = f"{texts.get(name, '')} {value}".strip() if match[2] == "+" else value
            chosen |= {name} if depth > 0 else set()

    kept: dict[str, str] = {}  # what stands for a variable; for itself while its value is being expanded

    def put(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in kept:
            kept[name] = f"${{{name}}}"
            if name not in chosen and len(texts.get(name, "").split()) > 1:
                value = expanded(texts[name])
                kept[name] = value if len(value) <= _MOST_CHARACTERS else kept[name]
        return kept[name]

    def expanded(text: str) -> str:
        parts = text.replace("$(shell ", _OUTPUT).split("$$")  # $$ is a dollar of the shell
        return "$".join(_REFERENCE.sub(put, part) for part in parts).replace(_OUTPUT, "$(")

    def converted(line: str, in_recipe: bool) -> str:
        if in_recipe:
            return expanded(line)
        if condition := _condition_of(line):
            return expanded(condition)
        if match := _MAKE_INCLUDE.match(line):
            return "; ".join(f"source {_script_name(name)}" for name in expanded(match[1]).split()[:8])
        if match := _MAKE_VARIABLE.match(line.lstrip(" ")):
            name, value = match[1], match[3].split(" #")[0].strip()
            is_word = len(value.split()) == 1 or ((is_included or name in chosen) and not {*value} & {*"\"'"})
            if not is_word or value.endswith("\\"):
                return ""
            if match[2] == "+":
                return f'{name}="${{{name}}} {expanded(value)}"' if name in chosen else ""
            is_default = match[2] == "?"
            return f'{name}="${{{name}:-{expanded(value)}}}"' if is_default else f'{name}="{expanded(value)}"'
        return _branch(target) if (target := _target_of(line)) else ""

    return converted


def _condition_of(line: str) -> str:
    """The line of a shell for one that begins, changes or ends a condition of make; empty for another line."""
    words = line.strip()
    if words == "endif" or words.startswith("endif "):
        return "fi"
    if words == "else":
        return "else :"
    if not (match := _MAKE_CONDITION.match(re.sub(r"^else[ \t]+", "", words))):
        return ""
    opening = "elif" if words.startswith("else") else "if"
    if match[1] in ("ifdef", "ifndef"):
        return f'{opening} [ -{"n" if match[1] == "ifdef" else "z"} "$({match[2].strip()})" ]; then :'
    sides = _sides_of(match[2].strip())
    is_equal = match[1] == "ifeq"
    if "" in sides:  # a variable that nobody sets is empty there
        return f'{opening} [ -{"z" if is_equal else "n"} "{sides[0] or sides[1]}" ]; then :'
    equals = "=" if is_equal else "!="
    return f'{opening} [ "{sides[0]}" {equals} "{sides[1]}" ]; then :'


def _sides_of(text: str) -> tuple[str, str]:
    """The two sides of ifeq: (A,B), or each in quotes."""
    if match := re.fullmatch(r"\((.*?),(.*)\)", text):
        return match[1].strip(), match[2].strip()
    parts = re.findall(r"\"([^\"]*)\"|'([^']*)'", text)
    return (parts[0][0] or parts[0][1], parts[1][0] or parts[1][1]) if len(parts) == 2 else ("$(shell unknown)", "")


def _target_of(line: str) -> str:
    """The first target of a rule; empty for another line, or a target such as .PHONY."""
    head, colon, prerequisites = line.partition(":")
    words = head.split(maxsplit=1)
    if not (colon and words) or prerequisites.startswith("=") or {*head} & {*"=#"}:
        return ""
    return words[0] if _NAME.fullmatch(words[0]) and not words[0].startswith(".") else ""


def _joined(lines: Iterable[str]) -> list[str]:
    """Lines with those that go on behind a backslash."""
    return re.sub(r"\\\n[ \t]*", " ", "\n".join(lines)).splitlines()


def _of_just(line: str, in_recipe: bool) -> str:
    """The line of a script for one of a justfile."""
    if in_recipe:
        return _INTERPOLATED.sub(lambda match: _just_value(match[1]), line)
    if match := _JUST_VARIABLE.match(line):
        return f'{_shell_name(match[1])}="{_just_value(match[2])}"'
    if not (match := _JUST_TARGET.match(line)):
        return ""
    assigned, place = list[str](), 2
    for kind, name, default in _PARAMETER.findall(match[2]):
        if kind not in ("*", "+"):
            assigned.append(f'{_shell_name(name)}="${{{place}:-{_unquoted(default)}}}"; ')
            place += 1
        else:
            assigned.append(f'{_shell_name(name)}=""; ')
    return _branch(match[1], "".join(assigned))


def _just_value(expression: str) -> str:
    """The text of an expression: a string, a variable, one of the environment with a default."""
    if match := _WITH_DEFAULT.fullmatch(expression):
        return f"${{{match[1]}:-{match[2]}}}"
    if re.fullmatch(r"[A-Za-z_][\w-]*", expression):
        return f"${{{_shell_name(expression)}}}"
    return "." if expression.endswith("_directory()") else _unquoted(expression)


def _unquoted(text: str) -> str:
    return text.strip().strip("\"'")


def _shell_name(name: str) -> str:
    return name.replace("-", "_")
