"""Launch scripts are followed as a shell follows them, without running anything."""

import shutil
import subprocess
from contextlib import suppress
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.interchange.reading.shell_marks import readable
from shardwright.interchange.reading.shell_script import Script
from shardwright.interchange.reading.shell_values import Variables
from shardwright.interchange.reading.shell_words import ShellFault

SCRIPTS = {
    "a variable": 'TP=8\ntorchrun a.py --tp $TP "--pp ${TP}"',
    "an array": "ARGS=(\n  --a 1  # a comment\n  --b 'two words'\n)\nARGS+=(--c)\nrun ${ARGS[@]} \"${ARGS[@]}\"",
    "a default": "N=${UNSET_HERE:-4}\nrun $N ${N:-5} ${N:+6} ${UNSET_HERE:+7}end",
    "arithmetic": "A=8; B=3\nrun $((A*B+1)) $(( (A - B) % 2 )) $((-7 / 2)) $((2 ** 3)) $((A > B))",
    "a choice": "A=8; B=3\nrun $(( (A > 4) ? 1 : 0 )) $((A<B?A:B>2?7:9))",
    "continued lines": "run --a 1 \\\n  --b 2 \\\n  --c",
    "strings that are cut at blanks": 'ARGS=" --a 1   --b 2 "\nrun $ARGS "$ARGS"',
    "if": 'S=big\nif [ "$S" == "small" ]; then N=1; elif [[ $S == "big" && -n "$S" ]]; then N=2; else N=3; fi\nrun $N',
    "a condition that is empty": 'if [ -n "${UNSET_HERE}" ]; then run yes; else run no; fi',
    "case": "M=7B\ncase $M in\n  1B|2B) L=1 ;;\n  7*) L=32 ;;\n  *) L=0 ;;\nesac\nrun $L",
    "a script in a string": "CMD='run --a 1 --b 2'\nbash -c \"$CMD --c\"",
    "eval": "X='run --a'\neval $X --b",
    "and, or": "[ 1 -gt 2 ] && run no\n[ 1 -lt 2 ] && run yes || run never",
    "an exit": "run first\nexit 0\nrun second",
    "a group": "{ run a; run b; }\n(run c)",
    "parts of a word": "A=x\nrun pre$A'mid $A'\"post $A\"",
    "escapes of C": r"run $'a\tb' $'it\'s' pre$'\x41\101'post $'a\\b\"\?' $'\q' $'--tp 8'",
    "a prefix is of one command": "TP=2\nTP=4 run $TP ${TP:-1}\nPP=3 run ${PP:-1}\nrun $TP ${PP:-1}",
    "a prefix is seen inside": "TP=2\nTP=4 bash -c 'run $TP'\nrun $TP",
    "a subshell": "A=1\n(A=2; B=3; run $A $B)\nrun $A ${B:-none}\n{ A=4; }\nrun $A",
    "a text to translate": 'run $"--bf16" pre$"a b"post',
    "a function": 'f() {\n  EXTRA="--a $1"\n}\nf 7B 2\nrun $EXTRA ${1:-none} $#',
    "functions in functions": 'f() { EXTRA+=(--a $#); }\nfunction g { f x; f; }\ng\nrun "${EXTRA[@]}"',
    "what a function has for itself": "A=1\nf() { local A=2 B=3; C=$A; }\nf x\nrun $A ${B:-none} $C",
    "a return": "f() { A=1; return; A=2; }\nf x\nrun $A",
    "arguments in a loop": (
        'parse() {\n  while [[ $# -gt 0 ]]; do\n    case "$1" in\n      --tp) TP=$2; shift 2 ;;\n      -h) exit ;;\n'
        '      *) REST+=("$1"); shift ;;\n    esac\n  done\n}\nTP=1\nparse --tp 4 a b\nrun $TP ${REST[@]}'
    ),
    "set": 'set -- a \'b c\' d e f g h i j k\nrun "$2" ${10} $10 $# "$@"\nshift\nrun $1 $#',
    "a for loop": 'A=; for x in a b c d; do [ $x = c ] && continue; [ $x = d ] && break; A="$A$x"; done\nrun $A $x',
    "a while loop": "N=1\nwhile [ $N -lt 9 ]; do N=$((N * 2)); done\nuntil [ $N -lt 5 ]; do N=$((N / 2)); done\nrun $N",
    "brackets in quotes": "A=x\nB=\"$(echo ')')\"\nC=$(echo \"$(echo '(')\")\nrun $A",
    "parts of a value": (
        "A=2_000_000; B=dir/model-7b.tar.gz\nrun ${A//_} ${A/_/-} ${B%.gz} ${B%%.*} ${B#*/} ${B##*/} ${B:4:5} ${B:4} "
        "${A:0:1} ${#A} ${B^^} ${B^} ${B/model/net}"
    ),
    "an associative array": (
        "declare -A L=([7B]=32 ['13B']=40)\nL[70B]=80\nM=70B\nrun ${L[7B]} ${L[$M]} ${L[\"13B\"]} ${#L[@]}"
    ),
    "an element that is set": "A=(a b)\nA[1]=c\nA[2]=d\nrun ${A[@]} ${#A[@]} ${!A[@]}",
    "a name of a name": "TP_7B=4\nV=TP_7B\nrun ${!V}",
    "read": "read -r -d '' X <<'EOF'\n--a 1\n--b 2\nEOF\nrun $X",
    "an element": 'A=(a b c)\nrun ${A[1]} ${A[@]} "${A[*]}"',
}


