"""Faults of recurrent models, met in practice: B19, B20, B21."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from rmsrepro.config.schema import Site
from rmsrepro.models.gru import GRULayer
from rmsrepro.norms import NormSpec
from tests.cli.running import Ran, records
from tests.models.norms import MASKED, PLAIN
from tests.norms.conftest import Arm, skip_without
from tests.practice.arms import EVERYWHERE, inputs, mean_loss, model, name, skip_where_lacking

Run = Callable[..., Ran]
pytestmark = pytest.mark.usefixtures("users_norms_registered")
everywhere = pytest.mark.parametrize("arm", EVERYWHERE, ids=name)
RNNSEARCH = {"kind": "gru"}


def copy_gru(layer: GRULayer, reference: nn.GRUCell) -> None:
    """Give our layer the weights of torch's cell, whose state has biases of its own."""
    split = 2 * layer.dim
    assert layer.gates_h_bias is not None
    assert layer.candidate_h_bias is not None
    with torch.no_grad():
        layer.input_projection.weight.copy_(reference.weight_ih)
        layer.input_projection.bias.copy_(reference.bias_ih)
        layer.recurrent_projection.weight.copy_(reference.weight_hh)
        layer.gates_h_bias.copy_(reference.bias_hh[:split])
        layer.candidate_h_bias.copy_(reference.bias_hh[split:])


@everywhere
def test_an_empty_sentence_among_others(arm: Arm) -> None:
    """B19: packing refuses a length of 0; here it is a state that no token has moved."""
    skip_where_lacking(arm)
    built = model(arm, "translation", RNNSEARCH).double().eval()
    source, mask, target = inputs("translation", [3, 0, 2], 3)
    logits = built(source, mask, target)
    mean_loss(logits, target).backward()
    assert logits.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in built.parameters())
    kept = torch.tensor([0, 2])
    torch.testing.assert_close(logits[kept], built(source[kept], mask[kept], target[kept]), atol=1e-9, rtol=0)


@pytest.mark.parametrize("kind", ["gru", "transformer"])
@pytest.mark.parametrize("norm", ["none", "rmsnorm"])
def test_a_corpus_with_blank_sources_trains(cli: Run, kind: str, norm: str) -> None:
    """B19: the same from files: blank lines in every split are dropped with their partners, and counted."""
    pairs = [("one two", "eins zwei"), ("", "leer"), ("three", "drei"), (" \t", "auch leer"), ("two", "zwei")]
    for part in ("train", "val", "test"):
        for number, side in enumerate(("src", "tgt")):
            Path(f"{part}.{side}").write_text("".join(pair[number] + "\n" for pair in pairs * 4))
    files = [
        f"data.{part}_{side}={part}.{side}" for part in ("train", "val", "test") for side in ("src", "tgt")
    ]
    ran = cli(
        "train", "debug=fast", "task=translation", "data=parallel_files", *files, "data.tokenizer=char",
        "data.max_len=16", "data.batch_tokens=64", f"model={kind}", "model.d_model=16", f"norm={norm}",
        "trainer.max_steps=2", "task.max_decode_len=6",
    )  # fmt: skip
    assert ran.code == 0, ran.out
    [(run_id, record)] = records().items()
    assert record["status"] == "completed"
    folder = Path("outputs/runs", run_id)
    for counts in json.loads((folder / "data.json").read_text())["splits"].values():
        assert (counts["pairs_read"], counts["pairs"], counts["dropped"]["blank"]) == (20, 12, 8)
    assert (folder / "hypotheses_test.txt").read_text().count("\n") == 12


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("backend", ["composite", "fused"])
def test_cells_of_the_decoder_are_torchs(backend: str, dtype: torch.dtype, atol: float) -> None:
    """B20: the reset gate before or after the product; the loops that make one step at a time, too."""
    if backend == "fused":
        skip_without(backend)
    torch.manual_seed(0)
    cell = nn.GRUCell(5, 7).to(dtype)
    nn.init.normal_(cell.bias_ih)
    nn.init.normal_(cell.bias_hh)
    layer = GRULayer(5, 7, NormSpec("none", backend=backend), tuple(Site)).to(dtype)
    copy_gru(layer, cell)
    xs = [torch.randn(4, 3, 5, dtype=dtype).requires_grad_()]
    xs.append(xs[0].detach().clone().requires_grad_())
    found = []
    for x, theirs in ((xs[0], False), (xs[1], True)):
        h = torch.linspace(-1, 1, 21, dtype=dtype).view(3, 7)
        states = []
        if theirs:
            for now in x:
                h = cell(now, h)
                states.append(h)
        else:
            _, rows, step = layer.for_inputs(x)
            for now in rows:
                h = step(now, h, None)
                states.append(h)
        stacked = torch.stack(states)
        (stacked * torch.linspace(-1, 1, stacked.numel(), dtype=dtype).view(stacked.shape)).sum().backward()
        found.append((stacked.detach(), x.grad))
    torch.testing.assert_close(found[0][0], found[1][0], atol=atol, rtol=0)
    torch.testing.assert_close(found[0][1], found[1][1], atol=atol, rtol=0)
    h = torch.linspace(-1, 1, 21, dtype=dtype).view(3, 7)
    by_state = layer.for_states(h)
    torch.testing.assert_close(by_state(xs[0][0], h, None), cell(xs[0][0], h), atol=atol, rtol=0)


