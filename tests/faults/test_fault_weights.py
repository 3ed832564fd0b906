"""A worker of the fault machine has weights of its own, which can be replaced, or changed in place."""

from pathlib import Path

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.lab.faults.weights import (
    ORIGINAL,
    OVERWRITTEN,
    ROLLED_OUT,
    WEIGHTS_FILE,
    key_of,
    make_model_folder,
    overwrite,
    read_weights,
    roll_out,
    token_of,
)
from kvmesh.workers.engines.mock.answers import mock_token


def test_a_rollout_puts_another_file_in_the_place_of_the_old_one(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    before = (folder / WEIGHTS_FILE).stat()
    roll_out(folder, ROLLED_OUT)
    assert read_weights(folder) == ROLLED_OUT
    assert (folder / WEIGHTS_FILE).stat().st_ino != before.st_ino


def test_a_change_in_place_keeps_inode_size_and_time(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    before, folder_before = (folder / WEIGHTS_FILE).stat(), folder.stat()
    overwrite(folder, OVERWRITTEN)
    after = (folder / WEIGHTS_FILE).stat()
    assert read_weights(folder) == OVERWRITTEN
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    assert folder.stat().st_mtime_ns == folder_before.st_mtime_ns


def test_the_original_weights_answer_as_the_mock_does() -> None:
    assert read_weights(CHECKPOINT_DIR) == ORIGINAL
    assert [token_of([5, 6], n, 2048, None, ORIGINAL) for n in range(9)] == [
        mock_token([5, 6], n, 2048) for n in range(9)
    ]


def test_other_weights_give_other_tokens_and_other_kv() -> None:
    answers = {tuple(token_of([5, 6], n, 2048, None, weights) for n in range(9)) for weights in range(3)}
    assert len(answers) == 3
    assert len({key_of(7, weights) for weights in range(3)}) == 3
