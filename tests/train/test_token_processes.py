"""Tokens made by several processes, and in a folder that several runs share."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from shardwright.config.base import PlanError
from shardwright.config.data import DataSpec
from shardwright.config.model import ModelSpec
from shardwright.config.phrase import in_language
from shardwright.config.units import seconds_text
from shardwright.train.data import cache_lock, encoding_pool, progress
from shardwright.train.data.cache_lock import alone
from shardwright.train.data.prepare import prepare_tokens

WORDS = ["alpha", "beta", "gamma", "delta", "größer", "✓", "a\nb", "four five"]


def write_texts(folder: Path, count: int = 400) -> Path:
    """Documents of all lengths in several files: some empty, one longer than many batches."""
    rng = random.Random(3)
    texts = [" ".join(rng.choices(WORDS, k=rng.choice([0, 1, 5, 60]))) for _ in range(count)]
    texts[7] = " ".join(rng.choices(WORDS, k=8000))
    docs = folder / "docs"
    docs.mkdir()
    for n in range(0, count, 100):
        lines = "\n".join(json.dumps({"text": text}) for text in texts[n : n + 100])
        (docs / f"{n:04d}.jsonl").write_text(lines)
    (docs / "plain.txt").write_text("\n".join(texts))
    return docs


def tokenizer_file(folder: Path) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(WORDS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def cache_of(docs: Path, folder: Path, **fields: Any) -> dict[str, bytes]:
    """The files of a cache after the data were prepared in it."""
    prepare_tokens(DataSpec(path=str(docs), **fields), ModelSpec(sequence=16, vocab=300), 1, folder)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.processes
def test_processes_write_what_one_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, and however the text is cut into batches."""
    docs, tokenizer = write_texts(tmp_path), str(tokenizer_file(tmp_path))
    one = cache_of(docs, tmp_path / "one", tokenizer=tokenizer, workers=1)
    assert len(one) == 5
    monkeypatch.setattr(encoding_pool, "_BYTES_PER_PROCESS", 1)
    for characters in (500, 1 << 20):
        monkeypatch.setattr(encoding_pool.EncodingPool, "batch_characters", characters)
        assert cache_of(docs, tmp_path / f"three{characters}", tokenizer=tokenizer, workers=3) == one


@pytest.mark.processes
def test_faults_are_the_same_from_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    letters = Tokenizer(models.BPE({letter: n for n, letter in enumerate("abcdefgh")}, []))
    letters.save(str(tmp_path / "letters.json"))
    docs, printed = write_texts(tmp_path), []
    for workers in (1, 2):
        monkeypatch.setattr(encoding_pool, "_BYTES_PER_PROCESS", 1 if workers > 1 else 1 << 30)
        with pytest.raises(PlanError) as caught:
            cache_of(docs, tmp_path / str(workers), tokenizer=str(tmp_path / "letters.json"), workers=workers)
        printed.append(caught.value.faults)
        assert list((tmp_path / str(workers)).iterdir()) == []
    assert printed[0] == printed[1]
    assert "has no token for" in printed[0][0] and "没有与文本中" in in_language(printed[1][0], "zh")


@pytest.mark.processes
def test_runs_share_a_cache(tmp_path: Path) -> None:
    """Both begin at once: one makes the tokens, the other waits and says for whom; a third finds them."""
    docs, cache = write_texts(tmp_path), tmp_path / "cache"
    code = (
        "import sys, time; from pathlib import Path; from shardwright.train.data import token_cache as made\n"
        "from shardwright.train.data.prepare import prepare_tokens\n"
        "from shardwright.config.data import DataSpec; from shardwright.config.model import ModelSpec\n"
        "make = made._make\n"
        "def slow(*given):\n    print('makes', flush=True); time.sleep(1.5); return make(*given)\n"
        "made._make = slow\n"
        "data = DataSpec(path=sys.argv[1], cache=sys.argv[2])\n"
        "prepare_tokens(data, ModelSpec(sequence=16), 1, Path('unused'), tell=print)"
    )
    command = [sys.executable, "-c", code, str(docs), str(cache)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = sorted(process.communicate(timeout=60)[0] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert printed[0] == "makes\n"
    assert printed[1].startswith("waiting for process ")
    assert "(beginning), which makes the same tokens" in printed[1]
    assert len(list(cache.iterdir())) == 5
    third = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (third.returncode, third.stdout) == (0, "")
    assert not Path("unused").exists()


def test_a_lock_of_a_dead_process_is_nobodys(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from shardwright.train.data.cache_lock import alone\n"
        "with alone(Path(sys.argv[1]), lambda: False, print):\n    print('held', flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(tmp_path / ".lock")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.send_signal(signal.SIGKILL)
    begun_s, printed = time.monotonic(), []
    with alone(tmp_path / ".lock", lambda: False, printed.append) as tell:
        assert tell is not None
        tell("half way")
        assert f"process {os.getpid()} on " in (tmp_path / ".lock").read_text()
        assert "(half way)" in (tmp_path / ".lock").read_text()
    assert time.monotonic() - begun_s < 5
    assert printed == []
    assert not (tmp_path / ".lock").exists()


def test_a_silent_holder_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_lock, "_SILENT_S", 0.2)
    printed: list[str] = []
    with alone(tmp_path / ".lock", lambda: False, printed.append), alone(
        tmp_path / ".lock", lambda: False, printed.append
    ) as tell:  # fmt: skip
        assert tell is not None
        tell("a word that is nobody's to write down")
    assert [line.split(" process")[0] for line in printed] == ["waiting for", printed[1].split(" process")[0]]
    assert printed[1].endswith("has said nothing for 0 s: made here, too")


def test_how_far_it_is_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "_FIRST_S", 0.0)
    printed: list[str] = []
    docs = write_texts(tmp_path)
    from shardwright.train.data.source_files import find_files

    files = find_files(DataSpec(path=str(docs)), [])
    result = progress.Progress(files, "docs", printed.append, lambda _: None)
    total = sum(file.size_bytes for file in files)
    result.place.begin(files[0])
    result.place.share = 1.0
    now[0] += 20
    result.step(1_000_000)
    words = seconds_text(20 * (total - files[0].size_bytes) / files[0].size_bytes)
    percent = f"{100 * files[0].size_bytes / total:.1f} %"
    assert printed == [
        f"tokens of docs: {percent} of {total / 2**20:.1f} MiB, 1,000,000 tokens, 50,000 a second, about {words} left"
    ]


def test_who_waits_says_for_whom_once_that_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between taking the lock and writing who it is, the other one has said nothing yet."""
    words, lines = iter(["", "", "process 7 on a (beginning)"]), list[str]()
    monkeypatch.setattr(cache_lock, "_acquire", lambda path: (_ for _ in ()).throw(BlockingIOError))
    monkeypatch.setattr(cache_lock, "_read", lambda path: next(words, "process 7 on a (beginning)"))
    with cache_lock.alone(tmp_path / "lock", lambda: bool(lines), lines.append) as tell:
        assert tell is None
    assert lines == ["waiting for process 7 on a (beginning), which makes the same tokens"]
