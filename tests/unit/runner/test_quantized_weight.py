import torch

from baton.runner.backends.quantized_weight import QuantizedWeight


def test_a_code_means_scale_times_its_distance_from_zero_plus_the_offset() -> None:
    weight = QuantizedWeight(
        codes=torch.tensor([[0, 1, 14, 15]], dtype=torch.uint8),
        bits=4,
        group=2,
        scales=torch.tensor([[0.5, 2.0]], dtype=torch.float16),
        zeros=8,
        offsets=torch.tensor([[0.0, 1.0]], dtype=torch.float16),
    )
    assert weight.dequantized().tolist() == [[-4.0, -3.5, 13.0, 15.0]]


def test_nested_scales_and_offsets_are_multiplied_by_the_factor_of_their_groups() -> None:
    weight = QuantizedWeight(
        codes=torch.tensor([[1, 1, 1, 1]], dtype=torch.uint8),
        bits=8,
        group=1,
        scales=torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8),
        scale_factors=torch.tensor([[1.0, 10.0]], dtype=torch.float16),
        offsets=torch.tensor([[1, 1, 2, 2]], dtype=torch.uint8),
        offset_factors=torch.tensor([[-0.5, -100.0]], dtype=torch.float16),
    )
    assert weight.dequantized().tolist() == [[0.5, 1.5, -170.0, -160.0]]


def test_every_group_may_have_a_zero_of_its_own() -> None:
    weight = QuantizedWeight(
        codes=torch.tensor([[7, 7]], dtype=torch.uint8),
        bits=4,
        group=1,
        scales=torch.tensor([[1.0, 1.0]]),
        zeros=torch.tensor([[7, 5]], dtype=torch.uint8),
    )
    assert weight.dequantized(torch.float64).tolist() == [[0.0, 2.0]]
