"""Calls the C++ kernels with memory of exactly the size that they may touch, for test_norms_fused_sanitized.

    python sanitizer_worker.py LIBRARY LEVEL SOURCES KERNELS

A process of its own, in which the sanitizer's allocator was loaded first; without torch and numpy, so that
little else runs under it. What the calls hold is read from the sources: a new field there ends the worker.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import re
import struct
import sys
from pathlib import Path
from typing import Any

CODES = {"float32": 0, "float64": 1, "bfloat16": 2, "float16": 3}
SIZES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
WIDTHS = (1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 100, 257, 1000)
GRU_WIDTHS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 100)
UNTOUCHED = 0xA5

libc = ctypes.CDLL(None)
libc.malloc.restype = libc.aligned_alloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.aligned_alloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]


def fields(text: str, name: str) -> list[tuple[str, str]]:
    """The type and name of each field of a struct of the sources."""
    found = re.search(rf"struct {name} {{(.*?)\n}};", text, re.DOTALL)
    assert found is not None, name
    listed = []
    for declaration in re.sub(r"//.*", "", found[1]).split(";"):
        if declaration.strip():
            kind, names = re.fullmatch(r"\s*(.*?[ *])(\w+(?:, \w+)*)\s*", declaration, re.DOTALL).groups()
            listed += [(kind.strip(), one) for one in names.split(", ")]
    return listed


class Memory:
    """Blocks of exactly the size that is asked for; `end` frees them, and looks whether they were filled."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.inputs: list[tuple[int, bytes]] = []
        self.outputs: list[tuple[int, int, int]] = []

    def block(self, size: int, shift: int = 0, *, aligned: bool = False) -> int:
        total = size + shift
        if aligned:
            assert shift == 0
            assert size % 64 == 0
            address = libc.aligned_alloc(64, size)
        else:
            address = libc.malloc(total)
        assert address
        self.blocks.append(address)
        return address + shift

    def put(self, content: bytes, shift: int = 0, *, changes: bool = False) -> int:
        address = self.block(len(content), shift)
        ctypes.memmove(address, content, len(content))
        if not changes:
            self.inputs.append((address, content))
        return address

    def out(self, count: int, item: int, shift: int = 0, *, aligned: bool = False) -> int:
        address = self.block(count * item, shift, aligned=aligned)
        ctypes.memset(address, UNTOUCHED, count * item)
        self.outputs.append((address, count, item))
        return address

    def end(self) -> None:
        for address, content in self.inputs:
            assert ctypes.string_at(address, len(content)) == content, "an input was changed"
        for address, count, item in self.outputs:
            if item >= 4:  # in half precision a result may look like this
                content, left = ctypes.string_at(address, count * item), bytes([UNTOUCHED]) * item
                at = content.find(left)
                while at >= 0 and at % item:  # parts of two neighbours
                    at = content.find(left, at + 1)
                assert at < 0, f"result {at // item} of {count} was not written"
        for address in self.blocks:
            libc.free(address)


POOL = 1021
SCALES = {
    "float32": (1.0, 1e-25, 1e30),
    "float64": (1.0, 1e-200, 1e200),
    "bfloat16": (1.0, 1e30),
    "float16": (1.0,),
}
FORMATS = {"float32": "f", "float64": "d", "float16": "e"}


def pool(dtype: str, kind: int) -> bytes:
    """Gaussian numbers, of one of several sizes, or with zeros, infinities and NaN among them."""
    draw, sizes = random.Random(kind), SCALES[dtype]
    values = [draw.gauss(0, 1) * sizes[kind % len(sizes)] for _ in range(POOL)]
    if kind % 5 == 4:
        values = [draw.choice((0.0, value, float("inf"), float("nan"))) for value in values]
    if dtype == "bfloat16":
        return b"".join(struct.pack("<f", value)[2:] for value in values)
    return struct.pack(f"<{POOL}{FORMATS[dtype]}", *values)


POOLS = {(dtype, kind): pool(dtype, kind) for dtype in CODES for kind in range(10)}


