"""Full disks, planted names and broken states: nothing half-written, nothing foreign touched, and a sentence."""

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from adaattn_hf._files import json_text, parse_json, write_atomically
from adaattn_hf.calibration.state import FILE, CalibrationState

if sys.platform != "linux":
    pytest.skip("limits the size of files as Linux does", allow_module_level=True)
import resource


@contextmanager
def room_for(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    write_atomically(target, "old")
    with room_for(100), pytest.raises(OSError, match="too large"):
        write_atomically(target, "new" * 1000)
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_name_of_any_bytes_is_written_and_read_back(tmp_path: Path) -> None:
    write_atomically(tmp_path / "report.json", json_text({"data": "b\udcff"}, ensure_ascii=False))
    assert parse_json((tmp_path / "report.json").read_text(encoding="utf-8")) == {"data": "b\udcff"}
    with pytest.raises(ValueError, match=r"path: got '.*a\\x00b', expected one without a zero byte"):
        write_atomically(tmp_path / "a\0b", "")


def test_ctrl_c_behind_the_last_step_stays_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = os.replace

    def interrupted(old: str, new: Path) -> None:
        renamed(old, new)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "plan.json", "new")
    assert (tmp_path / "plan.json").read_text() == "new"


def test_of_two_writers_of_a_file_one_is_last_and_whole(tmp_path: Path) -> None:
    target, texts = tmp_path / "plan.json", ["a" * 300_000, "b" * 200_000]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(20):
            list(pool.map(partial(write_atomically, target), texts))
            assert target.read_text() in texts
    assert os.listdir(tmp_path) == ["plan.json"]


def test_no_planted_name_is_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f".plan.json.{os.getpid()}").symlink_to(victim)
    write_atomically(tmp_path / "plan.json", "new")
    assert (victim.read_text(), (tmp_path / "plan.json").read_text()) == ("precious", "new")
    plain = tmp_path / "plain"
    plain.write_text("")
    assert (tmp_path / "plan.json").stat().st_mode == plain.stat().st_mode


def test_pipes_and_devices_are_written_to_and_stay(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for target in (pipe, tmp_path / "link"):
        with ThreadPoolExecutor(1) as pool:
            reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
            pool.submit(write_atomically, target, "plan").result()
            assert os.read(reader, 100) == b"plan"
            os.close(reader)
        assert target.is_fifo()
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


@pytest.mark.parametrize("kind", ["empty", "garbage", "cut off", "lacks arrays", "another file of numpy"])
def test_a_broken_state_is_named_with_the_remedy(kind: str, tmp_path: Path) -> None:
    state = CalibrationState({"seed": 0}, (64,), 2, 3)
    if kind == "another file of numpy":
        np.save(tmp_path / "other", np.zeros(3))
        os.replace(tmp_path / "other.npy", tmp_path / FILE)
    else:
        arrays = {"total": np.zeros(999)} if kind == "cut off" else {}
        np.savez(tmp_path / FILE, identity=np.array(json.dumps(state.identity)), **arrays)
    whole = (tmp_path / FILE).read_bytes()
    broken = {"empty": b"", "garbage": b"\x00\xffgarbage" * 9, "cut off": whole[:400]}.get(kind, whole)
    (tmp_path / FILE).write_bytes(broken)
    with pytest.raises(ValueError, match=r"partial\.npz is no whole state .*delete it") as caught:
        state.load(tmp_path)
    assert "pickle" not in str(caught.value)
