"""Several sources by weight: exactly, at any place, and whatever the others have."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.config.base import PlanError
from shardwright.config.data import DataSpec, SourceSpec
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.model import ModelSpec
from shardwright.train.data.mixed_samples import MixedSamples, Mixture, picks, whole_weights
from shardwright.train.data.place import PlaceInData
from shardwright.train.data.prepare import prepare_tokens
from shardwright.train.data.prepared_tokens import MixedTokens


class Counted:
    """A source whose samples say which they are."""

    def __init__(self, name: int, length: int) -> None:
        self.sequence, self._name, self._length = 1, name, length

    def __len__(self) -> int:
        return self._length

    def batch(self, first: int, count: int) -> np.ndarray:
        return np.stack([np.full(count, self._name), np.arange(first, first + count)], axis=1)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=7))
def test_a_source_is_never_a_sample_behind_or_ahead(weights: list[int]) -> None:
    whole = whole_weights([float(weight) for weight in weights])
    order, total, k = picks(whole), sum(whole), len(whole)
    had = np.cumsum(order[:, None] == np.arange(k), axis=0)
    due = np.arange(1, total + 1)[:, None] * np.array(whole) / total
    assert np.abs(had - due).max() <= (1 - 1 / (2 * k - 2) if k > 1 else 0) + 1e-9
    assert had[-1].tolist() == whole
    if k == 2:
        assert (np.abs(had - due) <= 0.5).all()


@pytest.mark.parametrize(
    ("weights", "whole"),
    [([0.7, 0.3], [7, 3]), ([2.0], [1]), ([0.1, 0.2, 0.7], [1, 2, 7]), ([1.5, 1.5], [1, 1]),
     ([1e-9, 1.0], [1, 100_000]), ([0.123456789, 0.876543211], [12_346, 87_654])],
)  # fmt: skip
def test_weights_are_taken_as_written(weights: list[float], whole: list[int]) -> None:
    assert whole_weights(weights) == whole


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=5),
    st.integers(0, 10**12),
    st.lists(st.integers(0, 40), min_size=1, max_size=5),
)
def test_any_place_is_where_one_would_come_from_the_beginning(
    weights: list[int], first: int, counts: list[int]
) -> None:
    sources = [Counted(n, 10 + n) for n in range(len(weights))]
    mixed = MixedSamples(sources, [float(weight) for weight in weights])
    whole = mixed.batch(first, sum(counts))
    begin, parts = first, []
    for count in counts:
        parts.append(mixed.batch(begin, count))
        begin += count
    assert np.array_equal(np.concatenate(parts), whole)
    # Each source's own follow each other without a gap, from what the samples before have had.
    for source, had in enumerate(Mixture([float(weight) for weight in weights]).shares(first)):
        numbers = whole[whole[:, 0] == source, 1]
        assert numbers.tolist() == list(range(had, had + len(numbers)))
    assert sum(Mixture([float(weight) for weight in weights]).shares(first)) == first


def test_an_epoch_is_when_all_were_gone_through() -> None:
    assert len(MixedSamples([Counted(0, 10), Counted(1, 30)], [3.0, 1.0])) == 120


def sources(folder: Path, lengths: list[int], weights: list[float]) -> DataSpec:
    """Sources whose texts are one letter each, in different formats."""
    results = []
    for n, (length, weight) in enumerate(zip(lengths, weights, strict=True)):
        text = chr(ord("a") + n) * (length * 16)
        if n % 2:
            (folder / f"{n}.jsonl").write_text(json.dumps({"body": text}) + "\n")
            results.append(SourceSpec(path=str(folder / f"{n}.jsonl"), weight=weight, text_field="body"))
        else:
            (folder / f"{n}.txt").write_text(text)
            results.append(SourceSpec(path=str(folder / f"{n}.txt"), weight=weight))
    return DataSpec(sources=results, validation_share=0.1)


def test_a_source_that_is_short_goes_on_with_another_epoch(tmp_path: Path) -> None:
    data = sources(tmp_path, [40, 10, 100], [0.5, 0.3, 0.2])
    tokens = prepare_tokens(data, ModelSpec(sequence=16), 3, tmp_path / "cache")
    assert isinstance(tokens, MixedTokens)
    samples = tokens.train_samples()
    rows = samples.batch(0, 1000)
    assert Counter(chr(row[0]) for row in rows.tolist()) == {"a": 500, "b": 300, "c": 200}
    lines = PlaceInData.at_beginning(tokens, JobSpec(data=data)).described(1000)
    epochs = [len(source.train_samples()) for source in tokens.sources]
    often = lines.pop(2)
    assert [line.split(" of the samples")[0] for line in lines] == ["50.00 %", "30.00 %", "20.00 %"]
    assert lines[1].endswith(f"300 in this run, of {epochs[1]:,} ({300 / epochs[1]:.2f} epochs)")
    assert often.startswith(f"note: the run goes over these data {300 / epochs[1]:,.0f} times")
    assert epochs[1] < 10
    assert tokens.num_train_tokens == sum(source.num_train_tokens for source in tokens.sources)
    held_out = tokens.validation_samples()
    assert held_out is not None
    # Each held-out sample once, however short the others are: 64, 17 and 160 tokens in windows of 16.
    assert Counter(chr(row[0]) for row in held_out.batch(0, len(held_out)).tolist()) == {"a": 3, "b": 1, "c": 9}
    assert {chr(row[0]) for row in held_out.batch(0, 3).tolist()} == {"a", "b", "c"}
    # Of a mixture that one knows, all that is left is which source it is.
    shares = tokens.token_shares(256)
    assert shares.sum() == pytest.approx(1)
    np.testing.assert_allclose(shares[[ord("a"), ord("b"), ord("c")]], [0.5, 0.3, 0.2], atol=0.2)


def test_faults_name_the_source(tmp_path: Path) -> None:
    data = sources(tmp_path, [40, 10], [1.0, 1.0])
    broken = data.model_copy(update={"sources": [data.sources[0], SourceSpec(path=str(tmp_path / "gone"))]})
    with pytest.raises(PlanError, match=r"data.sources\[1\]: there is no file or folder"):
        prepare_tokens(broken, ModelSpec(sequence=16), 3, tmp_path / "cache")


def test_what_does_not_go_together() -> None:
    def faults(**data: object) -> list[str]:
        with pytest.raises(PlanError) as caught:
            make_job({"data": data})
        return caught.value.faults

    one = {"path": "a"}
    assert faults(sources=[one], path="b") == [
        "data.path is set beside data.sources; set it in those sources that it is meant for"
    ]
    assert "data.sources[0].chats is true, and chats that share" in faults(sources=[one | {"chats": True}])[0]
    assert "data.chats is true, and files of data.format" in faults(
        chats=True, format="text", separate_documents=True
    )[0]  # fmt: skip
    assert "data.chat_template 'x' is what chats are written with" in faults(chat_template="x")[0]
    assert "data.answers_only is false" in faults(answers_only=False)[0]
    assert "weight" in faults(sources=[one | {"weight": 0.0}])[0]
