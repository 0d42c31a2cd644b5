"""The output of commands that compute a whole number or a text from what they are given: expr, bc, echo, basename."""

import re
from collections.abc import Callable
from pathlib import PurePath

from shardwright.interchange.reading.shell_arithmetic import Arithmetic
from shardwright.interchange.reading.shell_marks import mark, unknown_names
from shardwright.interchange.reading.shell_words import ShellFault, ShellReader, Token, document_token

# Commands that count the nodes of a job by the list of them.
COUNTS_NODES = re.compile(
    r"(?s)\A(?=.*\b(?:PBS_NODEFILE|COBALT_NODEFILE|SLURM_JOB_NODELIST|SLURM_NODELIST)\b)(?!.*\b(?:head|tail|grep|sed|awk)\b)"
    r".*\bwc -l\b"
)
_SUM = re.compile(r"[0-9\s()+*/%-]+")  # of whole numbers
_SCALE = re.compile(r"^\s*scale\s*=\s*0\s*;|;\s*$")
_BC = (["bc"], ["bc", "-l"], ["bc", "-q"])
_UNCHANGED = (["cat"], ["xargs"], ["tr", "-d", " "], ["tr", "-d", "\n"], ["tr", "-d", "\\n"])  # of a number or a word


def output_of(
    text: str, words_of: Callable[[Token], list[str]], holds: Callable[[list[str]], bool | None]
) -> str | None:
    """The output of the commands of an expansion; a mark if it depends on an unknown variable; None if they are none
    of those that are followed. `words_of` expands a token, and `holds` tells the truth of the words within brackets.
    Raises ShellFault for a text that is no shell's."""
    tokens = [token for token in ShellReader(text).read() if token.pieces or token.operator]
    if tokens and tokens[0].plain == "if":
        return _chosen_output(tokens, words_of, holds)
    commands = _pipeline(text, words_of)
    if commands is None:
        return None
    output = _first_output(commands[0])
    for words in commands[1:]:
        if output is None:
            return None
        output = _value_of(_SCALE.sub("", output)) if words in _BC else output if words in _UNCHANGED else None
    return output


def _pipeline(text: str, words_of: Callable[[Token], list[str]]) -> list[list[str]] | None:
    """The words of each command of a pipeline; None if the text is something else. A here-string is an echo before."""
    commands: list[list[str]] = [[]]
    is_given = is_ended = False
    for token in ShellReader(text).read():
        if token.operator == "|":
            commands.append([])
        elif token.operator in ("<<<", "<<", "<<-"):
            is_given = True
        elif token.operator == "\n":
            is_ended = bool(commands[-1])
        elif token.operator.strip() or (token.pieces and is_ended):
            return None
        elif token.pieces and is_given:
            given = token if token.document is None else document_token(token.document, token.expands)
            commands[-1:] = [["echo", *words_of(given)], commands[-1]]
            is_given = False
        elif token.pieces:
            commands[-1] += words_of(token)
    return commands if all(commands) else None


def _chosen_output(
    tokens: list[Token], words_of: Callable[[Token], list[str]], holds: Callable[[list[str]], bool | None]
) -> str | None:
    """The output of `if [ ... ]; then echo ...; else echo ...; fi`; None if it is more, or the condition is unknown."""
    parts: dict[str, list[Token]] = {}
    part = ""
    for token in tokens:
        begins = not part or not parts[part] or _is_end(parts[part])
        if begins and token.plain in ("if", "then", "else", "elif", "fi"):
            part = token.plain
            if part in parts or part == "elif":
                return None
            parts[part] = []
        elif token.operator != "\n" or (parts[part] and not _is_end(parts[part])):
            parts[part].append(token)
    condition, *others = (_command_of(parts.get(name, []), words_of) for name in ("if", "then", "else"))
    is_whole = [*parts][-1] == "fi" and not parts["fi"] and "then" in parts
    if not is_whole or not condition or None in others or condition[0] + condition[-1] not in ("[]", "[[]]"):
        return None
    truth = holds(condition[1:-1])
    if truth is None:
        return None
    words = others[0 if truth else 1]
    return _first_output(words) if words else ""


def _is_end(tokens: list[Token]) -> bool:
    return tokens[-1].operator in (";", "\n")


def _command_of(tokens: list[Token], words_of: Callable[[Token], list[str]]) -> list[str] | None:
    """The words of one command; empty without tokens, None if there are more commands."""
    plain = tokens[:-1] if tokens and _is_end(tokens) else tokens
    if any(token.operator for token in plain):
        return None
    return [word for token in plain for word in words_of(token)]


def _first_output(words: list[str]) -> str | None:
    """The output of a command that reads nothing."""
    name, arguments = PurePath(words[0]).name, words[1:]
    if name == "echo":
        plain = [word for word in arguments if word not in ("-n", "-e")]
        return " ".join(plain) if plain and not any("\\" in word for word in plain) else None
    if name in ("which", "command") and len(arguments) in (1, 2) and arguments[-1][:1].isalpha():
        return arguments[-1]
    if name == "expr":
        return _value_of(" ".join(arguments))
    if any(unknown_names(word) for word in arguments):
        return None
    if name == "basename" and len(arguments) in (1, 2):
        last = PurePath(arguments[0]).name
        ending = arguments[1] if len(arguments) == 2 else ""
        return last.removesuffix(ending) if last != ending else last
    if name == "dirname" and len(arguments) == 1 and arguments[0]:
        return str(PurePath(arguments[0]).parent)
    return None


def _value_of(expression: str) -> str | None:
    """The value of an expression of whole numbers; a mark if a name in it is unknown; None if it is none."""
    if names := unknown_names(expression):
        return mark(names[0])
    if not _SUM.fullmatch(expression):
        return None
    try:
        return str(Arithmetic(expression, {}).value())
    except ShellFault:
        return None
