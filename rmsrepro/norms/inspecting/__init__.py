"""Inspecting a whole model: which layers normalise, and how.

    walking.py    which submodules are probed, and with what width
    running.py    a copy of the model on inputs: which norms are called
    tracing.py    normalisations that are no submodules: torch's functions and operations
    following.py  and those written out
    comparing.py  against a norm of `rmsrepro.norms`, and among themselves
    remarks.py    what deserves attention anyway
    wording.py    all this in words
    grouping.py   names of many layers in one
    report.py     what was found

Begin with `inspect_model`.
"""

from rmsrepro.norms.inspecting.comparing import compare, mixtures
from rmsrepro.norms.inspecting.remarks import remarks
from rmsrepro.norms.inspecting.report import Call, Inspection, Layer
from rmsrepro.norms.inspecting.walking import inspect_model
from rmsrepro.norms.inspecting.wording import Remark

__all__ = ["Call", "Inspection", "Layer", "Remark", "compare", "inspect_model", "mixtures", "remarks"]