def followed(text: str, **variables: str) -> Script:
    script = Script(Variables(dict(variables), frozenset(variables)))
    script.follow(text)
    return script


@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_of_bash(name: str) -> None:
    """Commands `run` and `torchrun` print their words, one a line."""
    shown = (
        "run() { printf '%s\\n' run \"$@\"; }\ntorchrun() { printf '%s\\n' torchrun \"$@\"; }\nexport -f run torchrun\n"
    )
    bash = shutil.which("bash")
    assert bash
    done = subprocess.run([bash, "-c", shown + SCRIPTS[name]], capture_output=True, text=True, check=True, timeout=60)
    words = [word for command in followed(SCRIPTS[name]).commands for word in command.words]
    assert words == done.stdout.splitlines()


@pytest.mark.parametrize("line", ["(run)", "run", "A=1 run"])
def test_copies_of_many_variables_have_a_bound(line: str) -> None:
    variables = "".join(f"V{number}=1\n" for number in range(9000))
    assert len(followed(variables + f"{line}\n" * 10).commands) == 10
    with pytest.raises(ShellFault, match="more than 20,000 commands"):
        followed(variables + f"{line}\n" * 900)


def test_files_that_a_script_writes_are_known() -> None:
    script = followed("N=4\ncat <<EOT > ds.$N.json\n{\"stage\": $N}\nEOT\ncat <<'END' > raw\n$N\nEND\nrun")
    assert script.written == {"ds.4.json": '{"stage": 4}', "raw": "$N"}


def test_options_of_slurm_are_kept() -> None:
    script = followed("#SBATCH --nodes=24\n#SBATCH --gres=gpu:a100:8\nrun --nnodes $SLURM_NNODES")
    assert script.batch == {"nodes": "24", "gpus-per-node": "8"}
    assert script.commands[0].words == ["run", "--nnodes", "24"]


def test_what_is_not_known_keeps_its_name() -> None:
    script = followed("run --a $MODEL --b $(date +%s) --c ${1}")
    assert readable(" ".join(script.commands[0].words)) == "run --a $MODEL --b $_date_s_ --c $1"


def test_what_is_given_stays() -> None:
    assert followed("TP=8\nrun $TP", TP="4").commands[0].words == ["run", "4"]


