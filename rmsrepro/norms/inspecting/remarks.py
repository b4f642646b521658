"""What a reader should know of a model's norms, whatever norm it should have."""

from __future__ import annotations

from rmsrepro.norms.inspecting.comparing import differences
from rmsrepro.norms.inspecting.report import Call, Inspection, Layer
from rmsrepro.norms.inspecting.wording import (
    Remark,
    call_mean,
    call_phrase,
    gather,
    join,
    mean_phrase,
    subtracts_whole_mean,
)
from rmsrepro.norms.probing import EpsPosition, Finding

GRADIENT_TOLERANCE = 0.05
"""bf16 itself rounds to 0.4 %; adding up in it loses much more."""


def remarks(inspection: Inspection) -> list[Remark]:
    """Return what deserves attention: norms that are not called, half precision, zero rows, odd ones out."""
    found: list[tuple[Layer | Call, str]] = [(call, _of_call(call)) for call in inspection.calls]
    found += [
        (layer, f"is never called in {join(layer.never_called, last='or')}")
        for layer in inspection.layers
        if layer.never_called
    ]
    # What is computed comes before what rounding makes of it.
    for kind in (_unusual, _pitfalls, _of_dtypes):
        found += [(layer, text) for layer in inspection.layers for text in kind(layer.finding)]
    return gather(found)


def _unusual(one: Finding) -> list[str]:
    texts = []
    if one.subtracts_mean and not subtracts_whole_mean(one):
        texts.append(mean_phrase(one))
    if one.adds_constant:
        texts.append("adds something that is no parameter of it")
    if one.fixed_gain:
        texts.append("multiplies its entries by numbers that are no parameter of it")
    if one.eps.position is EpsPosition.other:
        texts.append("damps small rows in a way that is neither eps inside nor outside the root")
    if one.eps.float64_value is not None:
        texts.append(
            f"has an eps that depends on the dtype: {one.eps.value:.3g} in fp32, "
            f"{one.eps.float64_value:.3g} in float64"
        )
    if one.differs_in_training:
        other = [] if one.in_training is None else differences(one.in_training, one, "evaluation")
        what = f": in training it {', '.join(other)}" if other else " than in evaluation"
        texts.append(f"computes something else in training{what}")
    return texts


def _pitfalls(one: Finding) -> list[str]:
    texts = []
    if one.zero_row != "finite":
        what = {"nan": "NaN", "nan gradient": "a NaN gradient"}[one.zero_row]
        texts.append(f"gives {what} for a row of zeros")
    if one.in_place:
        texts.append("overwrites its input, and with it a residual branch")
    return texts


def _of_dtypes(one: Finding) -> list[str]:
    texts = []
    if one.half_statistics:
        texts.append("adds squares in half precision: an fp16 row of 300 goes wrong")
    if one.gain_gradient is not None and abs(one.gain_gradient - 1) > GRADIENT_TOLERANCE:
        texts.append(
            f"sums the gradient of a bf16 gain in bf16 (on the {one.device}): over 1024 rows it comes to "
            f"{one.gain_gradient:.2g} times the true one"
        )
    if one.output_dtypes.get("bf16/fp32") == "fp32":
        texts.append("returns fp32 for a bf16 input and fp32 parameters")
    return texts


def _of_call(call: Call) -> str:
    if call.function == "aten._transformer_encoder_layer_fwd":
        eps = "" if call.eps is None else f" and eps {call.eps:.3g}"
        return (
            f"is one fused operation of torch in {join(call.modes)}: a LayerNorm with bias{eps}, from the "
            "weights of its norms, whatever those are"
        )
    return f"{call_phrase(call)}, {call_mean(call)}{' and adding a bias' if call.has_bias else ''}"
