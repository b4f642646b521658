"""The product with the state's weights at each step, the one part that no kernel of this package computes.

It takes most of a fused GRU's time. `torch.mm` reorders the matrix for the processor at every call; two
private operators of torch multiply with one that was reordered once a sequence. They are used where they
were measured to be faster, by a rule of sizes and the processor's maker: the choice decides how sums are
rounded, so it must not come from a measurement at run time, which might say otherwise when a run is resumed.

Two threads, milliseconds for the 30 products of a sequence, preparation included, torch 2.13 (rows x width):

    Intel Xeon (Sapphire Rapids)   64x128   64x256   80x512   80x1024
        forwards   mm                .9      4.0      15.7      76.9
                   mkl               .9      3.5      12.8      50.3
                   onednn           1.6      4.7      14.3      55.6
        backwards  mm               1.0      4.2      14.9      61.0
                   mkl              1.2      4.0      15.2      61.1
                   onednn           1.7      5.0      15.9      63.7

    AMD EPYC (Zen 3, no AVX-512)   64x128   64x256   80x512   80x1024
        forwards   mm               2.6      9.9      40.6     188.1
                   mkl              3.0     10.5      42.8     200.3
                   onednn           3.3      8.3      32.9     150.5
        backwards  mm               2.0      7.3      35.2     177.0
                   mkl              2.8      9.6      40.0     190.9
                   onednn           3.0      8.7      38.9     162.7

On an AMD processor with AVX-512 (Zen 4) mm ran at 110 GFLOP/s and onednn at 182 to 215, from a width of 512
on. So: mkl for the forward products on Intel's from 256 on; onednn on AMD's from 512 on, without AVX-512
backwards from 1024 on; elsewhere mm. RMSREPRO_GRU_GEMM=mm, mkl or onednn chooses one for all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from rmsrepro.config.errors import UserError, nearest
from rmsrepro.norms.backends.fused.levels import processor_flags

CHOICE = "RMSREPRO_GRU_GEMM"
FORMS = ("mm", "mkl", "onednn")
LEAST_STEPS, LEAST_ROWS = 16, 32
"""Fewer do not make up for the reordering."""


def product_with(
    weight: Tensor, rows: int, steps: int, *, backward: bool = False
) -> Callable[[Tensor], Tensor]:
    """Return the function a (rows, n) -> a weight^T (rows, m), to be called `steps` times.

    Args:
        weight: (m, n), in any layout.
        rows: of every a.
        steps: how many calls there will be.
        backward: whether these are the products of the backward pass.

    Raises:
        UserError: RMSREPRO_GRU_GEMM names no form.
    """
    form = _form(weight, rows, steps, backward)
    if form == "mkl":
        dense = weight.contiguous()
        packed = torch.ops.mkl._mkl_reorder_linear_weight(dense, rows)
        return lambda a: torch.ops.mkl._mkl_linear(a, packed, dense, None, rows)
    if form == "onednn":
        reordered = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
        return lambda a: torch.ops.mkldnn._linear_pointwise(a, reordered, None, "none", [], "")
    transposed = weight.t()
    return lambda a: torch.mm(a, transposed)


def chosen_form() -> str | None:
    """Return the form that RMSREPRO_GRU_GEMM names, None where it names none.

    Raises:
        UserError: there is no such form.
    """
    wanted = os.environ.get(CHOICE)
    if wanted and wanted not in FORMS:
        raise UserError(f"{CHOICE}={wanted}{nearest(wanted, FORMS)}; the forms are {', '.join(FORMS)}")
    return wanted or None


def _form(weight: Tensor, rows: int, steps: int, backward: bool) -> str:
    wanted = chosen_form()
    if weight.dtype != torch.float32 or not rows:
        return "mm"
    if not wanted:
        width, maker = min(weight.shape), processor_maker()
        if steps < LEAST_STEPS or rows < LEAST_ROWS:
            return "mm"
        if maker == "GenuineIntel" and width >= 256 and not backward:
            wanted = "mkl"
        elif maker == "AuthenticAMD" and width >= (1024 if backward and not _has_avx512() else 512):
            wanted = "onednn"
        else:
            return "mm"
    return wanted if _works(wanted) else "mm"


@cache
def _works(form: str) -> bool:
    """Whether this torch has the operators and they do what they should. They are private, and may go."""
    if form == "mm":
        return True
    weight, a = torch.eye(4).roll(1, 0), torch.arange(8.0).view(2, 4)
    try:
        if form == "mkl":
            packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, 2)
            product = torch.ops.mkl._mkl_linear(a, packed, weight, None, 2)
        else:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, 2)
            product = torch.ops.mkldnn._linear_pointwise(a, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):  # NotImplementedError among them
        return False
    return torch.equal(product, a.roll(1, 1))


@cache
def _has_avx512() -> bool:
    return "avx512f" in processor_flags()


@cache
def processor_maker(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return who made this processor, as Linux names them; empty elsewhere."""
    try:
        text = cpuinfo.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    line = next((line for line in text.splitlines() if line.startswith("vendor_id")), "")
    return line.partition(":")[2].strip()
