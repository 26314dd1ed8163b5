"""Torch tensors in main memory get the reference's noise."""

import io

import numpy as np
import pytest
import torch

import corrnoise as cn
from corrnoise.noise import CorrelatedNoise, Key

KEY = Key.from_bytes(bytes(range(32)))
WORKLOAD = cn.workloads.prefix_sum(20)
BISR = cn.mechanisms.bisr(WORKLOAD, num_bands=4)
BLT = cn.mechanisms.blt(WORKLOAD, cn.Participation(20, 5, 4), num_buffers=2)


@pytest.mark.parametrize("mechanism", [BISR, BLT], ids=["bisr", "blt"])
def test_float32_gets_the_bits_of_numpy(mechanism) -> None:
    torch_noise, numpy_noise = (CorrelatedNoise(mechanism, KEY, memory=m) for m in (0, 0))
    for step in range(6):
        arrays = [np.ones((30, 40), np.float32), np.ones(70_000, np.float32)]
        tensors = [torch.ones(30, 40), torch.ones(70_000)]
        numpy_noise.add_(arrays, step, 2.0, offsets=[10, 5000])
        torch_noise.add_(tensors, step, 2.0, offsets=[10, 5000])
        for array, tensor in zip(arrays, tensors, strict=True):
            assert np.array_equal(array, tensor.numpy())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients_are_added_in_float32_and_rounded_once(dtype) -> None:
    noise = CorrelatedNoise(BISR, KEY)
    grad = torch.linspace(-3, 3, 70_001).to(dtype)
    expected = (grad.float() + 0.5 * torch.from_numpy(noise.row(7, 100, 70_101))).to(dtype)
    noise.add_([grad], 7, 0.5, offsets=[100])
    assert torch.equal(grad, expected)


def test_parameters_and_mixed_dtypes_in_one_call() -> None:
    weight = torch.nn.Parameter(torch.zeros(64, 8))
    weight.grad = torch.zeros(64, 8)
    bias = torch.zeros(5, dtype=torch.bfloat16)
    noise = CorrelatedNoise(BISR, KEY)
    noise.add_([weight.grad, torch.zeros(0), bias], 3, 1.0)
    assert np.array_equal(weight.grad.numpy().ravel(), noise.row(3, 0, 512))
    assert torch.equal(bias, torch.from_numpy(noise.row(3, 512, 517)).bfloat16())
    leaf = torch.zeros(4, requires_grad=True)
    noise.add_([leaf], 3, 1.0)
    assert leaf.requires_grad
    assert np.array_equal(leaf.detach().numpy(), noise.row(3, 0, 4))


def test_the_state_goes_through_torch_save() -> None:
    noise = CorrelatedNoise(BLT, KEY)
    for step in range(4):
        noise.add_([torch.zeros(100)], step, 1.0)
    buffer = io.BytesIO()
    torch.save(noise.state_dict(), buffer)
    assert KEY.reveal() not in buffer.getvalue()
    buffer.seek(0)
    again = CorrelatedNoise(BLT, KEY)
    again.load_state_dict(torch.load(buffer, weights_only=True))
    first, second = torch.zeros(100), torch.zeros(100)
    noise.add_([first], 4, 1.0)
    again.add_([second], 4, 1.0)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("grads", "message"),
    [
        ([torch.zeros(4), torch.zeros(4, dtype=torch.int32)], r"grads\[1\] must be one of float32"),
        ([torch.zeros(4), torch.zeros(4, dtype=torch.float64)], r"grads\[1\] must be one of"),
        ([torch.zeros(4), torch.zeros(4, 4).t()[:, :2]], r"grads\[1\] must be dense and contig"),
        ([torch.zeros(4), torch.zeros(1).expand(4)], r"grads\[1\] must be dense and contig"),
        ([torch.zeros(4), torch.eye(3).to_sparse()], r"grads\[1\] must be dense and contig"),
        ([torch.zeros(4), torch.zeros(4, device="meta")], r"grads\[1\] must be on cpu"),
        ([torch.zeros(4, device="meta")], "must be on a CPU or CUDA device"),
        ([torch.zeros(4), np.zeros(4, np.float32)], "all torch tensors or all NumPy"),
        ([torch.zeros(4), None], "all torch tensors or all NumPy"),
    ],
)
def test_bad_tensors_change_nothing(grads, message) -> None:
    noise = CorrelatedNoise(BISR, KEY)
    with pytest.raises(ValueError, match=message):
        noise.add_(grads, 0, 1.0)
    assert grads[0].device.type == "meta" or not grads[0].any()