@pytest.mark.parametrize("backend", ["composite", "fused"])
def test_both_directions_of_the_encoder_are_torchs(backend: str) -> None:
    """B20: the encoder of RNNSearch without norms against torch's bidirectional GRU, in fp64."""
    if backend == "fused":
        skip_without(backend)
    built = model(Arm("none", backend), "translation", RNNSEARCH).double()
    reference = nn.GRU(12, 16, bidirectional=True).double()
    torch.manual_seed(1)
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=0.4)
    for layers, suffix in (
        (built.encoder.forward_layers, "l0"),
        (built.encoder.backward_layers, "l0_reverse"),
    ):
        cell = nn.GRUCell(12, 16).double()
        for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            getattr(cell, part).data.copy_(getattr(reference, f"{part}_{suffix}"))
        copy_gru(layers[0], cell)
    x = torch.randn(5, 3, 12, dtype=torch.float64)
    torch.testing.assert_close(built.encoder(x, None), reference(x)[0], atol=1e-10, rtol=0)


@pytest.mark.parametrize("arm", [*EVERYWHERE, Arm(PLAIN, "composite"), Arm(MASKED, "composite")], ids=name)
def test_states_keep_their_dtype(arm: Arm) -> None:
    """B21: the state drifts to another dtype than its inputs, step after step, in any loop of both models."""
    skip_where_lacking(arm)
    dtype = torch.bfloat16
    layer = GRULayer(5, 8, NormSpec(arm.norm, backend=arm.backend), tuple(Site))
    x, h = torch.randn(4, 3, 5), torch.zeros(3, 8)
    with torch.autocast("cpu", dtype=dtype):
        states = layer(x, h)
        kept, rows, step = layer.for_inputs(x)
        assert states.dtype == kept == dtype
        now = h.to(kept)
        for row in rows:
            now = step(row, now, None)
            assert now.dtype == dtype
        now = layer.for_states(now)(x[0], now, None)
    assert now.dtype == dtype
    assert states.isfinite().all()
    assert now.isfinite().all()
    built = model(arm, "translation", RNNSEARCH)
    source, mask, target = inputs("translation", [4, 2], 4)
    with torch.autocast("cpu", dtype=dtype):
        state = built.start(source, mask)
        for position in range(3):
            logits, state = built.step(target[:, position], state)
            assert (logits.dtype, state.hidden.dtype) == (dtype, dtype)


@pytest.mark.parametrize(
    ("verb", "precision"),
    [("train", "16-mixed"), ("train", "bf16-true"), ("sweep", "16-mixed"), ("bench", "bf16-true")],
)
def test_a_precision_that_is_not_offered_starts_nothing(cli: Run, verb: str, precision: str) -> None:
    """B21: refused with the key and what there is, before anything is read or written."""
    lists = ["norm=layernorm,rmsnorm"] if verb != "train" else []
    ran = cli(verb, "model=gru", *lists, f"precision={precision}")
    text = ran.out + ran.err
    assert f"precision={precision}: not supported" in text
    assert "bf16-mixed" in text
    assert ran.code == (1 if verb == "sweep" else 2)
    assert not any(record["status"] != "failed" for record in records().values())
