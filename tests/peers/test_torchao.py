"""8-bit state has the bits of torchao's, on rows of whole blocks: pip install '.[peers]'.

torchao's blocks run on over the ends of rows, and its scales have a floor; here they do not. What codes and scales must
be without torchao is proved in tests/ops/test_low_bit.py.
"""

import pytest
import torch

from functitan import optim

pytest.importorskip("torchao")


@pytest.mark.parametrize("format", ["int8", "uint8", "float8"])
def test_codes_scales_and_numbers_are_torchaos(format):
    from torchao.optim import quant_utils
    from torchao.optim.subclass_fp8 import quantize_fp8

    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 3, 64)[:, None]
    x = x.square() if format == "uint8" else x
    found = optim.quantize(x, format, 256)
    if format == "float8":
        codes, scales = quantize_fp8(x, 256)
        numbers = (codes.float().view(-1, 256) * scales.view(-1, 1)).view(x.shape)
    else:
        table = torch.tensor(quant_utils.create_dynamic_map(signed=format == "int8"))
        scaled, scales = quant_utils.scale_tensor(x, 256)
        codes = quant_utils.quantize_8bit_with_qmap(scaled, table)
        numbers = quant_utils.dequant_with_qmap(codes, table, scales)
    assert torch.equal(found.codes.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found.scales, scales.view(64, 2))
    assert torch.equal(optim.dequantize(found), numbers)