def numbers(dtype: str, count: int, kind: int = 0) -> bytes:
    content, size = POOLS[dtype, kind % 10], count * SIZES[dtype]
    return (content * (size // len(content) + 1))[:size]


class Kernels:
    """The library's functions, called as calls.hpp and gru.hpp say."""

    def __init__(self, library: str, level: str, sources: Path) -> None:
        self.library, self.level = ctypes.CDLL(library), level
        self.text = "\n".join((sources / name).read_text() for name in ("calls.hpp", "gru.hpp"))

    def pack(self, name: str, **values: Any) -> bytes:
        content = b""
        for kind, field in fields(self.text, name):
            value = values.pop(field)
            if isinstance(value, bytes):  # a struct in the struct
                content += value
            else:
                content += struct.pack("<d", value) if kind == "double" else struct.pack("<q", int(value))
        assert not values, values
        return content

    def call(self, function: str, name: str, memory: Memory, **values: float) -> None:
        run = getattr(self.library, f"rmsrepro_{function}_{self.level}")
        run.restype, run.argtypes = ctypes.c_int64, [ctypes.c_void_p]
        assert run(memory.put(self.pack(name, **values))) == 0

    def rule(self, n: int, k: int, **more: float) -> bytes:
        given = {"centred": False, "outside": False, "rounded": False, "eps": 1e-5} | more
        return self.pack("Rule", n=n, k=k, inverse_count=1 / k, **given)


def norm(
    kernels: Kernels, dtype: str, rows: int, n: int, k: int, *, centred: bool, residual: bool, strided: bool,
    threads: int, variant: int, aligned: bool = False,
) -> None:  # fmt: skip
    """One call forward and one backward."""
    memory, item = Memory(), SIZES[dtype]
    # Whole vectors may begin at any entry.
    shift = 0 if aligned else variant % 3 * item
    stride = n + (7 + variant % 3 if strided else 0)
    parameter = list(CODES)[variant % 4]
    gain, bias = variant % 3 != 0, variant % 2 == 0

    def rows_of(kind: int) -> int:
        return memory.put(numbers(dtype, (rows - 1) * stride + n, variant + kind), shift)

    def parameters(there: bool) -> int:
        return memory.put(numbers(parameter, n)) if there else 0

    rule = kernels.rule(
        n,
        k,
        centred=centred,
        outside=variant % 5 == 1,
        rounded=variant % 4 >= 2,
        eps=(1e-5, 0.0)[variant % 7 == 3],
    )
    shared = {
        "rule": memory.put(rule), "dtype": CODES[dtype], "parameter_dtype": CODES[parameter], "rows": rows,
        "threads": threads, "x": rows_of(0), "x_stride": stride,
    }  # fmt: skip
    given_gain = parameters(gain)
    kernels.call(
        "forward", "ForwardCall", memory, **shared,
        residual=rows_of(1) if residual else 0, residual_stride=stride if residual else 0,
        gain=given_gain, bias=parameters(bias),
        sum=memory.out(rows * n, item, shift, aligned=aligned) if residual else 0,
        y=memory.out(rows * n, item, shift, aligned=aligned),
    )  # fmt: skip
    kernels.call(
        "backward", "BackwardCall", memory, **shared,
        dy=rows_of(2), dy_stride=stride,
        extra=rows_of(3) if residual else 0, extra_stride=stride if residual else 0,
        gain=given_gain,
        dx=memory.out(rows * n, item, shift, aligned=aligned),
        dgain=memory.out(n, SIZES[parameter]) if gain else 0,
        dbias=memory.out(n, SIZES[parameter]) if bias else 0,
    )  # fmt: skip
    memory.end()


def norms(kernels: Kernels) -> int:
    calls: list[tuple[Any, ...]] = []
    for dtype, n in itertools.product(CODES, WIDTHS):
        for (k, centred), residual, strided in itertools.product(
            ((n, False), (n, True), (max(1, n // 3), False)), (False, True), (False, True)
        ):
            calls.append((dtype, (1, 3, 9, 19, 2, 8)[len(calls) % 6], n, k, centred, residual, strided, 1))
    # Enough for two threads, and rows that do not share out evenly.
    sizes = ((35, 1000), (301, 64), (16400, 1), (6001, 3))
    for dtype, (rows, n), centred in itertools.product(CODES, sizes, (False, True)):
        calls.append((dtype, rows, n, n, centred, len(calls) % 3 == 0, len(calls) % 2 == 0, 2))
    for variant, (dtype, rows, n, k, centred, residual, strided, threads) in enumerate(calls):
        norm(
            kernels, dtype, rows, n, k, centred=centred, residual=residual, strided=strided, threads=threads,
            variant=variant,
        )  # fmt: skip
    # Outputs that go past the cache, and as large ones that cannot.
    large = itertools.product(CODES, ((1024, True), (1024, False), (1000, False)), (False, True))
    for variant, (dtype, (n, aligned), centred) in enumerate(large):
        norm(
            kernels, dtype, (8 << 20) // (n * SIZES[dtype]) + 16, n, n if centred else 512, centred=centred,
            residual=centred, strided=False, threads=2, variant=variant, aligned=aligned,
        )  # fmt: skip
    return len(calls) + variant + 1


NORMED = (True, False, True, False, 1.0)
"""A site: whether it has a norm, centred, a gain, a bias, and the share of entries that the norm reads."""
SITES = (
    (NORMED,) * 4,
    ((True, True, True, True, 1.0),) * 4,
    ((True, False, True, True, 0.3),) * 4,
    ((False, False, False, True, 1.0),) * 4,
    (
        NORMED,
        (False, False, False, False, 1.0),
        (True, True, False, False, 1.0),
        (False, False, False, True, 1.0),
    ),
)


def packed(kernels: Kernels, sites: tuple[tuple[Any, ...], ...], d: int) -> tuple[bytes, int]:
    """The four sites of a GRU, and the length of the vector of parameters."""
    content, size = b"", 0
    for width, (normed, centred, gain, bias, share) in zip((2 * d, d, 2 * d, d), sites, strict=True):
        places = []
        for there in (gain, bias):
            places.append(size if there else -1)
            size += width if there else 0
        rule = kernels.rule(width, max(1, int(share * width)), centred=centred)
        content += kernels.pack("GruSite", rule=rule, normed=normed, gain=places[0], bias=places[1])
    return content, size


def gru_step(
    kernels: Kernels,
    dtype: str,
    rows: int,
    d: int,
    threads: int,
    sites: tuple[tuple[Any, ...], ...],
    variant: int,
) -> None:
    """One step forward, without and with what the gradients need, and one backward."""
    memory, item = Memory(), SIZES[dtype]
    packed_sites, size = packed(kernels, sites, d)
    shift, first = variant % 3 * item, variant % 4 == 1
    stride, sums_stride = d + variant % 3, size + variant % 5

    def put(length: int, *, changes: bool = False) -> int:
        kind = variant if variant % 3 == 0 else 0
        return memory.put(numbers(dtype, length, kind), shift, changes=changes)

    shared = {
        "sites": memory.put(packed_sites), "dtype": CODES[dtype], "rows": rows, "width": d,
        "threads": threads, "parameters": put(size), "x": put(rows * 3 * d), "h": put(rows * 3 * d),
        "state": put(rows * d),
        "mask": memory.put(bytes(row % 3 != 1 for row in range(rows))) if variant % 2 else 0,
    }  # fmt: skip
    for scales in (0, put(rows * 12, changes=True)):
        new_state = memory.out(rows * d, item, shift)
        kernels.call("gru_forward", "GruForwardCall", memory, **shared, scales=scales, new_state=new_state)
    kernels.call(
        "gru_backward", "GruBackwardCall", memory, **shared, scales=scales,
        upstream=put((rows - 1) * stride + d), upstream_stride=stride,
        product=0 if first else put(rows * d),
        direct=memory.out(rows * d, item) if first else put(rows * d, changes=True), first=first,
        dx=memory.out(rows * 3 * d, item, shift), dh=memory.out(rows * 3 * d, item, shift),
        sums=memory.put(bytes(((threads - 1) * sums_stride + size) * item), changes=True),
        sums_stride=sums_stride,
    )  # fmt: skip
    memory.end()


def gru(kernels: Kernels) -> int:
    sizes = [(rows, d, 1) for rows, d in itertools.product((1, 3, 9), GRU_WIDTHS)]
    sizes += [(41, 64, 2), (333, 7, 2)]
    steps = list(itertools.product(("float32", "float64"), sizes, SITES))
    for variant, (dtype, (rows, d, threads), sites) in enumerate(steps):
        gru_step(kernels, dtype, rows, d, threads, sites, variant)
    return len(steps)


if __name__ == "__main__":
    library, level, sources, which = sys.argv[1:]
    loaded = Kernels(library, level, Path(sources))
    print({"norms": norms, "gru": gru}[which](loaded), "calls", flush=True)
