"""The values that a script gives its variables are those of bash, or unknown; never those that they had before."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from shardwright.interchange.reading.shell_marks import unknown_names
from shardwright.interchange.reading.shell_script import Script
from shardwright.interchange.reading.shell_values import Variables

OPEN = 'if [ "$(hostname -x)" = no-such-host ]; then'  # a condition on the output of a command

# Scripts by what they do; each ends with a command `run`, whose words are compared.
FOLLOWED = {
    "lines of a here-document": "A=(1)\nmapfile -t A <<EOF\n16\n32\nEOF\nrun ${A[1]} ${#A[@]}",
    "lines of a here-string": "B=1\nreadarray -t B <<< '16'\nrun $B",
    "words of a line": "read -r A B <<EOF\n8 16\n1 2\nEOF\nread -r C <<< ' 4 '\nrun $A $B $C",
    "words into an array": "read -r -a A <<< '16 64'\nread -ra B <<EOF\n1 2\nEOF\nrun ${A[1]} ${B[0]}",
    "words between commas": "IFS=, read -r A B <<< '8,16'\nrun $A $B",
    "separators": 'A=8,16\nIFS=,\nB=(1 2)\nC="${B[*]}"\nset -- $A\nIFS=\' \'\nrun $2 $# "$C"',
    "no separators": "A='8 16'\nIFS=\nset -- $A\nrun $#",
    "a document that is sourced": "A=1\nsource /dev/stdin <<EOF\nA=16\nEOF\n. /dev/stdin <<< 'B=2'\nrun $A $B",
    "a document that is evaluated": 'A=1\neval "$(cat <<EOF\nA=16\nEOF\n)"\nrun $A',
    "a document with an unused command": ": <<'EOF'\nA=1\nEOF\nrun ${A:-16}",
    "a file in two parts": (
        "cat > a.sh <<EOF\nA=1\nEOF\ncat >> a.sh <<EOF\nA=16\nEOF\necho B=3 >> a.sh\n. ./a.sh\nrun $A $B"
    ),
    "a file of echo": "A=1\necho 'A=16' > a.sh\nsource a.sh\nrun $A",
    "a file of tee": "A=1\ntee a.sh > /dev/null <<EOF\nA=16\nEOF\nsource ./a.sh\nrun $A",
    "a script that is sourced with arguments": "cat > a.sh <<'EOF'\nA=$1\nEOF\nsource ./a.sh 16\nrun $A",
    "a script that is started": "cat > a.sh <<'EOF'\nA=32\nEOF\nA=16\nbash a.sh\nbash -c 'A=8; B=2'\nrun $A ${B:-none}",
    "a name in quotes": 'N=A\nexport "A=16" B=1\ndeclare "${N}2=4"\nexport ${N}3=5\nrun $A $A2 $A3',
    "a global name in a function": "A=1 B=2\nf() { declare -g A=16; declare B=3; }\nf\nrun $A $B",
    "whole numbers": "declare -i A=8*2 B=4\nB+=3\nrun $A $B",
    "what a pipe sets": (
        "A=16\nA=32 | cat\necho 1 | { A=3; }\nfor i in 1; do A=$i; done | cat\nif true; then A=2; fi | cat\nrun $A"
    ),
    "what a part of a pipe sets": "A=16\necho 8 | while true; do A=32; break; done\nf() { A=4; }\nf | cat\nrun $A",
    "what runs aside": "A=16\nA=32 &\nfor i in 1; do A=$i; done > log.txt &\n{ A=3; } &\nwait\nrun $A",
    "a function in a subshell": "A=16\nf() ( A=32; )\nf\nrun $A",
    "words before a command": "time A=16\ncommand eval B=2\nbuiltin declare C=3\nrun $A $B $C",
    "a case that falls through": "case a in a) A=1;& b) B=2;; c) B=3;; esac\nrun $A $B",
    "a case that goes on": "case ab in a*) A=1;;& b*) A=2;;& *b) B=3;; *) B=4;; esac\nrun $A $B",
    "quoted patterns": "case ab in 'a*') A=1;; a*) A=2;; esac\ncase '*' in '?') B=1;; '*') B=2;; esac\nrun $A $B",
    "quoted patterns in a test": (
        'A=1\n[[ model-7b == "model*" ]] && A=2\nB=1\n[[ model-7b == model* ]] && B=2\nrun $A $B'
    ),
    "parts of an array": (
        'A=(4 8 16)\nB=("${A[@]:1}")\nset -- 1 2 3\nrun ${B[0]} ${A[@]:1:1} ${A[@]: -1} "${@:2}" ${@:1:1}'
    ),
    "an array without an index": "A=(16 32)\nB=()\nrun $A ${A} x$B",
    "text behind an array": "A=(1 2)\nA+=6\nA[1]+=5\ndeclare -A M=([x]=1)\nM[x]+=6\nrun ${A[@]} ${M[x]}",
    "other bases": "run $((020)) $((0x10)) $((2#101)) $((16#1f)) $((10#016))",
    "signs of bits": "run $((1<<4)) $((256>>2)) $((48&31)) $((17^1)) $((16|1)) $((1+1<<2)) $((7&3==3))",
    "a counted loop": (
        "for ((A=0; A<16; A+=3)); do B=$A; done\nfor ((C=0; C<9; C++)); do [ $C = 4 ] && break; done\nrun $A $B $C"
    ),
    "a break out of two loops": "for i in 1 2; do for j in 1 2; do A=$i$j; break 2; done; done\nrun $A $i",
    "a continue of the outer loop": "A=; for i in 1 2; do for j in 1 2; do A=$A$i$j; continue 2; done; done\nrun $A",
    "functions and variables of one name": "A=16\nA() { true; }\nunset -f A\nrun $A",
    "the beginning and the end of a text": (
        "A=x16x B=16\nrun ${A/#x/} ${A/%x/} ${A/#1/y} ${B/#/1} ${B/%/4} ${B/#1*/2} ${A//x/4} ${A/%x*/}"
    ),
    "signs for both ends, in all places": "A='#1#2%3%'\nrun ${A//#/} ${A//%/0}",
    "a slash": "A=org/model-16/x\nrun ${A//\\//-} ${A/\\/model/} ${A/-/\\/}",
    "other characters": "A=b16 B=1\ncase $A in [^a]*) B=16;; esac\nrun $B ${A#[^a]}",
    "a final value": "readonly A=16\nB=8\nreadonly B\nA=32 2>/dev/null\nB=4\nB+=2\nrun $A $B",
    "a final value in a subshell": "A=8\n(readonly A; A=4)\nA=16\nrun $A",
    "let": "A=32\nlet A=8*2\nrun $A",
    "let in quotes": "A=32\nlet 'A /= 2'\nrun $A",
    "printf": "A=32\nprintf -v A '%d' 16\nrun $A",
    "arithmetic before": "A=15\n((++A))\nrun $A",
    "arithmetic of bits": "A=15\n((A|=16))\nrun $A",
}
# Scripts that change a variable in a way that isn't followed.
ASKED = {
    "another name": "A=32\ndeclare -n B=A\nB=16\nrun $A",
    "another name in a function": "A=32\nf() { local -n B=$1; B=16; }\nf A\nrun $A",
    "arithmetic in a word": "A=32\necho $((A=16))\nrun $A",
    "arithmetic behind": "A=15\nB=$((A++))\nrun $A",
    "lines of a program": "A=32\nmapfile -t A < <(no-such-program; echo 16)\nrun $A",
    "lines without ends": "A=32\nmapfile -n 1 A <<EOF\n16\nEOF\nrun $A",
    "an element that is unset": "A=(32 16)\nunset 'A[0]'\nrun ${A[@]}",
    "arithmetic in an open part": f"A=16\n{OPEN} ((A*=2)); fi\nrun $A",
    "let in an open part": f"A=16\n{OPEN} let A*=2; fi\nrun $A",
    "printf in an open part": f"A=16\n{OPEN} printf -v A 32; fi\nrun $A",
    "declare in an open part": f"A=16\n{OPEN} declare A=32; fi\nrun $A",
    "quotes in an open part": f'A=16\n{OPEN} export "A=32"; fi\nrun $A',
    "a default in an open part": f"{OPEN} : ${{A:=32}}; fi\nrun ${{A:-16}}",
    "a test": 'A=16\n[ "$(hostname -x)" = no-such-host ] && A=32\nrun $A',
    "a test before a group": 'A=16\n[[ "$(hostname -x)" = no-such-host ]] && { A=32; }\nrun $A',
    "a test and what is so otherwise": 'A=16\n[ "$(hostname -x)" != no-such-host ] || A=32\nrun $A',
    "a command that answers": "A=16\ngrep -q no-such-word /dev/null && A=32\nrun $A",
    "letters of another case": "declare -u A=x\nA=b\nrun $A",
    "letters of another case in a test": "declare -l A=X\nB=1\n[ $A = x ] && B=16\nrun $B",
    "lists of patterns": "shopt -s extglob\nA=xx16\nrun ${A##+(x)}",
    "lists of patterns in a test": "A=1\n[[ xx == +(x) ]] && A=16\nrun $A",
    "classes of characters": "A=x16\ncase $A in [[:alpha:]]*) B=16;; *) B=1;; esac\nrun $B ${A#[[:alpha:]]}",
    "the text that was replaced": "A=16\nrun ${A/1/[&]}",
    "escaped signs": "A='x*16'\nB='x\\*'\nrun ${A#$B}",
}


def _scripts(sign: str) -> dict[str, str]:
    """The scripts of scripts_as_bash.txt whose names stand behind a sign."""
    text = (Path(__file__).parent / "scripts_as_bash.txt").read_text(encoding="utf-8")
    parts = re.findall(r"^(==|\?\?) (.*)\n((?:(?!== |\?\? ).*\n)*)", text, re.MULTILINE)
    return {name: script.removesuffix("\n") for kind, name, script in parts if kind == sign}


FOLLOWED |= _scripts("==")
ASKED |= _scripts("??")


def _words(script: Script) -> list[str]:
    """The words behind `run`."""
    return [word for command in script.commands for word in command.words if command.words[0] == "run"][1:]


def _of_bash(text: str, folder: Path) -> list[str]:
    """The words that bash gives `run`."""
    bash = shutil.which("bash")
    assert bash
    shown = "run() { printf '%s\\n' \"$@\"; }\n"
    command = [bash, "-c", f"exec 3>&1 >/dev/null 2>/dev/null\n{shown.replace('; }', ' >&3; }')}{text}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=folder)
    return done.stdout.splitlines()


def _followed(text: str) -> Script:
    script = Script(Variables())
    script.follow(text)
    return script


@pytest.mark.parametrize("name", FOLLOWED)
def test_values_are_those_of_bash(name: str, tmp_path: Path) -> None:
    """Scripts and files that a script writes itself are in a folder of its own."""
    assert _words(_followed(FOLLOWED[name])) == _of_bash(FOLLOWED[name], tmp_path)


@pytest.mark.parametrize("name", ASKED)
def test_a_value_that_is_not_followed_is_unknown(name: str, tmp_path: Path) -> None:
    """A value that the variable had before would be another one than bash has, or might be on another machine."""
    assert _of_bash(ASKED[name], tmp_path)
    assert any(map(unknown_names, _words(_followed(ASKED[name]))))


@pytest.mark.parametrize(
    ("command", "is_noted"),
    [
        ("export $(grep -v '^#' .env | xargs)", True),
        ('eval "$(python settings.py)"', True),
        ('eval "$(conda shell.bash hook)"', False),
        ("export $LIST_OF_NAMES", False),
    ],
)
def test_what_sets_variables_from_outside_is_noted(command: str, is_noted: bool) -> None:
    """A hook that prepares the shell, and a list of names, set nothing that a job has."""
    script = _followed(f"A=32\n{command}\nrun $A")
    assert any("is not read" in note for note in script.notes) is is_noted


def test_an_open_test_that_skips_a_command_is_noted() -> None:
    """A script may have all of its commands behind such tests, as one that keeps a state in a file has."""
    script = _followed('STATE=$(cat state)\n[[ "$STATE" == init ]] && run 1')
    assert not script.commands
    assert any("can't be known" in note for note in script.notes)


@pytest.mark.parametrize(("sign", "value"), [("&&", "32"), ("||", "16")])
def test_a_test_of_what_nobody_gave_is_taken_as_not_so(sign: str, value: str) -> None:
    """It is noted with the way to give it, as that of an `if` is."""
    script = _followed(f'A=32\n[ "$XX" = 1 ] {sign} A=16\nrun $A')
    assert _words(script) == [value]
    assert any("--set XX=VALUE" in note for note in script.notes)
