"""The command that checks GPUs, on a machine that need not have one."""

from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.models.frameworks import ArrayTarget
from tests.gpu import __main__ as command
from tests.gpu.checks import CHECKS, Check, Registered
from tests.gpu.lane import Lane, processor_as_gpu

ON_A_PROCESSOR = [
    *("types", "dropped", "consumer_error", "inference_mode", "frozen", "cut_short"),
    *("dequantization", "float8", "bench"),
]


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "gpu_count", lambda: 0)


def run(monkeypatch: pytest.MonkeyPatch, check: Check) -> int:
    checks = {
        "mine": Registered("my check", check, ()),
        "other": Registered("another check", check, ("two GPUs", "a GPU")),
    }
    monkeypatch.setattr(command, "CHECKS", checks)
    return command.main([])


def test_says_that_nothing_was_checked_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lanes: list[Lane] = []
    usual = vars(ArrayTarget)["has_stream"]
    assert run(monkeypatch, lanes.append) == command.NO_GPU == 3
    out = capsys.readouterr().out
    assert out.startswith("no GPU: torch ")
    assert "s  my check\n" in out
    assert "not run           another check: needs two GPUs, a GPU\n" in out
    assert "1 passed, 0 failed, 1 not run\n" in out
    assert out.endswith("NOTHING WAS CHECKED ON A GPU: run this on a machine that has one\n")
    (lane,) = lanes
    assert (lane.device, lane.is_gpu, lane.folder.exists()) == ("cpu:0", False, False)
    assert vars(ArrayTarget)["has_stream"] is usual


def test_succeeds_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_machine", lambda: "one GPU")
    monkeypatch.setattr(command, "gpu_count", lambda: 1)
    lanes: list[Lane] = []
    assert run(monkeypatch, lanes.append) == 0
    assert [(lane.device, lane.is_gpu, lane.scale) for lane in lanes] == [("cuda", True, 1.0)]


def test_fails_if_a_check_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def differ(_: Lane) -> None:
        raise AssertionError("tensor a differs")

    assert run(monkeypatch, differ) == 1
    out = capsys.readouterr().out
    assert "AssertionError: tensor a differs\n" in out
    assert "FAILED" in out


def test_fails_if_no_time_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lanes: list[Lane] = []
    monkeypatch.setattr(command, "_BUDGET", -1)
    assert run(monkeypatch, lanes.append) == 1
    assert lanes == []
    assert "my check: no time was left" in capsys.readouterr().out


@pytest.mark.parametrize("name", ON_A_PROCESSOR)
def test_the_check_passes_on_a_processor(name: str, tmp_path: Path) -> None:
    with processor_as_gpu() as device:
        CHECKS[name].check(Lane(device, False, tmp_path, 0.001))
