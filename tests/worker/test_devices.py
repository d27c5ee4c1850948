"""What a worker finds out about its GPUs from `nvidia-smi`, and what it does without."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker import devices
from worker.devices import DevicesError, check_visible, describe_gpus

ROWS = """\
0, GPU-aaa, NVIDIA H200, 143771
1, GPU-bbb, NVIDIA A100, 81920
2, GPU-ccc, NVIDIA GB10, [N/A]
"""


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name in front of all others."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{ROWS}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return program


def test_slots_are_named_in_the_order_in_which_they_are_given_out(nvidia_smi: Path) -> None:
    assert describe_gpus(2, None) == [
        {"name": "NVIDIA H200", "memory_gib": 140.4},
        {"name": "NVIDIA A100", "memory_gib": 80.0},
    ]
    assert [gpu["name"] for gpu in describe_gpus(2, "GPU-bbb,0")] == ["NVIDIA A100", "NVIDIA H200"]
    assert describe_gpus(1, "2") == [{"name": "NVIDIA GB10", "memory_gib": None}]
    assert describe_gpus(1, "MIG-x") == [{"name": None, "memory_gib": None}]


@pytest.mark.parametrize(("number", "visible"), [(0, ""), (2, None), (2, "1, 0"), (1, "GPU-aaa,GPU-bbb"), (1, "0,-1")])
def test_slots_that_are_gpus_of_their_own_are_given_away(number: int, visible: str | None) -> None:
    check_visible(number, visible)


@pytest.mark.parametrize("visible", ["", "0", "-1", "0,-1,1", "0,,", "0,0", "GPU-aaa, GPU-aaa"])
def test_slots_that_nobody_sees_or_that_are_one_gpu_are_refused(visible: str) -> None:
    with pytest.raises(DevicesError, match="CUDA_VISIBLE_DEVICES"):
        check_visible(2, visible)


def test_without_gpus_nobody_is_asked(nvidia_smi: Path) -> None:
    nvidia_smi.write_text("#!/bin/sh\ntouch asked\n")
    assert describe_gpus(0, None) == []
    assert not Path("asked").exists()


@pytest.mark.parametrize("program", ["exit 9", "sleep 60", None])
def test_no_answer_is_no_name_and_no_fault(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch, program: str | None
) -> None:
    monkeypatch.setattr(devices, "PATIENCE_S", 0.3)
    if program is None:
        nvidia_smi.unlink()
    else:
        nvidia_smi.write_text(f"#!/bin/sh\nexec {program}\n" if program != "exit 9" else "#!/bin/sh\nexit 9\n")
    assert describe_gpus(2, None) == []
