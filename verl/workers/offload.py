"""Keeping a model's tensors in host memory while it rests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from verl.utils.devices import release_cached


class Residence:
    """Where a module and its optimizer's state are: on the device while they are needed, else on the host.

    What is not to be offloaded stays on the device, and on a CPU nothing ever moves.
    """

    def __init__(self, module: nn.Module, device: torch.device, *, offload_module: bool) -> None:
        self._module, self._device = module, device
        self._moves_module = offload_module and device.type != "cpu"
        self._users = 0
        self._rest()

    @contextmanager
    def module_on_device(self) -> Iterator[None]:
        """The module is on the device inside; may be nested, and only the outermost moves it."""
        if self._users == 0 and self._moves_module:
            self._module.to(self._device)
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._users == 0:
                self._rest()

    def _rest(self) -> None:
        if self._moves_module:
            self._module.to("cpu")
            release_cached(self._device)


@contextmanager
def optimizer_on_device(optimizer: torch.optim.Optimizer, device: torch.device, *, offload: bool) -> Iterator[None]:
    """The optimizer's state is on ``device`` inside, and on the host afterwards if it is to be offloaded."""
    moves = offload and device.type != "cpu"
    if moves:
        move_optimizer(optimizer, device)
    try:
        yield
    finally:
        if moves:
            move_optimizer(optimizer, torch.device("cpu"))


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move every tensor of the optimizer's state, in place."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                state[name] = value.to(device)
