"""A norm's card: its properties, measured.

    subject.py     the norm that is measured: fresh modules, and what its values are compared with
    drawing.py     the numbers that it is given
    lifting.py     the norm's casts to fp32 undone, for a reference of norms that compute in fp32 inside
    result.py      what a check says
    numerics.py    checks of values: agreement with float64, derivatives
    extremes.py    checks where numbers are coarse, many, zero, very small or very large
    rows.py        checks of shapes, of rows beside each other, and of evaluation beside training
    behaviour.py   checks of a module: memory, torch.compile, torch.export, saving and copying
    invariance.py  Table 1 of the paper by measurement
    gradients.py   what the invariances say about gradients
    counting.py    operations and bytes of the operations that really run
    epsilon.py     where settings of eps part
    card.py        all of it for one norm, and its JSON

`rmsrepro check-norm NAME` prints a card; `make_card` makes one. Everything here imports torch.
"""

from rmsrepro.norms.card.card import Card, make_card
from rmsrepro.norms.card.result import Check, Status
from rmsrepro.norms.card.subject import Subject

__all__ = ["Card", "Check", "Status", "Subject", "make_card"]
