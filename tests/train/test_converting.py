"""Converted weights are the same numbers: quantised weights as their publishers read them, pickled ones as torch."""

import json
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwright.cli.main import cli
from shardwright.config.base import PlanError
from shardwright.train.checkpoint.released_weights import ReleasedWeights
from shardwright.train.checkpoint.starting_weights import released_weights_of
from support import released_models
from train.test_released_models import job_of


def convert(*words: str) -> Result:
    """The command, whose errors come through."""
    return CliRunner().invoke(cli, ["convert", *words], catch_exceptions=False)


def folder_with(folder: Path, tensors: dict[str, Tensor], **keys: object) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **keys}))
    return folder


def test_mxfp4_is_read_as_its_publisher_reads_it(tmp_path: Path) -> None:
    """A tiny gpt-oss whose experts are packed: refused to train, and once converted what transformers makes of it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    released_models.save_released("gpt_oss", tmp_path / "plain")
    tensors, generator = load_file(tmp_path / "plain" / "model.safetensors"), torch.Generator().manual_seed(3)
    wanted = {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num, across, rows = tensors.pop(name).shape
        across = -(-across // 32) * 32
        blocks = torch.randint(0, 256, (num, rows, across // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(115, 125, (num, rows, across // 32), dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        wanted[name] = convert_moe_packed_tensors(blocks, scales)
    keys = json.loads((tmp_path / "plain" / "config.json").read_text()) | {"intermediate_size": 64}
    packed = tmp_path / "packed"
    packed.mkdir()
    for name in [name for name in tensors if name.endswith("gate_up_proj_bias")]:
        tensors[name] = torch.zeros(len(tensors[name]), 128)
    for name in [name for name in wanted if name.endswith("gate_up_proj")]:
        num, _, across, _ = tensors[f"{name}_blocks"].shape
        blocks = torch.randint(0, 256, (num, 128, across, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(115, 125, (num, 128, across), dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        wanted[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, packed / "model.safetensors")
    (packed / "config.json").write_text(json.dumps(keys | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(PlanError, match=r"are quantised \(MXFP4\); run shardwright convert .*packed --to OUT"):
        released_weights_of(job_of(packed))
    out = tmp_path / "out"
    assert convert(str(packed), "--to", str(out)).output.endswith(f"in {out}\n")
    results = load_file(out / "model.safetensors")
    assert all(torch.equal(results[name], values) for name, values in wanted.items())
    assert not [name for name in results if name.endswith(("_blocks", "_scales"))]
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert isinstance(released_weights_of(job_of(out)), ReleasedWeights)


@pytest.mark.parametrize(("shape", "grid"), [((6, 8), (1,)), ((6, 8), (6, 1)), ((10, 7), (3, 2)), ((300, 260), (3, 3))])
def test_fp8_is_its_values_times_the_scale_of_its_block(
    shape: tuple[int, int], grid: tuple[int, ...], tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(grid, generator=generator) + 0.5
    end = "_scale" if len(grid) == 1 or grid == (6, 1) else "_scale_inv"
    source = folder_with(tmp_path / "in", {"w.weight": values, f"w.weight{end}": scales}, quantization_config={})
    convert(str(source), "--to", str(tmp_path / "out"), "--dtype", "float32")
    result = load_file(tmp_path / "out" / "model.safetensors")
    assert list(result) == ["w.weight"]
    blocks = [2 ** math.ceil(math.log2(size / num)) if 1 < num < size else size // num
              for size, num in zip(shape, grid, strict=False)]  # fmt: skip
    for row in range(0, shape[0], 5):
        for column in range(shape[1]):
            at = (0,) if grid == (1,) else (row // blocks[0], column // blocks[1])
            assert float(result["w.weight"][row, column]) == float(values[row, column].float() * scales[at])


def test_what_is_no_plain_number_is_refused(tmp_path: Path) -> None:
    alone = folder_with(tmp_path / "alone", {"a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)})
    with pytest.raises(PlanError, match=r"a\.weight is of F8_E4M3, and no tensor beside it says its scales"):
        convert(str(alone), "--to", str(tmp_path / "out"))
    packed = {"a.qweight": torch.ones(4, 4, dtype=torch.int32), "b.weight": torch.ones(3, dtype=torch.int8)}
    with pytest.raises(PlanError) as refused:
        convert(str(folder_with(tmp_path / "gptq", packed)), "--to", str(tmp_path / "out"))
    (fault,) = refused.value.faults
    assert "2 tensors of integers stand for weights" in fault and "a.qweight, b.weight" in fault
    odd = {"a.weight": torch.ones(10, 4).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(7, 1)}
    with pytest.raises(PlanError, match="are no blocks of"):
        convert(str(folder_with(tmp_path / "odd", odd)), "--to", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_pickled_files_become_safetensors(tmp_path: Path) -> None:
    """Of two files with an index; what a file names is not called."""
    source = tmp_path / "in"
    source.mkdir()
    weights = {"a.weight": torch.randn(5, 3), "b.bias": torch.arange(4.0).bfloat16(), "positions": torch.arange(6)}
    names = {name: f"pytorch_model-{1 + (name == 'b.bias')}.bin" for name in weights}
    for file in set(names.values()):
        torch.save({name: w for name, w in weights.items() if names[name] == file}, source / file)
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    (source / "config.json").write_text(json.dumps({"model_type": "gpt2", "torch_dtype": "float32"}))
    (source / "tokenizer.json").write_text("{}")
    answer = convert(str(source), "--to", str(tmp_path / "out"), "--dtype", "bf16", "--json").output
    result = load_file(tmp_path / "out" / "model.safetensors")
    assert json.loads(answer)["bytes"] == sum(tensor.nbytes for tensor in result.values())
    assert torch.equal(result["positions"], weights.pop("positions"))
    assert all(torch.equal(result[name], w.bfloat16()) for name, w in weights.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    torch.save({"a.weight": Path("x")}, source / "pytorch_model-1.bin")  # torch knows some harmless classes
    with pytest.raises(PlanError, match=r"pytorch_model-1\.bin (can't be read as weights alone|is no dict)"):
        convert(str(source), "--to", str(tmp_path / "again"))
    (source / "pytorch_model-1.bin").write_bytes(b"\x80\x02garbage")
    with pytest.raises(PlanError, match=r"pytorch_model-1\.bin can't be read as weights alone"):
        convert(str(source), "--to", str(tmp_path / "again"))
