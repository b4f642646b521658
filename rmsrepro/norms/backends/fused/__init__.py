"""Norms as one kernel each, forward and backward: C++ on a CPU, Triton on a CUDA device."""
