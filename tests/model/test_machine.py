import pytest
import torch

from rollyard.model.machine import measure


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_machine_is_measured_in_a_moment(kind: str) -> None:
    machine = measure(kind, torch.float32)
    assert 1e8 < machine.flops_per_s < 1e15 and 1e8 < machine.bytes_per_s < 1e14
    assert machine.balance == machine.flops_per_s / machine.bytes_per_s
