import errno
import os
from pathlib import Path

import pytest

from headway.learner.checkpoint import MARKER, CheckpointFailed, begin, commit, newest_complete, writing


def save(parent: Path, version: int, text: str = "x") -> Path:
    partial = begin(parent, version)
    (partial / "learner").mkdir()
    (partial / "learner" / "weights").write_text(text)
    (partial / "queue.parquet").write_text(text)
    return commit(partial)


def test_newest_complete_is_the_highest_version(tmp_path: Path) -> None:
    assert newest_complete(tmp_path) is None
    assert newest_complete(tmp_path / "missing") is None
    first = save(tmp_path, 2)
    assert newest_complete(tmp_path) == first
    second = save(tmp_path, 10)
    assert newest_complete(tmp_path) == second
    assert not first.exists()
    assert (second / "learner" / "weights").read_text() == "x"


def test_the_same_version_again_replaces_it_only_when_complete(tmp_path: Path) -> None:
    first = save(tmp_path, 3, "old")
    begin(tmp_path, 3)
    assert newest_complete(tmp_path) == first
    second = save(tmp_path, 3, "new")
    assert newest_complete(tmp_path) == second
    assert (second / "queue.parquet").read_text() == "new"
    assert not first.exists()


class Killed(BaseException):
    pass


STOPS = ("fsync", "rename", "rmtree")


@pytest.mark.parametrize("stop", range(12))
def test_killed_anywhere_a_complete_checkpoint_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    """The process ends before the n-th operation on the disk: what is found is whole, the old or the new one."""
    save(tmp_path, 1, "old")
    partial = begin(tmp_path, 2)
    (partial / "data").write_text("new")
    left = stop

    def dies(operation):
        def wrapper(*args, **kwargs):
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return operation(*args, **kwargs)

        return wrapper

    with monkeypatch.context() as patch:
        patch.setattr("headway.learner.checkpoint.os.fsync", dies(os.fsync))
        patch.setattr("headway.learner.checkpoint.os.rename", dies(os.rename))
        import shutil

        patch.setattr("headway.learner.checkpoint.shutil.rmtree", dies(shutil.rmtree))
        try:
            commit(partial)
            finished = True
        except Killed:
            finished = False
    found = newest_complete(tmp_path)
    assert found is not None
    if found.name == "version-00000001":
        assert not finished
        assert (found / "queue.parquet").read_text() == "old"
    else:
        assert (found / "data").read_text() == "new"
    # and the run that takes up from there can save again
    assert newest_complete(tmp_path) != save(tmp_path, 2, "again")
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".")] in (
        ["version-00000002"],
        ["version-00000002.1"],
    )


def test_damaged_checkpoints_are_skipped(tmp_path: Path) -> None:
    good = save(tmp_path, 1)
    for version, damage in ((2, "marker"), (3, "size"), (4, "missing"), (5, "half a marker")):
        folder = tmp_path / f"version-{version:08d}"
        folder.mkdir()
        (folder / "data").write_text("12345")
        marker = {"marker": None, "size": '{"data": 6}', "missing": '{"other": 5}', "half a marker": '{"da'}[
            damage
        ]
        if marker is not None:
            (folder / MARKER).write_text(marker)
    assert newest_complete(tmp_path) == good


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    good = save(tmp_path, 1)
    partial = begin(tmp_path, 2)
    (partial / "weights").symlink_to("/dev/full")

    def write() -> None:
        with writing(partial), open(partial / "weights", "wb") as file:
            file.write(bytes(1 << 16))

    with pytest.raises(CheckpointFailed, match=r"No space left on device.*bytes free"):
        write()
    assert newest_complete(tmp_path) == good


def test_a_failed_commit_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = save(tmp_path, 1)
    partial = begin(tmp_path, 2)
    (partial / "weights").write_text("x")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("headway.learner.checkpoint.os.fsync", full)
    with pytest.raises(CheckpointFailed, match="No space left"):
        commit(partial)
    assert newest_complete(tmp_path) == good


def test_what_an_interrupted_save_left_is_removed(tmp_path: Path) -> None:
    (begin(tmp_path, 1) / "old").write_text("x")
    assert list(begin(tmp_path, 1).iterdir()) == []
    (begin(tmp_path, 1) / "old").write_text("x")
    save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["version-00000002"]
