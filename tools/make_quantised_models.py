#!/usr/bin/env python3
"""Makes tiny random Qwen3 checkpoints with quantised weights, and the logits that `transformers` computes from what
`compressed-tensors` dequantises, under crates/model/tests/goldens/ (the layout of make_model_goldens.py).

    pip install torch transformers safetensors gguf compressed-tensors==0.20.0
    python tools/make_quantised_models.py

qwen3-fp8       blocks of 128 × 128, as `quant_method: fp8` stores them
qwen3-fp8-rows  a scale for each row (compressed-tensors)
qwen3-int4      groups of 128 with zeros (compressed-tensors)
qwen3-int4-32   groups of 32, symmetric

`bf16_error` says how far logits move in bfloat16, with the inputs of linears rounded to fp8 where the configuration asks
for that.
"""

import json
import pathlib

import torch
from compressed_tensors.compressors import FloatQuantizationCompressor, PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from make_model_goldens import in_bf16
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

OUT = pathlib.Path(__file__).resolve().parent.parent / "crates/model/tests/goldens"
TOKENS = 40
SHAPE = dict(
    vocab_size=131, hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4, head_dim=64,
    num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2,
    tie_word_embeddings=True)


def groups_of(weight, size, symmetric):
    """Scales, and zeros if there are any, of groups of columns."""
    rows, cols = weight.shape
    parts = weight.view(rows, cols // size, size)
    if symmetric:
        return dict(weight_scale=(parts.abs().amax(2) / 7.5).half().float())
    low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    scale = ((high - low) / 15).half().float()
    zero = (-8 - low / scale).round().clamp(-8, 7)
    return dict(weight_scale=scale, weight_zero_point=zero.to(torch.int8))


def compressed(scheme, form, compressor, prepare):
    """A function that quantises a weight, and the configuration that says how."""
    made = QuantizationConfig(config_groups={"group_0": scheme}, format=form, quantization_status="compressed", ignore=["lm_head"])

    def quantise(weight):
        tensors = compressor.compress({"weight": weight, **prepare(weight)}, scheme)
        floats = {name: t.float() if name == "weight_scale" else t for name, t in tensors.items()}
        return tensors, compressor.decompress(floats, scheme)["weight"]

    return quantise, json.loads(json.dumps(made.model_dump(mode="json")))


def blocks(weight):
    """As `quant_method: fp8`: the scales are called their inverse and multiplied."""
    rows, cols = weight.shape
    scale = weight.view(rows // 128, 128, cols // 128, 128).abs().amax((1, 3)) / 448
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    codes = (weight / wide).to(torch.float8_e4m3fn)
    return dict(weight=codes, weight_scale_inv=scale), codes.float() * wide


def rounded_input(size):
    """A hook that rounds a linear's inputs to e4m3 with a scale for each `size` columns of a token, or for all of them."""

    def hook(_, inputs):
        x = inputs[0].float()
        parts = x.view(*x.shape[:-1], -1, size or x.shape[-1])
        scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
        return (((parts / scale).to(torch.float8_e4m3fn).float() * scale).view(x.shape).to(inputs[0].dtype),)

    return hook


def moved(model, tokens, logits, described):
    """How far bfloat16 moves logits, with the inputs of linears as the configuration asks for them."""
    model = in_bf16(model)
    size = {"fp8": 128, "compressed-tensors": 0}[described["quant_method"]]
    if described["quant_method"] == "fp8" or described["format"] == "float-quantized":
        for name, module in model.named_modules():
            if name.endswith("_proj"):
                module.register_forward_pre_hook(rounded_input(size))
    with torch.no_grad():
        return (model(tokens).logits[0].float() - logits).abs().max().reshape(1)


def cases():
    yield "qwen3-fp8", blocks, dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128],
                                    modules_to_not_convert=["lm_head"])
    rows = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=8, type="float", strategy="channel"),
                              input_activations=QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True))
    yield "qwen3-fp8-rows", *compressed(rows, "float-quantized", FloatQuantizationCompressor,
                                        lambda w: dict(weight_scale=w.abs().amax(1, keepdim=True) / 448))
    for name, size, symmetric in [("qwen3-int4", 128, False), ("qwen3-int4-32", 32, True)]:
        args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=size, symmetric=symmetric)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        yield name, *compressed(scheme, "pack-quantized", PackedQuantizationCompressor,
                                lambda w, size=size, symmetric=symmetric: groups_of(w, size, symmetric))


def main():
    for index, (name, quantise, described) in enumerate(cases()):
        torch.manual_seed(3000 + index)
        config = Qwen3Config(**SHAPE, attn_implementation="eager")
        model = Qwen3ForCausalLM(config).eval().float()
        state = {}
        with torch.no_grad():
            for key, value in model.named_parameters():
                value.copy_(1 + 0.3 * torch.randn_like(value) if "norm" in key else 0.08 * torch.randn_like(value))
                if "_proj" in key:
                    tensors, weights = quantise(value.clone())
                    value.copy_(weights)
                    state |= {key.removesuffix("weight") + part: tensor.contiguous() for part, tensor in tensors.items()}
                else:
                    # What the model has in bf16.
                    value.copy_(value.bfloat16())
                    state[key] = value.bfloat16().contiguous()
        tokens = torch.randint(3, SHAPE["vocab_size"], (1, TOKENS))
        with torch.no_grad():
            logits = model(tokens).logits[0]
        folder = OUT / name
        folder.mkdir(parents=True, exist_ok=True)
        text = config.to_dict()
        text |= dict(architectures=["Qwen3ForCausalLM"], dtype="bfloat16", quantization_config=described)
        (folder / "config.json").write_text(json.dumps(text, indent=1, sort_keys=True, default=str) + "\n")
        save_file(state, folder / "model.safetensors")
        golden = {"tokens": tokens[0].to(torch.int32), "logits": logits.float().contiguous()}
        golden["bf16_error"] = moved(model, tokens, logits, described)
        save_file(golden, folder / "golden.safetensors")
        print(f"{name}: max |logit| {logits.abs().max():.2f}, bf16 error {golden['bf16_error'].item():.3f}")


if __name__ == "__main__":
    main()
