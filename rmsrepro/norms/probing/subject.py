"""A copy of a module that can be called on rows, whatever shape and dtype it wants."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class NotCallable(Exception):
    """The module does not map rows to rows; the message says why."""


@dataclass(frozen=True)
class Layout:
    """How rows (R, n) are handed to a module."""

    name: str
    spread: Callable[[Tensor, Sequence[int]], Tensor]
    """(R, n), the shape of a row -> the module's input."""
    gather: Callable[[Tensor, Tensor], Tensor]
    """The module's output, the rows -> (R, n)."""


def _back(y: Tensor, rows: Tensor) -> Tensor:
    return y.reshape(rows.shape)


ROW_LAYOUTS = (
    Layout("rows", lambda x, shape: x.reshape(-1, *shape), _back),
    Layout("sequence", lambda x, shape: x.reshape(1, -1, *shape), _back),
    Layout("images", lambda x, shape: x[..., None, None], _back),
    Layout("volumes", lambda x, shape: x[..., None, None, None], _back),
)
POSITION_LAYOUTS = (
    Layout("voxels", lambda x, shape: x.t()[None, :, :, None, None], lambda y, rows: y[0, :, :, 0, 0].t()),
    Layout("pixels", lambda x, shape: x.t()[None, :, :, None], lambda y, rows: y[0, :, :, 0].t()),
    Layout("positions", lambda x, shape: x.t()[None], lambda y, rows: y[0].t()),
)
"""Channels first, the rows as positions of one sample: what InstanceNorm wants. Most dimensions first, since
such modules take one dimension less for a sample without a batch."""
LAYOUTS = (*ROW_LAYOUTS, *POSITION_LAYOUTS)
"""In the order in which they are tried."""


class Subject:
    """A private copy of a module, its hooks gone and its dropout off, as a function of rows.

    Args:
        module: stays as it is.
        row_shape: the shape of one row; a norm over several trailing dimensions has several.
        dtype: of the copy's parameters and of what it is given.
        layouts: how rows may be handed over; the first that the module takes is kept.
        training: whether it is called in training mode.
        like: a copy of the same module whose present values this one takes over.

    Raises:
        NotCallable: the module cannot be copied, or maps rows to something else.
    """

    def __init__(
        self,
        module: nn.Module,
        row_shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float64,
        layouts: Sequence[Layout] = LAYOUTS,
        training: bool = False,
        like: Subject | None = None,
    ) -> None:
        self.original = module
        self.row_shape = tuple(row_shape)
        self.dtype = dtype
        self.training = training
        self.module = private_copy(module).to(dtype)
        tensors = [*self.module.parameters(), *self.module.buffers()]
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self.overwrites = False
        if like is not None:
            self.copy_values(like)
        self._kept = {name: one.clone() for name, one in self.module.named_buffers()}
        self.layout = self._first_layout(layouts)

    @property
    def width(self) -> int:
        return torch.Size(self.row_shape).numel()

    def again(self, *, dtype: torch.dtype | None = None, training: bool | None = None) -> Subject:
        """Return another copy with this one's present values.

        Raises:
            NotCallable: as when made.
        """
        return Subject(
            self.original,
            self.row_shape,
            dtype=self.dtype if dtype is None else dtype,
            layouts=[self.layout],
            training=self.training if training is None else training,
            like=self,
        )

    def __call__(self, rows: Tensor) -> Tensor:
        """Map rows (R, n) to (R, n), both float64; no gradient, and the same random numbers each time.

        Raises:
            NotCallable: the module raised, or returned something else.
        """
        return self._plain(rows, 0)

    def _plain(self, rows: Tensor, seed: int) -> Tensor:
        with torch.no_grad():
            return self.raw(rows.to(self.device, self.dtype), seed=seed).to("cpu", torch.float64)

    def raw(self, rows: Tensor, *, seed: int = 0) -> Tensor:
        """As calling, but in the dtype given and with gradients.

        Raises:
            NotCallable: see `__call__`.
        """
        x = self.layout.spread(rows, self.row_shape).clone()
        before = x.detach().clone()
        self.module.train(self.training)
        torch.default_generator.manual_seed(seed)
        try:
            y = self.module(x)
        except (Exception, SystemExit) as error:  # whatever a user's module raises
            raise NotCallable(f"{type(error).__name__}: {error}") from error
        finally:
            self._restore_buffers()
        if not isinstance(y, Tensor) or y.shape != before.shape or not y.is_floating_point():
            raise NotCallable("it does not map a tensor to one of the same shape")
        same = torch.equal(torch.nan_to_num(x.detach()), torch.nan_to_num(before))
        self.overwrites = self.overwrites or not same
        return self.layout.gather(y, rows)

    def tensors(self) -> dict[str, Tensor]:
        """The copy's parameters and floating buffers by name, to be read and written."""
        named = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        return {name: one.data for name, one in named.items() if one.is_floating_point()}

    def set_values(self, name: str, values: Tensor | float) -> None:
        """Write a parameter or buffer of the copy."""
        target = self.tensors()[name]
        target.copy_(torch.as_tensor(values, dtype=target.dtype, device=target.device).expand_as(target))
        if name in self._kept:
            self._kept[name].copy_(target)

    def copy_values(self, other: Subject) -> None:
        """Take over another copy's parameters and buffers."""
        values = other.tensors()
        for name, one in self.tensors().items():
            one.copy_(values[name])

    def _restore_buffers(self) -> None:
        # Only what changed: writing a tensor that autograd has kept would spoil a backward pass.
        with torch.no_grad():
            for name, one in self.module.named_buffers():
                if name in self._kept and not torch.equal(one, self._kept[name]):
                    one.copy_(self._kept[name])

    def _first_layout(self, layouts: Sequence[Layout]) -> Layout:
        reason = "it takes no rows"
        generator = torch.Generator().manual_seed(1)
        rows = torch.randn(8, self.width, generator=generator, dtype=torch.float64)
        for layout in layouts:
            if len(self.row_shape) > 1 and layout.name not in ("rows", "sequence"):
                continue
            self.layout = layout
            try:
                first, second = (self._plain(rows, seed) for seed in (0, 1))
            except NotCallable as error:
                reason = str(error) if layout is layouts[0] else reason
                continue
            if torch.equal(torch.nan_to_num(first), torch.nan_to_num(second)):
                return layout
            reason = "it gives another output each time"
        raise NotCallable(reason)


def private_copy(module: nn.Module) -> nn.Module:
    """Return a deep copy on a device that holds values, without hooks, without dropout.

    Parameters of the meta device have no values and are drawn at random.

    Raises:
        NotCallable: it cannot be copied.
    """
    try:
        copied = copy.deepcopy(module)
        if any(one.is_meta for one in (*copied.parameters(), *copied.buffers())):
            copied = copied.to_empty(device="cpu")
            for one in (*copied.parameters(), *copied.buffers()):
                one.data = torch.rand(one.shape, dtype=torch.float32).to(one.dtype) + 0.5
    except (Exception, SystemExit) as error:  # a user's __deepcopy__, a lock, a lazy parameter
        raise NotCallable(f"it cannot be copied: {type(error).__name__}: {error}") from error
    for part in copied.modules():
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks):
            hooks.clear()
        part._compiled_call_impl = None
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
    for parameter in copied.parameters():
        if parameter.is_leaf:  # those of a scripted module's copy are none
            parameter.requires_grad_(False)
    return copied


@contextmanager
def undisturbed() -> Iterator[None]:
    """Leave torch's random state and the warnings' filters as they were."""
    import warnings

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