def test_other_scripts_are_followed_where_they_are_given() -> None:
    script = Script(Variables(), {"common.sh": "TP=2", "job.sh": "run $TP"})
    script.follow("source $HOME/common.sh\nsbatch --nodes=2 job.sh\n. /nowhere/else.sh")
    assert [command.words for command in script.commands] == [["run", "2"]]
    assert script.notes == ["line 3: . /nowhere/else.sh is not read: name that file too"]


def test_a_loop_of_unknown_length_is_said() -> None:
    script = followed("for i in $(ls runs); do run $i; done\nf() { run 3; }\nwhile ps | grep x; do A=1; done\nrun 4")
    words = [readable(" ".join(command.words)) for command in script.commands if command.words[0] == "run"]
    assert words == ["run $i", "run 4"]  # the body of a for loop is followed once
    assert script.notes == ["line 1: a for loop is not followed", "line 3: a while loop is not followed"]


@pytest.mark.parametrize(
    "loop", ["while true; do run; done", "until false; do run; done", "while :; do break; done\nrun"]
)
def test_a_loop_without_end_is_followed_once_or_refused(loop: str) -> None:
    with suppress(ShellFault):
        assert followed(loop).commands[-1].words == ["run"]


@pytest.mark.parametrize(
    "guard",
    [
        'if [ -z "$ROOT" ]; then\n  echo set it\n  sbatch "$0"\n  exit 1\nfi',
        '[[ -z "$ROOT" ]] && exit 1',
        '[ -n "$ROOT" ] || { echo set it; exit 1; }',
        'usage() { echo set it; exit 1; }\n[ -z "$ROOT" ] && usage',
    ],
)
def test_a_guard_for_what_nobody_gave_is_passed_with_its_line(guard: str) -> None:
    script = followed(f"A=1\n{guard}\nrun $A")
    assert script.commands[-1].words == ["run", "1"]
    (note,) = script.notes
    assert "ROOT" in note and "--set ROOT=VALUE" in note and note.startswith(("line 2:", "line 3:"))
    script = followed("if [ $# -lt 2 ]; then echo usage; exit 1; fi\nrun $1")
    assert readable(" ".join(script.commands[-1].words)) == "run $1" and "-- ARGUMENTS" in script.notes[0]
    assert followed("A=0\nif [ $A -lt 2 ]; then exit 1; fi\nrun").commands == []


def test_arguments_that_nobody_gives_keep_their_places() -> None:
    script = followed('TP=${10}\nA=$1; shift 2; B=$1\nf() { C=$1; }\nf "$@"\nrun $TP $A $B $C', **{"10": "2"})
    assert readable(" ".join(script.commands[-1].words)) == "run 2 $1 $3 $3"


def test_a_script_with_lines_of_a_batch_system_runs_as_its_job() -> None:
    text = '#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\nif [ -z "$SLURM_JOB_ID" ]; then sbatch $0; exit; fi\n'
    assert followed(text + "run $SLURM_NTASKS").commands[-1].words == ["run", "16"]
    script = followed("#PBS -l select=4:ncpus=64:ngpus=8:mpiprocs=8\nrun")
    assert script.batch == {"nodes": "4", "gpus-per-node": "8", "ntasks-per-node": "8"}


@pytest.mark.parametrize(
    "text",
    [
        "A=x\n" + "A=$A$A\n" * 60,
        "X='eval $X'\neval $X",
        "echo 'never ends",
        "N=$((1/0))",
        "if [ 1 ]; then run",
        "A=(1 2",
        "N=$((9**9**9))",
        "{ " * 500,
    ],
)
def test_what_has_no_end_is_one_fault(text: str) -> None:
    with pytest.raises(ShellFault) as caught:
        followed(text)
    assert len(str(caught.value)) < 200


