#!/usr/bin/env python3
"""Makes the quantised checkpoints under crates/formats/tests/data/scaled with the packages that write such files.

    pip install torch transformers safetensors numpy compressed-tensors==0.20.0
    pip download --no-deps --no-binary :all: autoawq==0.2.9 gptqmodel==7.7.0      (unpack both)
    pip download --no-deps compressed-tensors==0.12.2                             (unpack)
    tools/scaled_goldens.py --autoawq FOLDER --gptqmodel FOLDER --ordered FOLDER

Every folder is a checkpoint of small random weights and expected.json with the weights that the package computes from
it in f32: shape, the first eight as bits, and an FNV-1a hash of all.

fp8*         weights dequantised by `transformers`; a shape that is no multiple of 128 by `compressed-tensors`
compressed*  compressed and decompressed by `compressed-tensors`; weights with an order of columns (`actorder`) by
             0.12.2 of it, because later versions no longer write them
awq          packed and dequantised by functions of `autoawq`
gptq*        packed, converted from version 2 to 1 and dequantised by functions of `gptqmodel`
mxfp4        experts of a layer in one tensor, dequantised by `transformers`

The last two packages cannot be imported without a GPU, so single functions are taken out of their sources.
"""

import __future__

import argparse
import ast
import contextlib
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import save_file

DATA = Path(__file__).resolve().parent.parent / "crates/formats/tests/data/scaled"
LAYER = "model.layers.0."


def fnv(data):
    """FNV-1a over the bytes."""
    found = 0xCBF29CE484222325
    for byte in data:
        found = ((found ^ byte) * 0x100000001B3) & ((1 << 64) - 1)
    return f"{found:016x}"


