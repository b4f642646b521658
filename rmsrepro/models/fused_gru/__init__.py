"""A GRU with kernels for everything but its products: the form of `GRULayer` whose norms are fused ones.

    plan.py      what the four sites compute, and whether a layer and its inputs can be taken
    product.py   the product with the state's weights, by one of several ways
    sequence.py  the whole sequence, forwards and backwards
    cell.py      one step, for loops of other kinds
    composed.py  the same in primitive operations, for gradients that are differentiated again

A step is one product and one pass over the rows, which does the norms of both sides, the gates and the
new state. The pass reads the raw product with the input, and backwards writes its gradient: no norm goes
over all steps by itself. Backwards is one pass and one product a step as well; the gradients of the weights
are products over many steps at once.
"""

from __future__ import annotations

from rmsrepro.models.fused_gru.cell import cell
from rmsrepro.models.fused_gru.plan import Fused, fused, fused_for
from rmsrepro.models.fused_gru.product import chosen_form
from rmsrepro.models.fused_gru.sequence import scan

__all__ = ["Fused", "cell", "chosen_form", "fused", "fused_for", "scan"]
