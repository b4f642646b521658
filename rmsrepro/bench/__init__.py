"""Paired timing: what a training step costs with each norm, against the LayerNorm of the same backend."""

from rmsrepro.bench.identity import bench_key, find_reusable
from rmsrepro.bench.measuring import BenchError
from rmsrepro.bench.runner import BenchResult, run_bench

__all__ = ["BenchError", "BenchResult", "bench_key", "find_reusable", "run_bench"]