class Folder:
    """One checkpoint with what its weights must be."""

    def __init__(self, name, quantisation, field="quantization_config"):
        self.folder = DATA / name
        self.config = {"model_type": "llama", field: quantisation}
        self.tensors = {
            "model.norm.weight": torch.ones(8, dtype=torch.bfloat16),
            "lm_head.weight": torch.zeros(4, 8, dtype=torch.bfloat16),
            LAYER + "mlp.gate.weight": torch.zeros(4, 8, dtype=torch.bfloat16),
        }
        self.expected = {}

    def add(self, module, tensors, scheme, weights):
        assert weights.dtype == torch.float32 and weights.isfinite().all() and weights.abs().max() > 0
        for name, tensor in tensors.items():
            self.tensors[f"{module}.{name}"] = tensor.detach().clone().contiguous()
        data = weights.contiguous().numpy().astype("<f4")
        self.expected[f"{module}.weight"] = {
            "scheme": scheme,
            "shape": list(weights.shape),
            "head": [f"{bits:08x}" for bits in data.reshape(-1)[:8].view(np.uint32).tolist()],
            "fnv": fnv(data.tobytes()),
        }

    def write(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors, self.folder / "model.safetensors")
        for name, value in [("config", self.config), ("expected", self.expected)]:
            (self.folder / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n")


def fp8_codes(rows, cols):
    """Any bytes but the two that are not numbers."""
    codes = torch.randint(0, 256, (rows, cols), dtype=torch.uint8)
    codes[(codes & 127) == 127] = 1
    return codes.view(torch.float8_e4m3fn)


def scale(*shape, dtype=torch.float32):
    return (torch.rand(*shape) * 0.02 + 1e-4).to(dtype)


def fp8():
    from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    dequantise = Fp8Dequantize(None)._dequantize_one

    def add(folder, module, shape, scales, **more):
        codes = fp8_codes(*shape)
        weights = dequantise(codes, scales, torch.float32)
        scheme = "row" if scales.numel() == 1 else "block"
        folder.add(module, {"weight": codes, "weight_scale_inv": scales, **more}, scheme, weights)

    blocks = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    folder = Folder("fp8", {**blocks, "modules_to_not_convert": ["lm_head", LAYER + "mlp.gate"]})
    add(folder, LAYER + "self_attn.q_proj", (256, 8), scale(2, 1, dtype=torch.bfloat16))
    add(folder, LAYER + "mlp.experts.3.gate_proj", (8, 256), scale(1, 2))
    codes, scales = fp8_codes(130, 136), scale(2, 2)
    package = FP8BlockDequantizer(weight_block_size=(128, 128), dtype=torch.float32)
    weights = package._create_dequantized_weight(codes, scales)
    folder.add(LAYER + "mlp.down_proj", {"weight": codes, "weight_scale_inv": scales}, "block", weights)
    folder.write()

    folder = Folder("fp8-exponents", {**blocks, "scale_fmt": "ue8m0"})
    exponents = torch.tensor([[119, 110]], dtype=torch.uint8)
    add(folder, LAYER + "self_attn.q_proj", (8, 256), exponents.view(torch.float8_e8m0fnu))
    add(folder, LAYER + "self_attn.k_proj", (8, 256), exponents)
    folder.write()

    folder = Folder("fp8-tensor", {**blocks, "weight_block_size": None, "activation_scheme": "static"})
    add(folder, LAYER + "self_attn.q_proj", (16, 24), scale(1)[0], activation_scale=scale(1)[0])
    codes, scales = fp8_codes(8, 40), scale(1)
    tensors = {"weight": codes, "weight_scale": scales, "input_scale": scale(1)}
    folder.add(LAYER + "mlp.up_proj", tensors, "row", dequantise(codes, scales[0], torch.float32))
    folder.write()


def f32(tensors):
    """The same with scales of f32, so that the package computes in f32."""
    return {name: t.float() if name == "weight_scale" else t for name, t in tensors.items()}


def compressed():
    from compressed_tensors.compressors import FloatQuantizationCompressor, PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    dynamic = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True)

    def config(groups, form):
        made = QuantizationConfig(
            config_groups=groups, format=form, quantization_status="compressed", ignore=["lm_head", r"re:.*mlp\.gate$"]
        )
        return json.loads(json.dumps(made.model_dump(mode="json")))

    def float_args(**more):
        return QuantizationArgs(num_bits=8, type="float", **more)

    def int_args(**more):
        return QuantizationArgs(num_bits=4, type="int", **more)

    kinds = {
        "tensor": (LAYER + "self_attn.q_proj", (8, 24), (1,), float_args(strategy="tensor")),
        "channel": (LAYER + "mlp.experts.0.up_proj", (12, 24), (12, 1), float_args(strategy="channel")),
        "block": (LAYER + "mlp.down_proj", (136, 132), (2, 2), float_args(strategy="block", block_structure=[128, 128])),
    }
    targets = {"tensor": [LAYER + "self_attn.q_proj"], "channel": [r"re:.*experts.*"], "block": ["Linear"]}
    groups = {
        f"group_{n}": QuantizationScheme(targets=targets[kind], weights=kinds[kind][3], input_activations=dynamic)
        for n, kind in enumerate(kinds)
    }
    folder = Folder("compressed-float", config(groups, "float-quantized"))
    for group, (module, shape, scales, _) in zip(groups.values(), kinds.values()):
        state = {"weight": torch.randn(shape), "weight_scale": scale(*scales, dtype=torch.bfloat16).float()}
        tensors = FloatQuantizationCompressor.compress(state, group)
        tensors["weight_scale"] = tensors["weight_scale"].bfloat16()
        scheme = "block" if scales == (2, 2) else "row"
        weights = FloatQuantizationCompressor.decompress(f32(tensors), group)["weight"]
        folder.add(module, {**tensors, "input_scale": scale(1)}, scheme, weights)
    folder.write()

    cases = [
        ("compressed-32", (20, 64), int_args(strategy="group", group_size=32, symmetric=False)),
        ("compressed-64", (6, 128), int_args(strategy="group", group_size=64, symmetric=True)),
        ("compressed-128", (8, 256), int_args(strategy="group", group_size=128, symmetric=True, actorder="weight")),
        ("compressed-rows", (9, 44), int_args(strategy="channel", symmetric=True)),
        ("compressed-rows-zeros", (9, 44), int_args(strategy="channel", symmetric=False)),
    ]
    for name, (rows, cols), args in cases:
        group = QuantizationScheme(targets=["Linear"], weights=args)
        field = "compression_config" if name == "compressed-64" else "quantization_config"
        folder = Folder(name, config({"group_0": group}, "pack-quantized"), field)
        count = cols // (args.group_size or cols)
        for module in [LAYER + "self_attn.q_proj", LAYER + "mlp.experts.3.gate_proj"]:
            state = {"weight": torch.randn(rows, cols) * 0.05, "weight_scale": scale(rows, count, dtype=torch.float16).float()}
            if not args.symmetric:
                state["weight_zero_point"] = torch.randint(-8, 8, (rows, count), dtype=torch.int8)
            tensors = PackedQuantizationCompressor.compress(state, group)
            weights = PackedQuantizationCompressor.decompress(f32(tensors), group)["weight"]
            tensors["weight_scale"] = tensors["weight_scale"].half()
            scheme = f"int4 {cols // count}"
            folder.add(module, tensors, scheme, weights)
        folder.write()


