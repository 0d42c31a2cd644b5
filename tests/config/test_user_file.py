"""Files that a user names: only regular ones of a sane size are read, nothing waits, and a fault says what it is."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardwright.cli.main import cli
from shardwright.config.base import PlanError
from shardwright.config.data import DataSpec
from shardwright.config.toml_file import read_toml, value_faults
from shardwright.config.user_file import FileFault, hole_bytes, is_of_the_kernel, open_file, read_file, write_text
from shardwright.train.data import file_search as data_folder
from shardwright.train.data.source_files import find_files
from support.ranks import PATIENCE_S

COMMAND = [sys.executable, "-m", "shardwright"]


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A folder of files that are none."""
    os.mkfifo(tmp_path / "fifo.toml")
    (tmp_path / "zero.toml").symlink_to("/dev/zero")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "proc.toml").symlink_to("/proc/self/status")
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket.toml"))
    with (tmp_path / "sparse.toml").open("wb") as file:
        file.truncate(1 << 40)
    return tmp_path


def refusal(*arguments: str) -> str:
    error = CliRunner().invoke(cli, list(arguments)).exception
    assert isinstance(error, PlanError)
    return str(error)


KINDS = [
    ("fifo", "is a FIFO, not a regular file"), ("zero", "is a character device, not a regular file"),
    ("folder", "is a folder; name the"), ("proc", "is what the kernel shows of itself"), ("loop", "can't be read"),
    ("socket", "is a socket, not a regular file"), ("sparse", "has 1,099,511,627,776 bytes, and at most 1,048,576"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fault"), KINDS)
@pytest.mark.parametrize("place", ["", "model.name", "cluster.name", "cluster.device", "cluster.software"])
def test_files_that_are_none(odd: Path, place: str, name: str, fault: str) -> None:
    path = str(odd / f"{name}.toml")
    arguments = ["estimate", path] if not place else ["estimate", "quickstart", "--set", f"{place}={path}"]
    assert fault in refusal(*arguments)


@pytest.mark.parametrize(("name", "fault"), [kind for kind in KINDS if kind[0] not in ("sparse", "folder")])
def test_tables_that_are_none(odd: Path, name: str, fault: str) -> None:
    if name == "loop":
        return  # click's own message
    assert fault in refusal("validate", str(odd / f"{name}.toml"))


@pytest.mark.parametrize("name", ["fifo.toml", "zero.toml", "socket.toml"])
def test_tokenizers_and_data_that_are_none(odd: Path, name: str) -> None:
    from shardwright.train.data.tokenizer import load_tokenizer

    with pytest.raises(PlanError, match="not a regular file"):
        load_tokenizer(DataSpec(tokenizer=str(odd / name)))
    faults: list[str] = []
    assert find_files(DataSpec(path=str(odd / name)), faults) == []
    assert len(faults) == 1 and "is not a regular file but" in faults[0]


def test_what_grows_is_cut(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_file(tmp_path / "a", 5) == b"12345"
    with pytest.raises(FileFault, match="has 5 bytes, and at most 4 are read"):
        read_file(tmp_path / "a", 4)
    with pytest.raises(FileFault, match="is no name of a file"), open_file(Path("a\0b")):
        pass


def test_what_the_kernel_shows() -> None:
    assert all(map(is_of_the_kernel, ("/proc", "/proc/self/maps", "/dev/zero", "/sys")))
    assert not any(map(is_of_the_kernel, ("/dev/shm/x", "/process", "/tmp", ".")))


def test_holes_are_counted(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        file.write(b"x" * 4096)
        file.truncate(1 << 30)
    with open_file(tmp_path / "a") as file:
        result = hole_bytes(file)
        assert file.read(1) == b"x"
    assert result in (0, (1 << 30) - 4096) or result > (1 << 30) - (1 << 20)  # 0: a file system that does not know


def test_a_fifo_that_nobody_reads_is_not_waited_for(odd: Path) -> None:
    with pytest.raises(OSError, match="No such device or address"):
        write_text(odd / "fifo.toml", "x")
    assert "it is a FIFO that nobody reads" in refusal("schedule", "1f1b", "--svg", str(odd / "fifo.toml"))
    assert "can't be written: No such file or directory" in refusal("schedule", "1f1b", "--svg", str(odd / "no" / "x"))


# --- values of TOML ---


def test_values_are_bounded() -> None:
    assert value_faults({"a": {"b": [1, 2.5, "x"]}}) == []
    (fault,) = value_faults({"a": {"b": 2**63}})
    assert fault.startswith("a.b is a number of 64 bits")
    deep: object = 1
    for _ in range(2000):
        deep = [deep]
    (fault,) = value_faults({"a": deep})
    assert "levels deep" in fault
    (fault,) = value_faults({"a": [0] * 300_000})
    assert "more than 200,000 values" in fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("layers = 0x" + "f" * 6000, "layers is a number of 24000 bits, and TOML's have 64"),
        ("a = " + "[" * 300 + "]" * 300, "levels deep"),
        ("a = " + "9" * 6000, "has a number of thousands of digits"),
        ("[" * 50_000, "is not valid TOML"),
        ("a = " + "{a=" * 5000, "is not valid TOML"),
    ],
)
def test_toml_that_python_can_not_hold(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(FileFault) as error:
        read_toml(path)
    assert fault in str(error.value)
    assert len(str(error.value)) < 600
    assert fault in refusal("estimate", str(path))


def test_overrides_that_are_too_deep_or_too_long() -> None:
    assert "names 3001 sections within each other" in refusal("estimate", "quickstart", "--set", "a." * 3000 + "b=1")
    result = refusal("estimate", "quickstart", "--set", "model.layers=0x" + "f" * 6000)
    assert "model.layers is a number of 24000 bits" in result
    assert len(refusal("estimate", "quickstart", "--set", "x" * 60_000 + "=1")) < 3000


def test_a_message_shows_the_first_faults_and_counts_the_rest() -> None:
    text = str(PlanError("x" * 9000, [f"fault {n}" for n in range(100)]))
    assert "100 faults" in text and "20. fault 19" in text and "... and 80 more" in text
    assert len(text) < 2000


# --- folders ---


def test_a_glob_finds_what_glob_does(tmp_path: Path) -> None:
    import glob

    for name in ("a.txt", "b/c.txt", "b/d/e.txt", "b/d/f.md", ".h/i.txt", "b/.j.txt", "k/l/m/n.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    for pattern in ("*", "*.txt", "**", "**/*.txt", "b/*", "b/**", "*/d/*", "**/d/**", "b/[d-e]/*", "?/*.txt", "*/.j*",
                    ".*/*", "**/**/*.txt", "k/**/n.txt", "*/*/*/*.txt", "nope/*"):  # fmt: skip
        faults: list[str] = []
        results = find_files(DataSpec(path=str(tmp_path / pattern)), faults)
        matches = set(glob.glob(str(tmp_path / pattern), recursive=True))  # which has some twice
        wanted = sorted(filter(os.path.isfile, matches))
        assert [str(file.path) for file in results] == wanted, pattern
        assert bool(faults) == (not wanted)


def test_a_search_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(30):
        (tmp_path / f"{n}.txt").write_text("x")
    (tmp_path / "up").symlink_to(".")
    (tmp_path / "kernel").symlink_to("/proc")
    faults: list[str] = []
    data = DataSpec(path=str(tmp_path))
    assert len(find_files(data, faults)) == 30
    assert len(faults) == 1 and "kernel is what the kernel shows of itself" in faults[0]
    (tmp_path / "kernel").unlink()
    monkeypatch.setattr(data_folder, "MOST_FILES", 20)
    assert find_files(data, faults := []) == []
    assert "has more than 20 files; join them into fewer" in faults[0]
    monkeypatch.setattr(data_folder, "MOST_NAMES", 10)
    find_files(data, faults := [])
    assert "was ended in" in faults[0] and "after 10 names" in faults[0]


def test_data_of_the_kernel_is_not_walked() -> None:
    for path in ("/proc", "/sys/**/*.txt", "/proc/*/fd/*"):
        faults: list[str] = []
        assert find_files(DataSpec(path=path), faults) == []
        assert len(faults) == 1 and "is what the kernel shows of itself" in faults[0]


# --- output ---


@pytest.mark.parametrize("arguments", [["estimate", "quickstart"], ["schedule", "1f1b", "--json"], ["--help"]])
def test_output_that_can_not_be_written_is_one_sentence(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False
        )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "failed: standard output can't be written: No space left on device; make room there, or name another place"
    ]


def test_a_reader_that_leaves_early_is_no_fault() -> None:
    command = " ".join([*COMMAND, "schedule 1f1b --stages 16 --microbatches 64 --json"]) + " | head -c 10"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_refusal_keeps_its_status_where_nobody_can_read_it() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, "estimate", "nope"], stderr=full, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
