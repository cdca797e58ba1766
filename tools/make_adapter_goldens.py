#!/usr/bin/env python3
"""Makes random adapters with `peft` for the tiny checkpoints of crates/model/tests/goldens, with the logits that
`transformers` and `peft` compute (CPU, float32), under crates/model/tests/adapters/.

    python -m venv .venv && .venv/bin/pip install torch transformers peft safetensors
    .venv/bin/python tools/make_adapter_goldens.py [CASE...]

Each case is a folder as `peft` saves it: adapter_config.json and adapter_model.safetensors, and golden.safetensors with
`logits` (tokens × vocab, float32) of the base golden's tokens. The name of the base is in adapter_config.json
(`base_model_name_or_path`). Seeds are fixed, so a rerun gives the same files.
"""

import json
import pathlib
import sys

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

ROOT = pathlib.Path(__file__).resolve().parent.parent / "crates/model/tests"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
# The base, the projections, the rank, and other options.
CASES = {
    "llama-q": ("llama", ["q_proj"], 4, {}),
    "llama-k": ("llama", ["k_proj"], 1, {}),
    "llama-v": ("llama", ["v_proj"], 8, {}),
    "llama-qv": ("llama", ["q_proj", "v_proj"], 16, dict(lora_alpha=32)),
    "llama-o": ("llama", ["o_proj"], 3, {}),
    "llama-gate": ("llama", ["gate_proj"], 4, {}),
    "llama-up": ("llama", ["up_proj"], 7, dict(use_rslora=True)),
    "llama-down": ("llama", ["down_proj"], 8, {}),
    "llama-attention": ("llama", ATTENTION, 5, {}),
    "llama-mlp": ("llama", MLP, 16, dict(use_rslora=True)),
    "llama-head": ("llama", ["lm_head"], 4, {}),
    "llama-all": ("llama", ATTENTION + MLP + ["lm_head"], 8, {}),
    "llama-one-layer": ("llama", ATTENTION + MLP, 4, dict(layers_to_transform=[1])),
    "llama-patterns": ("llama", ATTENTION + MLP, 4, dict(
        rank_pattern={"q_proj": 2, "down_proj": 6}, alpha_pattern={"v_proj": 40})),
    "qwen2-all": ("qwen2", ATTENTION + MLP, 8, {}),
    "qwen3-all": ("qwen3", ATTENTION + MLP, 8, {}),
    "gemma3-all": ("gemma3", ATTENTION + MLP, 4, {}),
    "phi3-all": ("phi3", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], 4, {}),
    "cohere-all": ("cohere", ATTENTION + MLP, 4, {}),
}


def make(name):
    base, targets, rank, options = CASES[name]
    torch.manual_seed(sum(map(ord, name)))
    model = AutoModelForCausalLM.from_pretrained(ROOT / "goldens" / base, dtype=torch.float32)
    config = LoraConfig(r=rank, target_modules=targets, task_type="CAUSAL_LM",
                        **{"lora_alpha": 2 * rank, **options})
    model = get_peft_model(model, config)
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "lora_" in key:
                value.copy_(torch.randn_like(value) * 0.15)
    tokens = load_file(ROOT / "goldens" / base / "golden.safetensors")["tokens"].long()
    with torch.no_grad():
        logits = model.eval()(tokens[None]).logits[0].float()
    plain = load_file(ROOT / "goldens" / base / "golden.safetensors")["logits"]
    moved = (logits - plain).abs().max().item()
    folder = ROOT / "adapters" / name
    model.save_pretrained(folder, save_embedding_layers=False)
    for path in folder.iterdir():
        if path.name not in ("adapter_config.json", "adapter_model.safetensors"):
            path.unlink()
    # No path of the machine that made it.
    path = folder / "adapter_config.json"
    text = json.loads(path.read_text())
    text["base_model_name_or_path"] = base
    text["target_modules"] = sorted(text["target_modules"])
    path.write_text(json.dumps(text, indent=2, sort_keys=True) + "\n")
    save_file({"logits": logits.contiguous()}, folder / "golden.safetensors")
    print(f"{name}: logits differ from the base's by up to {moved:.3f}")


for case in sys.argv[1:] or CASES:
    make(case)