GROWING = {
    "numbers": "for i in {1..140}; do for j in {1..140}; do A=$(seq 2000 | sort -n | tail -1); done; done",
    "a function within itself": "f() { echo $(f)$(f); }\nrun $(f)",
    "a function with more and more": "f() { $(f $1$1); f $1; }\nf x",
    "much text": "A=xxxxxxxx\n" + "A=$A$A\n" * 16 + "f() { for i in {1..200}; do echo $A; done; }\nB=$(f)",
    "lists in lists": "run " + "{a,b}" * 30,
    "pipes": "echo x | cat | tr x y | cat\n" * 2000,
    "pipes in pipes": "{ " * 55 + "echo a | cat; " + "} | cat; " * 55,
    "outputs in outputs": "run " + "$(echo " * 200 + ")" * 200,
}


@pytest.mark.parametrize("name", GROWING)
def test_what_prints_much_is_followed_in_little_time(name: str) -> None:
    begin = process_time()
    with suppress(ShellFault):
        followed(GROWING[name])
    assert process_time() - begin < 10


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="ab =$(){}[]\"'`\\\n;&|<>#~-0128*/,!?:@", max_size=80))
def test_any_text_is_followed_or_refused(text: str) -> None:
    with suppress(ShellFault):
        followed(text)


@pytest.mark.parametrize("redirection", ["2>&1", "2>err", "1>out 2>&1", "2>>err", "2> err", ">&2", "<in 2>&1"])
def test_the_number_of_a_file_before_a_redirection_is_no_word(redirection: str) -> None:
    assert [one.words for one in followed(f"run --bf16 {redirection} | tee log").commands] == [
        ["run", "--bf16"],
        ["tee", "log"],
    ]
    assert followed(f"run --lr 2 {redirection}").commands[0].words == ["run", "--lr", "2"]


def test_words_that_nobody_gives_are_none() -> None:
    script = (
        'run "$@" $* $@ --a "${@}" --n $#\nfor one in "$@"; do N=$one; done\nwhile [ $# -gt 0 ]; do N=$1; done\nrun $N'
    )
    assert [one.words for one in followed(script, N="").commands] == [["run", "--a", "--n", "0"], ["run"]]
    assert followed(script, N="").notes == []
    assert followed('run "$@"', **{"@": "--a"}).commands[0].words == ["run", "--a"]


UNFOLLOWED = {
    "a command": "EXTRA=$(get_args)", "backticks": "EXTRA=`get_args`", "a part": 'EXTRA="--a $(get_args)"',
    "a loop": 'for x in 1 2; do EXTRA="$EXTRA --a $x"; done', "what a command reads": "cat f | read -r EXTRA",
    "a function that reads": "f() {\n  read EXTRA\n}\nf",
    "a branch": 'if [ "$(hostname)" = a ]; then EXTRA=--a; else EXTRA=--b; fi',
    "a branch on a command": "EXTRA=--b\nif nvidia-smi | grep -q H100; then EXTRA+=' --a'; fi",
    "a case": "H=$(hostname)\ncase $H in a*) EXTRA=--a ;; *) EXTRA=--b ;; esac", "(( ))": "EXTRA=1\n((EXTRA[0]++))",
}  # fmt: skip


@pytest.mark.parametrize("name", UNFOLLOWED)
def test_what_is_not_followed_is_not_known_until_it_is_given(name: str) -> None:
    assert "$EXTRA" in readable(" ".join(followed(UNFOLLOWED[name] + "\nrun $EXTRA").commands[-1].words))
    given = followed(UNFOLLOWED[name] + '\nrun $EXTRA "${EXTRA[@]}"', EXTRA="--x 1").commands[-1].words
    assert given == ["run", "--x", "1", "--x", "1"]


def test_a_part_that_is_known_to_do_nothing_changes_nothing() -> None:
    text = "N=4\nwhile false; do N=8; done\nfor x in; do N=1; done\nf() { N=9; }\nif (( N > 8 )); then N=7; fi\nrun $N"
    assert followed(text).commands[-1].words == ["run", "4"]