def ordered(package):
    """Runs in a process of its own: it imports another version of compressed-tensors."""
    sys.path.insert(0, str(package))
    import compressed_tensors
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    assert package in Path(compressed_tensors.__file__).parents
    args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True, actorder="group")
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=args)}
    made = QuantizationConfig(config_groups=groups, format="pack-quantized", quantization_status="compressed",
                              ignore=["lm_head"])
    folder = Folder("compressed-ordered", json.loads(json.dumps(made.model_dump(mode="json"))))
    rows, cols = 10, 96
    scattered = torch.arange(cols, dtype=torch.int32)[torch.randperm(cols)] // 32
    runs = torch.arange(cols, dtype=torch.int32) // 32
    for end, g_idx, scheme in [("q_proj", scattered, "int4 32 ordered"), ("k_proj", runs, "int4 32")]:
        scales = scale(rows, cols // 32, dtype=torch.float16).float()
        package = PackedQuantizationCompressor()
        tensors = package.compress_weight(torch.randn(rows, cols) * 0.05, scales, args, g_idx=g_idx)
        tensors = {**tensors, "weight_scale": scales.half(), "weight_g_idx": g_idx}
        folder.add(LAYER + "self_attn." + end, tensors, scheme, package.decompress_weight(f32(tensors), args))
    folder.write()


def taken(path, names, **scope):
    """Functions of a source file, also methods, compiled without the rest of the file."""
    tree = ast.parse(Path(path).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.decorator_list = []
            code = compile(ast.Module([node], []), str(path), "exec", __future__.annotations.compiler_flag)
            exec(code, scope)
    return [scope[name] for name in names]


def awq(package):
    (from_linear,) = taken(package / "awq/modules/linear/gemm.py", ["from_linear"], torch=torch,
                           get_best_device=lambda: "cpu")
    (dequantise,) = taken(
        package / "awq/utils/packing_utils.py", ["dequantize_gemm"], torch=torch,
        **dict(zip(["unpack_awq", "reverse_awq_order"],
                   taken(package / "awq/utils/packing_utils.py", ["unpack_awq", "reverse_awq_order"], torch=torch,
                         AWQ_REVERSE_ORDER=constant(package / "awq/utils/packing_utils.py", "AWQ_REVERSE_ORDER")))))
    for group in [32, 64]:
        quantisation = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm",
                        "modules_to_not_convert": ["mlp.gate"]}
        folder = Folder(f"awq-{group}", quantisation)
        for module, rows, cols in [("self_attn.q_proj", 64, 64), ("mlp.experts.3.down_proj", 32, 128)]:
            scales = scale(cols // group, rows, dtype=torch.float16).float()
            zeros = torch.randint(0, 16, (cols // group, rows))
            values = torch.randint(0, 16, (rows, cols))
            each = torch.arange(cols) // group
            weight = ((values - zeros[each].T) * scales[each].T)
            linear = SimpleNamespace(in_features=cols, out_features=rows, bias=None, weight=weight)
            linear.weight = SimpleNamespace(data=weight, device="cpu")
            made = from_linear(lambda *_: SimpleNamespace(in_features=cols, w_bit=4), linear, 4, group,
                               scales=scales, zeros=zeros)
            tensors = {"qweight": made.qweight, "qzeros": made.qzeros, "scales": made.scales}
            weights = dequantise(made.qweight, made.qzeros, made.scales.float(), 4, group).T
            assert torch.equal(weights, weight)
            folder.add(LAYER + module, tensors, f"int4 {group}", weights)
        folder.write()


def constant(path, name):
    for node in ast.parse(Path(path).read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == name:
            return ast.literal_eval(node.value)
    raise KeyError(name)


def gptq(package):
    from transformers import pytorch_utils

    linears = package / "gptqmodel/nn_modules/qlinear/__init__.py"
    pack, dequantise, from_codes = taken(
        linears, ["pack_original", "dequantize_weight", "_dequantize_from_codes"], t=torch, np=np, math=math,
        nn=torch.nn, _ConvNd=torch.nn.modules.conv._ConvNd, transformers=SimpleNamespace(pytorch_utils=pytorch_utils),
        THREADPOOLCTL=SimpleNamespace(threadpool_limits=lambda _: contextlib.nullcontext()),
        _torch_right_shift=torch.bitwise_right_shift)
    log = SimpleNamespace(info=SimpleNamespace(once=lambda _: None))
    to_first, to_second = taken(
        package / "gptqmodel/utils/model.py",
        ["convert_gptq_v2_to_v1_format_module", "convert_gptq_v1_to_v2_format_module"], torch=torch, log=log,
        BaseQuantLinear=SimpleNamespace)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32).unsqueeze(0)

    def layer(cols):
        made = SimpleNamespace(
            bits=4, maxq=15, planar=False, pack_factor=8, pack_dtype_bits=32, pack_np_math_dtype=np.uint32,
            pack_np_dtype=np.int32, pack_dtype=torch.int32, dequant_dtype=torch.int8, in_features=cols, bias=None,
            wf_unsqueeze_zero=shifts.unsqueeze(0), wf_unsqueeze_neg_one=shifts.unsqueeze(-1),
            _init_wf_unsqueeze_buffers=lambda: None, qzero_format=lambda format: None)
        made.register_buffer = lambda name, value: setattr(made, name, value)
        made._dequantize_from_codes = lambda *args, **more: from_codes(made, *args, **more)
        return made

    for name, group, order, symmetric, first in [
        ("gptq", 32, False, False, True),
        ("gptq-ordered", 32, True, True, True),
        ("gptq-v2", 64, False, False, False),
        ("gptq-v2-rows", -1, True, True, False),
    ]:
        quantisation = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": order, "sym": symmetric,
                        "lm_head": False, "pack_dtype": "int32",
                        "checkpoint_format": "gptq" if first else "gptq_v2"}
        if name == "gptq-v2":
            quantisation["dynamic"] = {"-:.*mlp\\.gate$": {}, "+:.*down_proj": {"bits": 4, "group_size": 128}}
        folder = Folder(name, quantisation)
        for module, rows, cols in [("self_attn.q_proj", 20, 128), ("mlp.experts.3.down_proj", 16, 128)]:
            size = cols if group < 0 else 128 if name == "gptq-v2" and "down" in module else group
            count = cols // size
            scales = scale(rows, count, dtype=torch.float16).float()
            zeros = torch.full((rows, count), 8) if symmetric else torch.randint(0, 16, (rows, count))
            g_idx = torch.arange(cols, dtype=torch.int32) // size
            if order:
                g_idx = g_idx[torch.randperm(cols)]
            values = torch.randint(0, 16, (rows, cols))
            weight = (values - zeros[:, g_idx.long()]) * scales[:, g_idx.long()]
            made = layer(cols)
            made.g_idx = g_idx
            pack(made, SimpleNamespace(weight=SimpleNamespace(data=weight)), scales, zeros, g_idx)
            if first:
                to_first(made, SimpleNamespace(bits=4, pack_dtype=torch.int32))
            tensors = {end: getattr(made, end) for end in ["qweight", "qzeros", "scales", "g_idx"]}
            tensors = {end: tensor.clone() for end, tensor in tensors.items()}
            if first:
                to_second(made, 4, torch.int32)
            made.scales = made.scales.float()
            weights = dequantise(made).T
            assert torch.equal(weights, weight)
            scheme = f"int4 {size}" + (" ordered" if order and count > 1 else "")
            folder.add(LAYER + module, tensors, scheme, weights)
        folder.write()


def mxfp4():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(31)
    folder = Folder("mxfp4", {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", LAYER + "mlp.gate"]})
    for name, experts, rows, cols in [("gate_up_proj", 3, 6, 64), ("down_proj", 3, 10, 96)]:
        blocks = torch.randint(0, 256, (experts, rows, cols // 32, 16), dtype=torch.uint8)
        scales = torch.randint(90, 140, (experts, rows, cols // 32), dtype=torch.uint8)
        # The smallest and the largest power that transformers computes in bfloat16.
        scales[0, 0, 0], scales[0, 0, 1] = 2, 250
        # A row for each output, as they are stored.
        weights = convert_moe_packed_tensors(blocks, scales).transpose(1, 2).reshape(experts * rows, cols)
        module = f"{LAYER}mlp.experts.{name}"
        folder.add(module, {}, "mxfp4", weights.float())
        folder.expected[module] = folder.expected.pop(f"{module}.weight")
        folder.tensors |= {f"{module}_blocks": blocks, f"{module}_scales": scales}
    folder.write()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ["autoawq", "gptqmodel", "ordered"]:
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--only-ordered", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.manual_seed(23)
    if arguments.only_ordered:
        ordered(arguments.ordered.resolve())
        return
    fp8()
    compressed()
    awq(arguments.autoawq)
    gptq(arguments.gptqmodel)
    mxfp4()
    import subprocess

    subprocess.run([sys.executable, __file__, *sys.argv[1:], "--only-ordered"], check=True)


if __name__ == "__main__":
    main()
