"""Probing one module with inputs: whether it is a norm, and what it does.

    finding.py    what a probe finds out
    subject.py    a copy of the module that can be called on rows
    affine.py     which parameter is the gain and which the bias
    core.py       what is left without them: a map of rows
    rows.py       what is subtracted from a row and what it is divided by
    smallness.py  eps, from rows of many scales
    halves.py     half precision, rows of zeros
    dimensions.py which dimensions of an input share a statistic
    probe.py      all of it together

Begin with `probe`.
"""

from rmsrepro.norms.probing.finding import Eps, EpsPosition, Finding, Gain, Kind, NotANorm, Over
from rmsrepro.norms.probing.probe import probe

__all__ = ["Eps", "EpsPosition", "Finding", "Gain", "Kind", "NotANorm", "Over", "probe"]
