from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from services.learner import checkpoint
from services.learner.checkpoint import Checkpoint, Meta

META = Meta(
    feature_hash="f", objective="goodput", hidden=(8,), lineage="l", sequence=0, replay_from=1, transitions=0,
    updates=0, owed=0.5, candidate_at=0, parent="", rng="{}", capacity=8, written=0, max_priority=1.0,
)  # fmt: skip


def at(sequence: int) -> Checkpoint:
    return Checkpoint(msgspec.structs.replace(META, sequence=sequence), {"a": np.full(3, sequence, np.float32)})


def sequences(folder: Path) -> list[int]:
    return [c.meta.sequence for c in checkpoint.load(folder).usable]


def test_the_two_newest_are_kept_and_nothing_else_lies_around(tmp_path: Path) -> None:
    for sequence in range(5):
        checkpoint.save(tmp_path / "deep" / "er", at(sequence))
    assert sequences(tmp_path / "deep" / "er") == [4, 3]
    assert len(list((tmp_path / "deep" / "er").iterdir())) == 4


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, at(7))
    found = checkpoint.load(tmp_path).usable[0]
    assert found.meta == at(7).meta
    assert np.array_equal(found.arrays["a"], np.full(3, 7, np.float32))


def test_an_absent_folder_holds_nothing(tmp_path: Path) -> None:
    found = checkpoint.load(tmp_path / "none")
    assert (found.usable, found.refused) == ([], [])


@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "json", "foreign"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_used(tmp_path: Path, harm: str) -> None:
    checkpoint.save(tmp_path, at(1))
    newest = checkpoint.save(tmp_path, at(2))
    arrays = newest.with_suffix(".safetensors")
    data = arrays.read_bytes()
    if harm == "flip":
        arrays.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif harm == "cut":
        arrays.write_bytes(data[:20])
    elif harm == "remove":
        arrays.unlink()
    elif harm == "json":
        newest.write_bytes(newest.read_bytes()[:-10])
    else:
        newest.write_bytes(newest.read_bytes().replace(checkpoint.FORMAT.encode(), b"tidegate-learner-0"))
    found = checkpoint.load(tmp_path)
    assert [c.meta.sequence for c in found.usable] == [1]
    assert len(found.refused) == 1
    assert newest.name in found.refused[0], "the log must say which file"
    checkpoint.save(tmp_path, at(3))
    assert sequences(tmp_path)[0] == 3, "a new checkpoint is newer than a damaged one"


@pytest.mark.parametrize("when", [0, 1])
def test_a_death_before_either_rename_leaves_the_former_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    checkpoint.save(tmp_path, at(1))
    renames = 0
    real = Path.replace

    def dying(self: Path, target: Path) -> Path:
        nonlocal renames
        renames += 1
        if renames == when + 1:
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "replace", dying)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, at(2))
    monkeypatch.undo()
    assert sequences(tmp_path) == [1]
    checkpoint.save(tmp_path, at(3))
    assert sequences(tmp_path) == [3, 1]
    assert not list(tmp_path.glob(".*.part")), "the next save sweeps what the death left"


def test_kill_9_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    program = (
        "import sys, itertools, numpy as np, msgspec\n"
        "from pathlib import Path\n"
        "from tests.services.learner.test_checkpoint import at, checkpoint\n"
        "for n in itertools.count():\n"
        "    checkpoint.save(Path(sys.argv[1]), at(n))\n"
        "    print(n, flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    ) as process:
        assert process.stdout is not None
        said = 0
        for line in process.stdout:
            said = int(line)
            if said >= 6:
                process.kill()
                break
        process.stdout.read()
    found = checkpoint.load(tmp_path)
    assert not found.refused
    assert found.usable[0].meta.sequence >= said, "what was reported saved is there"
    assert found.usable[0].arrays["a"][0] == found.usable[0].meta.sequence, "arrays and JSON belong together"
