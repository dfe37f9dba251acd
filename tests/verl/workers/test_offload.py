"""Offloading, with the meta device in the place of a GPU: what is moved there is seen to be there."""

from __future__ import annotations

import torch
from torch import nn

from verl.workers.offload import Residence, move_optimizer, optimizer_on_device

DEVICE = torch.device("meta")


class Traveller(nn.Linear):
    """Notes where it is sent: a tensor cannot come back from the meta device."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.places: list[str] = []

    def to(self, device: torch.device | str) -> Traveller:  # type: ignore[override]
        self.places.append(str(device))
        return self


def test_a_module_is_on_the_device_only_while_it_is_used_however_uses_are_nested():
    module = Traveller()
    residence = Residence(module, DEVICE, offload_module=True)
    assert module.places == ["cpu"]
    with residence.module_on_device():
        with residence.module_on_device():
            pass
        assert module.places == ["cpu", "meta"]
    assert module.places == ["cpu", "meta", "cpu"]


def test_a_module_that_is_not_offloaded_never_moves():
    module = nn.Linear(2, 2, device=DEVICE)
    with Residence(module, DEVICE, offload_module=False).module_on_device():
        assert module.weight.device == DEVICE
    assert module.weight.device == DEVICE


def test_on_a_cpu_nothing_moves():
    module = nn.Linear(2, 2)
    weight = module.weight.data_ptr()
    with Residence(module, torch.device("cpu"), offload_module=True).module_on_device():
        assert module.weight.data_ptr() == weight
    assert module.weight.data_ptr() == weight


def stepped_optimizer() -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    parameter.grad = torch.ones(3)
    optimizer.step()
    return optimizer


def devices(optimizer: torch.optim.Optimizer) -> set[str]:
    return {tensor.device.type for state in optimizer.state.values() for tensor in state.values()}


def test_every_tensor_of_an_optimizers_state_moves():
    optimizer = stepped_optimizer()
    assert devices(optimizer) == {"cpu"}
    move_optimizer(optimizer, DEVICE)
    assert devices(optimizer) == {"meta"}


def test_an_optimizers_state_stays_where_it_is_unless_offloaded():
    optimizer = stepped_optimizer()
    with optimizer_on_device(optimizer, DEVICE, offload=False):
        assert devices(optimizer) == {"cpu"}
    with optimizer_on_device(optimizer, torch.device("cpu"), offload=True):
        assert devices(optimizer) == {"cpu"}
