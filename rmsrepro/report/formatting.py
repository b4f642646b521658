"""Numbers and names as a reader sees them, the same on the page and on a terminal (plain ASCII)."""

from __future__ import annotations

import math
import re

NORM_TITLES = {
    "none": "no norm",
    "layernorm": "LayerNorm",
    "layernorm_nobias": "LayerNorm without bias",
    "rmsnorm": "RMSNorm",
    "prmsnorm": "pRMSNorm",
    "l2norm": "L2Norm",
    "batchnorm": "BatchNorm",
    "weightnorm": "WeightNorm",
    "scalenorm": "ScaleNorm",
    "crmsnorm": "CRMSNorm",
    "dyt": "DyT",
    "llama_rmsnorm": "RMSNorm (LLaMA)",
    "mistral_rmsnorm": "RMSNorm (Mistral)",
    "qwen_rmsnorm": "RMSNorm (Qwen)",
    "t5_rmsnorm": "RMSNorm (T5)",
    "gemma_rmsnorm": "RMSNorm (Gemma)",
}

METRIC_TITLES = {
    "train_loss": "training loss",
    "val_loss": "validation loss",
    "test_loss": "test loss",
    "val_perplexity": "validation perplexity",
    "test_perplexity": "test perplexity",
    "val_bits_per_byte": "validation bits per byte",
    "test_bits_per_byte": "test bits per byte",
    "val_accuracy": "validation accuracy",
    "val_bleu": "validation BLEU",
    "test_bleu": "test BLEU",
    "val_chrf": "validation chrF",
    "test_chrf": "test chrF",
}


def norm_title(norm: str) -> str:
    """A norm's name in prose; an unknown one (a plug-in's) stays as it is."""
    return NORM_TITLES.get(norm, norm)


def metric_title(metric: str) -> str:
    """A metric's name in prose; an unknown one stays as it is."""
    return METRIC_TITLES.get(metric, metric)


def decimals_for(margin: float | None, metric: str) -> int:
    """Decimals that show a difference one digit finer than the margin; without one, by metric."""
    if margin is not None and margin > 0 and math.isfinite(margin):
        return max(1, min(8, 1 - math.floor(math.log10(margin))))
    return 2 if any(word in metric for word in ("bleu", "chrf")) else 4


def number(value: float | None, decimals: int) -> str:
    """A plain number; `-` for None or NaN, `inf` for infinity."""
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if abs(value) >= 1e7:
        return f"{value:.2e}"
    text = f"{value:.{decimals}f}"
    return text.lstrip("-") if float(text) == 0 else text


def signed(value: float | None, decimals: int) -> str:
    """As `number`, with a plus sign for positive values."""
    text = number(value, decimals)
    positive = value is not None and math.isfinite(value) and value > 0
    return f"+{text}" if positive and float(text) != 0 else text


def interval(low: float, high: float, decimals: int) -> str:
    """`[low, high]`, or nothing if either end is unknown."""
    if math.isnan(low) or math.isnan(high):
        return ""
    return f"[{number(low, decimals)}, {number(high, decimals)}]"


def seconds(value: float) -> str:
    """A duration with three significant digits and a fitting unit."""
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "never"
    if value < 1e-3:
        return f"{value * 1e6:.3g} us"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 10:
        return f"{value:.2f} s"
    if value < 120:
        return f"{value:.1f} s"
    if value < 7200:
        return f"{value / 60:.1f} min"
    return f"{value / 3600:.1f} h"


def count(number_of: int, noun: str) -> str:
    """`1 run`, `3 runs`."""
    return f"{number_of} {noun}" if number_of == 1 else f"{number_of} {noun}s"


def join(parts: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1] if parts else ""


def folded(name: str, width: int) -> str:
    """A name over several lines, broken after `:`, `.`, `_`, `/`, `,` or a space, not in words or numbers."""
    lines = [""]
    for part in re.split(r"(?<=[:_/, ])(?![:._/, ])|(?<=\.)(?![:._/, \d])", name):
        if len((lines[-1] + part).rstrip()) > width and lines[-1]:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)
