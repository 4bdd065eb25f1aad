"""Run folders: what is saved is restored."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.storage.run_folders import SavedMember, X, built, opened, restored, restored_from, results, warnings_of
from torch import Tensor

from shoal.engine.members.member import Member
from shoal.errors import DamagedError, OutError
from shoal.storage import _store, atomic
from shoal.storage.run_folder import RunFolder


def test_a_member_is_restored_where_it_was_saved(tmp_path: Path) -> None:
    member = SavedMember()
    for _ in range(5):
        with opened(tmp_path) as folder:
            assert folder.restore(member) == (member.step > 0)
            assert folder.save(member.train(3))
    back = restored(tmp_path)
    assert back.step == 15 and torch.equal(back.weight, member.weight) and back.history == member.history
    held = sorted((tmp_path / "members" / "0000").iterdir())
    assert [path.name for path in held] == ["000004.ckpt", "000005.ckpt"]
    assert [_store.load(path)["step"] for path in held] == [12, 15]
    lines = (tmp_path / "history" / "0000.jsonl").read_text().splitlines()
    assert len(lines) == 15 and json.loads(lines[4]) == {"epoch": 5, "loss": 0.2, "lr": "inf"}
    assert not list(tmp_path.rglob(".*")), "a temporary file was left"


def test_history_comes_back_exactly_however_it_grew(tmp_path: Path) -> None:
    member = SavedMember()
    with opened(tmp_path) as folder:
        assert folder.save(member), "without a row"
        member.history.append({"epoch": 1, "loss": math.nan, "big": 10**20, "low": -math.inf, "tiny": 5e-324})
        member.step = 1
        assert folder.save(member)
        member.history.append({"epoch": 2})
        member.history[0]["loss"] = 3.0
        assert folder.save(member)
        assert restored_from(folder).history == member.history
        member.history = [{"epoch": 1, "low": 2.0}]
        assert folder.save(member)
        assert restored_from(folder).history == member.history
        member.history = [{"epoch": 1, "words": [1, "nan", None]}]  # type: ignore[dict-item]
        assert folder.save(member)
        assert restored_from(folder).history == member.history
        member.history = [{"epoch": 1, "loss": math.nan}]
        assert folder.save(member)
        row = restored_from(folder).history[0]
        assert math.isnan(row["loss"]) and type(row["epoch"]) is int


def test_what_is_saved_is_of_that_moment(tmp_path: Path) -> None:
    member = SavedMember().train()
    with opened(tmp_path) as folder:
        folder.save_many([member])
        member.weight.fill_(99)
    assert torch.equal(restored(tmp_path).weight, torch.ones(100))


def test_many_at_once(tmp_path: Path) -> None:
    members = [SavedMember(i).train(i + 1) for i in range(40)]
    with opened(tmp_path, 40) as folder:
        folder.save_many(members)
        assert folder.flush() and not folder.busy
        folder.save_many([member.train() for member in members[:3]] + members[:1])
    assert [restored(tmp_path, i, 40).step for i in (0, 2, 3, 39)] == [2, 4, 4, 40]


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "cut":
        data = data[: len(data) // 2]
    elif how == "zeroed":
        data = bytearray(len(data))
    elif how == "flipped":
        data[-5] ^= 4
    elif how == "empty":
        data = bytearray()
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["cut", "zeroed", "flipped", "empty"])
def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used(tmp_path: Path, how: str) -> None:
    member = SavedMember()
    with opened(tmp_path) as folder:
        for _ in range(3):
            folder.save(member.train())
    newest = tmp_path / "members" / "0000" / "000003.ckpt"
    damage(newest, how)
    back = SavedMember()
    with opened(tmp_path) as folder:
        (line,) = warnings_of(lambda: folder.restore(back))
        assert str(newest) in line and "job 'm0'" in line and "resuming from 000002.ckpt" in line
        assert back.step == 2 and len(back.history) == 2
        folder.save(back.train())
    assert restored(tmp_path).step == 3, "the damaged one is removed first"
    assert [path.name for path in sorted(newest.parent.iterdir())] == ["000002.ckpt", "000004.ckpt"]
    for path in newest.parent.iterdir():
        damage(path, how)
    with opened(tmp_path) as folder:
        (line,) = warnings_of(lambda: folder.restore(back))
    assert "starts again from its beginning" in line


def test_a_checkpoint_of_another_job_is_not_used(tmp_path: Path) -> None:
    with opened(tmp_path, 2) as folder:
        folder.save_many([SavedMember(0).train(), SavedMember(1).train(5)])
    first, second = (tmp_path / "members" / index / "000001.ckpt" for index in ("0000", "0001"))
    first.write_bytes(second.read_bytes())
    back = SavedMember()
    with opened(tmp_path, 2) as folder:
        (line,) = warnings_of(lambda: folder.restore(back))
    assert "is of another job" in line and back.step == 0


def test_a_state_that_does_not_fit_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as folder:
        folder.save(SavedMember().train())
        member = SavedMember()
        monkeypatch.setattr(member, "load_state", lambda state: state["weights"])
        with pytest.raises(OutError, match=r"does not fit job 'm0' \(KeyError: 'weights'\)"):
            folder.restore(member)


def test_a_member_that_cannot_be_stored_is_told_once(tmp_path: Path) -> None:
    members = [SavedMember(i).train() for i in range(3)]
    with opened(tmp_path, 3) as folder:
        folder.save_many(members)
        for member in members[:2]:
            member.odd = lambda: 1
        (line,) = warnings_of(lambda: folder.save_many([member.train() for member in members]))
        assert "'m0' and 1 more is not checkpointed: odd is a function" in line
        assert not warnings_of(lambda: folder.save_many([member.train() for member in members]))
        assert not folder.save(members[0])
        assert folder.save(members[2])
    assert [restored(tmp_path, i, 3).step for i in range(3)] == [1, 1, 3]


def test_claim_tells_new_from_known_and_other_jobs_apart(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with RunFolder(out) as folder:
        assert folder.claim(built()) is False
    with RunFolder(out) as folder:
        assert folder.claim(built()) is True
    with RunFolder(out) as folder, pytest.raises(OutError, match=r"job 'm0' has epochs 2 there and 9 here"):
        folder.claim(built(epochs=9))
    with RunFolder(out) as folder:
        assert folder.claim(built()) is True, "a refused claim holds no lock"


def test_a_folder_killed_before_it_was_claimed_is_new(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("")
    (tmp_path / ".jobs.json.tmp").write_text('{"sha')
    with RunFolder(tmp_path) as folder:
        assert folder.claim(built()) is False
    assert not (tmp_path / ".jobs.json.tmp").exists()


def test_an_address_in_a_setting_is_not_another_job(tmp_path: Path) -> None:
    class Thing:
        pass

    for known in (False, True):
        with RunFolder(tmp_path) as folder:
            assert folder.claim(built(schedule=lambda step: 1.0, hparams={"lr": 0.1, "foreach": Thing()})) is known


@pytest.mark.parametrize("name", ["jobs.json", "plan.json"])
def test_a_damaged_table_is_noticed_with_the_fix(tmp_path: Path, name: str) -> None:
    with opened(tmp_path) as folder:
        folder.save_plan({"tiers": {"m0": "serial"}, "sizes": [1, 2]})
        folder.save(SavedMember().train())
    data = (tmp_path / name).read_bytes()

    def read() -> Any:
        with opened(tmp_path) as folder:
            return folder.plan()

    assert read() == {"tiers": {"m0": "serial"}, "sizes": [1, 2]}
    for bad in (data[:-20], bytes(len(data)), b"", b"[]", data.replace(b"m0", b"m1"), data.replace(b": 1", b": 3")):
        (tmp_path / name).write_bytes(bad)
        if bad == data:
            continue
        with pytest.raises(DamagedError) as caught:
            read()
        assert name in str(caught.value) and "damaged" in str(caught.value) and "remove this file" in str(caught.value)
    (tmp_path / name).unlink()
    assert read() == (None if name == "plan.json" else {"tiers": {"m0": "serial"}, "sizes": [1, 2]})
    assert restored(tmp_path).step == 1, "checkpoints stand"


def test_another_version_of_the_folder_is_named(tmp_path: Path) -> None:
    with opened(tmp_path):
        atomic.write_sealed(tmp_path / "jobs.json", {"version": 1, "jobs": []})
    with pytest.raises(OutError, match="another version of Shoal"):
        opened(tmp_path)


def test_results_are_written_and_the_lock_is_freed(tmp_path: Path) -> None:
    members = built()
    folder = RunFolder(tmp_path)
    folder.claim(members)
    folder.finish(results(members))
    folder.close()
    table = json.loads((tmp_path / "results.json").read_text())
    assert [row["status"] for row in table["results"]] == ["done", "done"]
    assert json.loads((tmp_path / "history" / "0001.jsonl").read_text()) == {"epoch": 1, "loss": 0.5}
    with opened(tmp_path, 2) as again:
        assert again.plan() is None


# --- members as they are --------------------------------------------------------------------------------------------


def test_a_real_member_is_saved_and_restored(tmp_path: Path) -> None:
    if not hasattr(Member, "state"):
        pytest.skip("members have no state yet")
    changes: dict[str, Any] = {"optimizer": torch.optim.Adam, "hparams": {"lr": 0.01}}
    (member,) = built(1, **changes)
    with torch.no_grad():
        for parameter in member.model.parameters():
            parameter.add_(1.0)
    member.rng.manual_seed(5)
    member.history.append({"epoch": 1, "loss": 0.5})
    optimizer = torch.optim.Adam(member.model.parameters())
    member.model(X).sum().backward()
    optimizer.step()
    member.optimizer_state = optimizer.state_dict()
    member.step, member.epoch = 3, 1
    with RunFolder(tmp_path) as folder:
        folder.claim(built(1, **changes))
        assert folder.save(member)
    (other,) = built(1, **changes)
    with RunFolder(tmp_path) as folder:
        assert folder.claim([other]) and folder.restore(other)
    assert (other.step, other.epoch, other.history) == (3, 1, member.history)
    assert torch.equal(other.rng.get_state(), member.rng.get_state())
    for a, b in zip(tensors(member), tensors(other), strict=True):
        assert torch.equal(a, b)


def tensors(member: Member) -> list[Tensor]:
    held = torch.utils._pytree.tree_leaves([dict(member.model.state_dict()), member.optimizer_state])
    return [leaf for leaf in held if isinstance(leaf, Tensor)]


def test_jobs_that_come_later_are_known_again(tmp_path: Path) -> None:
    """A folder that grows: after a kill it may know the first of the jobs only, and the others are added."""
    with RunFolder(tmp_path) as folder:
        assert not folder.claim(built(2), grows=True)
        late = built(3)[2]
        folder.add([late])
        late.epoch = 7
        assert folder.save(late)
    for count in (3, 4):
        with RunFolder(tmp_path) as folder:
            again = built(count)
            assert folder.claim(again, grows=True)
            assert folder.restore(again[2]) and again[2].epoch == 7
            assert not folder.restore(again[0])
    for wrong, words in (
        (built(3), "it has job 'm3'"),
        ([*built(4)[1::-1], *built(4)[2:]], "in another order"),
        ([*built(3), built(4, hparams={"lr": 0.5})[3]], "job 'm3' has hparams"),
    ):
        with RunFolder(tmp_path) as folder, pytest.raises(OutError, match=words):
            folder.claim(wrong, grows=True)
    with RunFolder(tmp_path) as folder:
        assert folder.claim([*built(3), built(4, hparams={"lr": 0.5})[3]], grows=True, changed={"m3"})
    with RunFolder(tmp_path) as folder, pytest.raises(OutError, match="job 'm4' is not in it"):
        folder.claim(built(5))
