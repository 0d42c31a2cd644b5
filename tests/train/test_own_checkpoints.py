"""Checkpoints of a module of one's own where the ranks do not see the same folder."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.parallel.zero.master_weights import Masters
from shardwright.train.checkpoint import storage as places
from shardwright.train.checkpoint.boxes import HeldBox
from shardwright.train.checkpoint.saved_state import ComingBoxes
from support.ranks import in_group, run_ranks

ADAMW = {"name": "adamw", "learning_rate": 1e-2}


def linear(bias: float = 0.0) -> sw.ShardedModule:
    net = nn.Linear(3, 2)
    nn.init.constant_(net.bias, bias)
    return sw.shard(net, {"zero": 1}, optimizer=ADAMW)


def stepped(model: sw.ShardedModule, times: int) -> sw.ShardedModule:
    for _ in range(times):
        model.backward(model(torch.ones(2, 3)).sum())
        model.step()
    return model


def outcome(rank: int, world: int, folders: list[str], broken: bool) -> Any:
    """The step that this rank took up, and its weights; or what it was told."""
    model = linear()
    if broken and rank == 1:
        places.LocalStorage.read = _failing  # type: ignore[method-assign]
    try:
        done = model.load(folders[rank])
    except (sw.PlanError, sw.RunError) as error:
        return type(error).__name__, str(error)
    return done, model.state_dict()["weight"].tolist()


def _failing(*_: Any) -> None:
    raise OSError(5, "the disk fails")


def on_two_ranks(first: Path, second: Path, broken: bool = False) -> list[Any]:
    return run_ranks(2, in_group, 2, outcome, [str(first), str(second)], broken)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with steps 1 and 2, with step 1 alone, and with another step 2."""
    root = tmp_path_factory.mktemp("kept")
    model = stepped(linear(), 1)
    model.save(root / "both")
    shutil.copytree(root / "both", root / "old")
    stepped(model, 1).save(root / "both")
    stepped(linear(bias=1.0), 2).save(root / "other")
    return root


def test_all_ranks_take_up_the_step_that_rank_0_has(kept: Path) -> None:
    first, second = on_two_ranks(kept / "old", kept / "both")
    assert first == second and first[0] == 1


def test_all_ranks_say_which_rank_lacks_a_checkpoint(kept: Path) -> None:
    first, second = on_two_ranks(kept / "both", kept / "old")
    assert first == second and first[0] == "RunError"
    assert "rank 1: there is no" in first[1] and "the one folder" in first[1]
    first, second = on_two_ranks(kept / "both", kept / "nothing")
    assert first == second and "rank 1: there is no" in first[1]
    first, second = on_two_ranks(kept / "nothing", kept / "both")
    assert first == second and first[0] == "PlanError"
    assert f"{kept / 'nothing'} has no checkpoint" in first[1]


def test_a_checkpoint_of_the_same_step_is_not_another_one(kept: Path) -> None:
    first, second = on_two_ranks(kept / "both", kept / "other")
    assert first == second and first[0] == "RunError"
    assert "is another checkpoint than that of rank 0" in first[1]


def test_what_one_rank_cannot_read_or_reach_is_said_by_all(kept: Path) -> None:
    first, second = on_two_ranks(kept / "both", kept / "both", broken=True)
    assert first == second and first[0] == "RunError" and "rank 1: " in first[1] and "the disk fails" in first[1]
    first, second = run_ranks(2, in_group, 2, outcome, [str(kept / "both"), "nowhere://x"], False)
    assert first == second and "rank 1: nowhere:// is no place for checkpoints" in first[1]


def test_weights_that_are_no_numbers_are_not_saved(tmp_path: Path) -> None:
    """`load` takes the newest: what was saved before them stays that."""
    model = stepped(linear(), 1)
    model.save(tmp_path)
    whole = model.state_dict()
    stepped(model, 1)
    model.load_state_dict(whole | {"weight": torch.full((2, 3), torch.nan)})
    with pytest.raises(sw.RunError, match="the checkpoint of step 2 is not written: its weights are not finite"):
        model.save(tmp_path)
    model.load(tmp_path)
    assert torch.equal(model.state_dict()["weight"], whole["weight"])


def test_a_save_waits_for_copies_that_come_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As copies from a device do: nothing is there before the stream has come so far."""
    late: list[tuple[Tensor, Tensor]] = []
    copied, waited = Masters.copy_out, ComingBoxes.wait

    def copy_later(self: Masters, name: str, start: int, stop: int) -> Tensor:
        values = copied(self, name, start, stop)
        late.append((torch.full_like(values, torch.nan), values))
        return late[-1][0]

    def wait(self: ComingBoxes) -> list[HeldBox]:
        for out, values in late:
            out.copy_(values)
        return waited(self)

    saved, taken = stepped(linear(), 1), linear(bias=3.0)
    with monkeypatch.context() as patched:
        patched.setattr(Masters, "copy_out", copy_later)
        patched.setattr(ComingBoxes, "wait", wait)
        saved.save(tmp_path)
    assert len(late) > 0 and taken.load(tmp_path) == 1
    wanted = saved.state_dict()
    assert all(torch.equal(values, wanted[name]) for name, values in taken.state_dict().items())
