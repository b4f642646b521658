from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rmsrepro.bench.memory import ALIGNMENT, Ring, peak_bytes
from rmsrepro.bench.settings import (
    agreed,
    frequency_mhz,
    governor,
    last_level_cache_bytes,
    machine_settings,
    settings_flags,
)

CPU = torch.device("cpu")
NOT_KEPT = "large blocks are not kept: this system's C library does not offer it"


# -------------------------------------------------------------------------------------- the peak


def test_the_peak_is_what_lies_there_at_once_and_not_what_was_there_before() -> None:
    x = torch.zeros(1000, 100)

    def one() -> torch.Tensor:
        return x * 2

    def two_at_once() -> None:
        y = x * 2
        z = y + 1
        del y
        torch.mul(z, 2)

    assert peak_bytes(one, CPU) == pytest.approx(x.nbytes, rel=0.01)
    assert peak_bytes(two_at_once, CPU) == pytest.approx(2 * x.nbytes, rel=0.01)


def test_a_device_that_does_not_tell_has_no_peak() -> None:
    assert peak_bytes(lambda: None, torch.device("meta")) is None


# -------------------------------------------------------------------------------------- the ring


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_take_turns_through_more_memory_than_asked_for(dtype: torch.dtype) -> None:
    ring = Ring((5, 7), dtype, CPU, gradients=True, least_bytes=10_000)
    size = 35 * dtype.itemsize
    count = -(-10_000 // size)
    assert ring.bytes == 2 * count * size
    taken = [ring.take() for _ in range(count + 1)]
    places = [x.data_ptr() for x, _ in taken] + [dy.data_ptr() for _, dy in taken]
    assert len(set(places)) == 2 * count
    assert places[0] == places[count]
    assert {place % ALIGNMENT for place in places} == {
        taken[0][0].data_ptr() % ALIGNMENT,
        places[-1] % ALIGNMENT,
    }
    for x, dy in taken:
        assert x.shape == dy.shape == (5, 7)
        assert x.dtype == dy.dtype == dtype
        assert x.is_leaf
        assert x.requires_grad
        assert not dy.requires_grad
        assert x.is_contiguous()


def test_inputs_are_off_centre_and_independent_of_their_upstream_gradients() -> None:
    ring = Ring((500, 100), torch.float32, CPU, gradients=True, least_bytes=1)
    x, dy = (one.detach() for one in ring.take())
    assert float(x.mean()) == pytest.approx(0.5, abs=0.02)
    assert float(dy.mean()) == pytest.approx(0.0, abs=0.02)
    assert abs(float(((x - 0.5) * dy).mean())) < 0.02


def test_without_gradients_there_are_inputs_only() -> None:
    ring = Ring((4, 4), torch.float32, CPU, gradients=False, least_bytes=1)
    assert ring.bytes == 2 * 64
    assert not ring.take()[0].requires_grad


# ----------------------------------------------------------------------------- blocks that are kept


@pytest.mark.skipif(sys.platform != "linux", reason="page faults are counted on Linux")
def test_blocks_that_are_kept_cost_no_new_page_faults() -> None:
    code = """
import resource, sys
import torch
from rmsrepro.bench.memory import keep_large_blocks
kept = keep_large_blocks() if sys.argv[1] == "keep" else None
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
x = torch.zeros(33, 2**18)  # 33 MiB, beyond what the library ever keeps by itself
w = torch.ones(2**18, requires_grad=True)
def step(): torch.autograd.grad(torch.nn.functional.layer_norm(x, (2**18,), w), [w], x)
def of_steps():
    before = faults()
    for _ in range(5): step()
    return faults() - before
for _ in range(20): step()
print(kept, min(of_steps() for _ in range(5)))  # now and then the heap still grows by a block
"""

    def run(how: str) -> tuple[str, int]:
        done = subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, check=True)
        kept, faults = done.stdout.split()
        return kept, int(faults)

    kept, faults = run("keep")
    if kept == "False":
        pytest.skip("the C library keeps no blocks on request")
    _, usual = run("leave")
    # A page is 4 KiB: 8448 a block, of which a step takes one.
    assert faults < 1000
    assert usual > 5 * 8000


# ------------------------------------------------------------------------------------ the settings


def cpu_folder(tmp_path: Path, governors: list[str], frequencies: list[str]) -> Path:
    for number, (name, khz) in enumerate(zip(governors, frequencies, strict=True)):
        folder = tmp_path / f"cpu{number}" / "cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text(f"{name}\n")
        (folder / "scaling_cur_freq").write_text(f"{khz}\n")
    return tmp_path


def test_governor_and_frequency_are_read(tmp_path: Path) -> None:
    folder = cpu_folder(tmp_path, ["powersave", "powersave"], ["1200000", "3400500"])
    assert governor(folder) == "powersave"
    assert frequency_mhz(folder) == [1200.0, 3400.5]


def test_what_cannot_be_read_is_unknown_and_flagged(tmp_path: Path) -> None:
    found = machine_settings(tmp_path, tmp_path / "absent")
    assert (found["governor"], found["frequency_mhz"], found["huge_pages"]) == ("unknown",) * 3
    assert settings_flags(found, "cpu") == [
        "governor: unknown, the system does not tell",
        "frequency: unknown, the system does not tell",
    ]
    assert settings_flags(found, "cuda") == ["device clock: unknown, the system does not tell"]


def test_a_governor_that_lets_the_frequency_move_is_flagged(tmp_path: Path) -> None:
    folder = cpu_folder(tmp_path, ["performance", "schedutil"], ["1", "2"])
    found = machine_settings(folder, tmp_path / "absent")
    assert settings_flags(found, "cpu") == [
        "governor: performance,schedutil, the frequency may move with the load"
    ]
    steady = {"governor": "performance", "frequency_mhz": [1.0, 2.0]}
    assert settings_flags(steady, "cpu") == []
    assert settings_flags({**steady, "keep_blocks_asked": True, "keep_blocks": False}, "cpu") == [NOT_KEPT]
    assert settings_flags({**steady, "keep_blocks_asked": True, "keep_blocks": True}, "cpu") == []


def test_the_largest_cache_is_found(tmp_path: Path) -> None:
    for number, size in enumerate(["32K", "32K", "1024K", "32M"]):
        folder = tmp_path / "cpu0" / "cache" / f"index{number}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(f"{size}\n")
    assert last_level_cache_bytes(tmp_path) == 32 * 2**20
    assert last_level_cache_bytes(tmp_path / "cpu0") is None


def test_processes_agree_on_settings_and_the_frequency_keeps_its_extremes() -> None:
    found = agreed(
        [{"governor": "x", "frequency_mhz": [2.0, 3.0]}, {"governor": "x", "frequency_mhz": [1.0, 2.5]}]
    )
    assert found == {"governor": "x", "frequency_mhz": [1.0, 3.0]}
    assert agreed([]) == {}
