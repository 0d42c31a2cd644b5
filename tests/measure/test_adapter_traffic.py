"""The catalog's kernels of adapters and of matrices in NF4, and the bytes of these, against a dry run's."""

import pytest
import torch

from shardwright.config.adapter_code import ADAPTER_CODE
from shardwright.config.load import load_job
from shardwright.config.software import software_of
from shardwright.cost.from_job import run_of
from shardwright.layers.chains import chains
from support.kernel_traffic import KernelTraffic, layer_kernels

pytestmark = pytest.mark.long

OWN = software_of("shardwright")
BASE = (
    *(f"model.{size}" for size in ("sequence=512", "vocab=1024", "hidden=256", "heads=8", "kv_heads=4", "ffn=640")),
    *("plan={dp=1, zero=1, microbatch_size=1}", 'precision.compute="bf16"', "cluster.software=shardwright"),
)
ADAPTED, NF4 = "model.adapter.rank=4", 'model.adapter.base="nf4"'
DOUBLE = "model.adapter.double_quantization=true"


def launched(*fields: str) -> list[int]:
    """Kernels of a layer, (forward, backward)."""
    kernels = layer_kernels(*BASE, *fields)
    return [sum(count for k, count in kernels.items() if k.backward is passes) for passes in (False, True)]


def test_kernels_of_adapters_and_of_matrices_in_nf4() -> None:
    """Of seven maps with adapters, in four matrices."""
    plain, adapted, stored = launched(), launched(ADAPTED), launched(ADAPTED, NF4)
    more = [a - b for a, b in zip(adapted, plain, strict=True)]
    assert more == pytest.approx([7 * number for number in ADAPTER_CODE[OWN.adapters].kernels], rel=0.02)
    of_matrices = [a - b for a, b in zip(stored, adapted, strict=True)]
    assert of_matrices == [4 * number for number in OWN.nf4_kernels]
    assert launched(ADAPTED, NF4, DOUBLE) == stored


@pytest.mark.parametrize("scales", [(), (DOUBLE,)], ids=["float32", "8 bits"])
def test_bytes_of_numbers_made_of_nf4(scales: tuple[str, ...]) -> None:
    """Within 3 %, the tables: what is stored is read and a number of 16 bits written, in either pass, and for each
    product once."""
    fields = (*BASE, ADAPTED, NF4, *scales)
    run = run_of(load_job("quickstart", [*fields]))
    products = [p for operator in chains(run.shape, run.grid, OWN)["dense"] for p in operator.products]
    (stored,) = {p.nf4_bytes for p in products if p.nf4_bytes}
    num_elements = 256 * (2 * 256 + 2 * 128 + 3 * 640)
    for passes in (False, True):
        kernels = [k for k in layer_kernels(*fields).elements() if k.backward is passes]
        made = [k.num_bytes for k in kernels if k.operator == "numbers_of_nf4"]
        assert len(made) == 4
        assert sum(made) / num_elements == pytest.approx(stored + 2, rel=0.03)


def test_traffic_of_peft() -> None:
    """Its own Linear under torch's autocast: what it moves beside products, by element of its input and its output."""
    peft = pytest.importorskip("peft")
    rows, inputs, outputs = 512, 256, 384
    model = torch.nn.Sequential(torch.nn.Linear(inputs, outputs, bias=False)).bfloat16().requires_grad_(False)
    adapted = peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["0"]), model)
    for name, parameter in adapted.named_parameters():
        if "lora" in name:
            parameter.data = parameter.data.float()
    x = torch.randn(rows, inputs, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), KernelTraffic() as in_forward:
        y = adapted(x)
    gradient = torch.randn_like(y)
    with KernelTraffic() as in_backward:
        y.backward(gradient)
    code = ADAPTER_CODE["peft"]
    for traffic, of_input, of_output in zip((in_forward, in_backward), code.of_input, code.of_output, strict=True):
        moved = sum(count * k.num_bytes for k, count in traffic.kernels.items() if k.operator != "mm")
        assert moved == pytest.approx(rows * (of_input * inputs + of_output * outputs), rel=0.03)
    launched = [sum(traffic.kernels.values()) for traffic in (in_forward, in_backward)]
    assert launched[0] == 1 + code.kernels[0] and launched[1] == 1 + code.kernels[1] - 2  # sums over microbatches
