"""What all figures share: how norms look, an empty figure, and safe labels.

Every text that comes from a record goes through `safe`, since plotly reads labels and hover texts
as a small HTML.
"""

from __future__ import annotations

import hashlib
import html
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from rmsrepro.report.cells import Arm, Cell

COLOURS = {
    "layernorm": "#0072B2",
    "rmsnorm": "#D55E00",
    "prmsnorm": "#009E73",
    "none": "#808080",
    "layernorm_nobias": "#56B4E9",
    "l2norm": "#CC79A7",
    "batchnorm": "#E69F00",
    "weightnorm": "#8C6BB1",
    "scalenorm": "#4D8C00",
    "crmsnorm": "#A05A2C",
    "dyt": "#17A2B8",
    "llama_rmsnorm": "#B8336A",
    "mistral_rmsnorm": "#E377A2",
    "qwen_rmsnorm": "#7A4419",
    "t5_rmsnorm": "#5C6BC0",
    "gemma_rmsnorm": "#9E9D24",
}
"""One a norm, in every figure: first Okabe and Ito's, which stay apart for colour-blind readers."""

SPARE_COLOURS = ("#A6761D", "#66A61E", "#E7298A", "#1B9E9E", "#7570B3", "#B15928")
SYMBOLS = {"layernorm": "circle", "rmsnorm": "square", "prmsnorm": "diamond", "none": "x"}
DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True, eq=False)
class Figure:
    """A figure with the words around it."""

    key: str
    """Unique in the page; letters, digits and dashes."""
    title: str
    figure: go.Figure
    height: int
    """CSS pixels."""


def safe(text: object) -> str:
    """Escape a record's text for plotly's labels."""
    return html.escape(str(text), quote=False)  # plotly shows &quot; as it stands


def colour(norm: str) -> str:
    """A norm's colour, the same in every report; a plug-in's is drawn from its name."""
    if norm in COLOURS:
        return COLOURS[norm]
    digest = hashlib.sha256(norm.encode(errors="backslashreplace")).digest()
    return SPARE_COLOURS[digest[0] % len(SPARE_COLOURS)]


def blank(*, height: int) -> go.Figure:
    """An empty figure of a height in CSS pixels, transparent and without a theme."""
    return go.Figure(
        layout={
            "template": {},
            "height": height,
            "margin": {"l": 56, "r": 16, "t": 26, "b": 48},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"size": 12},
            "legend": {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"},
            "xaxis": {"title": {"font": {"size": 12}, "standoff": 8}, "automargin": True},
            "yaxis": {"title": {"font": {"size": 12}, "standoff": 8}, "automargin": True},
            "hovermode": "closest",
            "dragmode": "zoom",
        }
    )


def log_ticks(low: float, high: float) -> list[float]:
    """Places for the ticks of a logarithmic axis from low to high: 1, 2 and 5, or decades alone if many.

    None where there is no such axis, as from zero.
    """
    if not 0 < low <= high < math.inf:
        return []
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if last - first <= 3 else (1,)
    every = 1 + (last - first) // 10
    return [float(f"{step}e{power}") for power in range(first, last + 1, every) for step in steps]


def style_of(cell: Cell, arm: Arm) -> dict[str, str]:
    """Colour and symbol by norm; siblings of one norm (other parameters) differ in their dash."""
    siblings = [other.label for other in cell.arms if other.norm == arm.norm]
    place = siblings.index(arm.label) if arm.label in siblings else 0
    return {
        "color": colour(arm.norm),
        "symbol": SYMBOLS.get(arm.norm, "circle"),
        "dash": DASHES[place % len(DASHES)],
    }


def translucent(hex_colour: str, alpha: float) -> str:
    """`#rrggbb` with an opacity, as CSS writes it."""
    red, green, blue = (int(hex_colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def narrow(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Single precision: enough for a pixel, half the size of the page."""
    with np.errstate(over="ignore"):
        return np.where(np.isfinite(values), values, np.nan).astype(np.float32)


def error_bars(middle: float, low: float, high: float) -> dict[str, Any]:
    """Plotly's error bars of an interval; an end that is unknown has none."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [reach(high - middle)],
        "arrayminus": [reach(middle - low)],
        "thickness": 2,
        "width": 5,
    }


def reach(value: float) -> float:
    """The length of an error bar; 0 for one that is unknown or none."""
    return value if math.isfinite(value) and value > 0 else 0.0
