"""Shell scripts drawn from a table of forms, shell_forms.txt, that set the degrees and the batch of a command.

All variables have values from the beginning, so that a script means the same on any machine.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from random import Random

NUMBERS = ("TP", "PP", "MBS", "N", "K")
WORDS = ("SIZE", "NAME", "LIST")
_MOST_DEPTH = 3
_BEGINNING = """TP=2; PP=1; MBS=4; N=8; K=3
SIZE=7B; NAME=dir/llama-2-13b.bin; LIST=4,8,16
A=(1 2 4 8); W=(a b 'c d')
declare -A M=([7B]=2 [13B]=4 [70B]=8)
double() { echo $(( $1 * 2 )); }
degree() { if [ "$1" = 7B ]; then echo 2; else echo 4; fi; }
last() { local x; for x in "$@"; do :; done; printf '%s\\n' "$x"; }
put() { TP=$1; local PP=9; MBS=${2:-1}; }
small() { [ "$1" -lt 5 ]; }
"""
_ENDS = (
    'run "$TP" "$PP" "$MBS" "$N" "$K" "$SIZE" "$NAME" "$LIST" "${M[$SIZE]}" ${#M[@]}',
    'run $TP $PP $MBS $N $K $SIZE $NAME $LIST "${A[@]}" ${#A[@]} ${W[@]}',
    'run --tp $TP --pp=$PP --mbs "${MBS}" ${M[$SIZE]} "${W[@]}" $N $K',
    'for R in 1 2; do run $R $TP $PP $MBS; done; run $N $K "$SIZE $NAME" ${LIST}',
)
_TRAINING = """torchrun --nproc_per_node $((TP * PP)) pretrain_gpt.py --num-layers 840 --hidden-size 3360 --bf16 \\
  --num-attention-heads 840 --seq-length 840 --max-position-embeddings 840 --vocab-size 840 --train-iters 9 --lr 1e-4 \\
  --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --micro-batch-size $MBS \\
  --global-batch-size $((MBS * 8))
"""
# The statements that have one form of a kind alone.
_AROUND = {
    "statement": "{}",
    "body": "{}",
    "number": "{v}={}",
    "text": "{u}={}",
    "sum": "{v}=$(( {} ))",
    "condition": "if {}; then {v}={d}; else {v}=6; fi",
    "test": "[[ {} ]] && {v}={d}",
    "subject": "case {} in {pattern}) {v}={d};; {pattern}) {v}=6;; esac",
    "regex": "[[ $SIZE =~ {} ]] && {v}={d}",
    "sorting": "{u}=$(printf 'v%d\\n' {d} {number} | sort -{} | head -1)",
    "pattern": "case $SIZE in {}) {v}={d};; *) {v}=6;; esac",
    "items": "for i in {}; do {v}+=$i; done",
}
_SMALL: dict[str, tuple[str, ...]] = {
    "d": ("1", "2", "3", "4", "5", "7", "8"),
    "d4": ("0", "1", "2", "3"),
    "d3": ("1", "2", "3"),
    "bit": ("0", "1"),
    "size": ("7B", "13B", "70B"),
    "v": NUMBERS,
    "u": WORDS,
}
_KIND = re.compile(r"\[(\w+)\]")


def _forms() -> dict[str, list[str]]:
    """The forms by their kinds."""
    forms: dict[str, list[str]] = {}
    lines = (Path(__file__).parent / "shell_forms.txt").read_text(encoding="utf-8").splitlines()
    for line in lines[2:]:
        if kind := _KIND.fullmatch(line):
            forms[kind[1]] = []
        elif line:
            forms[[*forms][-1]].append(line.replace("¶", "\n"))
    return forms


FORMS = _forms()
_PLACE = re.compile(rf"{{({'|'.join([*FORMS, *_SMALL])})}}")


@dataclass
class ScriptDraw:
    """A script being drawn."""

    random: Random

    def script(self, num_statements: int) -> str:
        """A script whose last command is `run`, with the variables in its words."""
        return self._with_end(num_statements, self.random.choice(_ENDS))

    def training_script(self, num_statements: int) -> str:
        """A script whose last command trains with Megatron-LM, by degrees and a batch of its variables."""
        return self._with_end(num_statements, _TRAINING)

    def _with_end(self, num_statements: int, end: str) -> str:
        statements = [self._of_kind("statement", 0) for _ in range(num_statements)]
        return _BEGINNING + "\n".join([*statements, end]) + "\n"

    def script_of(self, kind: str, form: str) -> str:
        """A script with one form of a kind."""
        around = _AROUND[kind].replace("{}", form)
        return _BEGINNING + self._filled(around, _MOST_DEPTH) + "\n" + _ENDS[0] + "\n" + _ENDS[1] + "\n"

    def _of_kind(self, kind: str, depth: int) -> str:
        """One form of a kind, with its places filled; a short one deep inside another."""
        if kind in _SMALL:
            return self.random.choice(_SMALL[kind])
        short = FORMS[kind][: 1 if kind == "statement" else 2]
        return self._filled(self.random.choice(short if depth >= _MOST_DEPTH else FORMS[kind]), depth)

    def _filled(self, form: str, depth: int) -> str:
        """A form with its places filled."""
        return _PLACE.sub(lambda place: self._of_kind(place[1], depth + 1), form)
