#!/usr/bin/env python3
"""Checks that `transformers` and `compressed-tensors` read what `dacapo quantize` writes.

    pip install torch transformers safetensors tokenizers compressed-tensors==0.20.0
    cargo build && python tools/check_quantised.py target/debug/dacapo

Makes tiny random models (Qwen3 with whole blocks, Qwen3 with odd shapes, Qwen3-MoE), quantises them with `dacapo
quantize`, loads the result with `AutoModelForCausalLM.from_pretrained` in float32, and compares the log-probabilities
that the dequantised weights give with those of `dacapo run --numerics exact` from the same folder. The weights that
`transformers` has are compared with those of the model before, too.
"""

import argparse
import copy
import json
import pathlib
import subprocess
import tempfile

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

PROMPT = "The quick brown fox jumps over the lazy dog, 1234567890 times."
TOLERANCE = 1e-4
# `transformers` multiplies experts of 4 bits in the type of their scales, f16, which rounds; all else in f32.
ROUNDED = 5e-3
SHARED = dict(
    vocab_size=256, num_hidden_layers=2, max_position_embeddings=256, rms_norm_eps=1e-5, bos_token_id=None,
    eos_token_id=2, tie_word_embeddings=False, attn_implementation="eager")
DENSE = dict(SHARED, hidden_size=256, intermediate_size=384, num_attention_heads=4, head_dim=64, num_key_value_heads=2)
ODD = dict(SHARED, hidden_size=192, intermediate_size=320, num_attention_heads=6, head_dim=32, num_key_value_heads=2)
EXPERTS = dict(DENSE, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True)
MODELS = {
    "dense": (Qwen3ForCausalLM, Qwen3Config, DENSE),
    "odd": (Qwen3ForCausalLM, Qwen3Config, ODD),
    "experts": (Qwen3MoeForCausalLM, Qwen3MoeConfig, EXPERTS),
}
# The largest error of all weights together, relative to their size.
ERRORS = {"fp8": 0.04, "int4": 0.15}


def make(name, folder):
    torch.manual_seed(5)
    kind, config, shape = MODELS[name]
    model = kind(config(**shape)).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            value.copy_((1 + 0.3 * torch.randn_like(value) if "norm" in key else 0.08 * torch.randn_like(value)).bfloat16())
    # A copy, because frequencies of rotations are rounded, too.
    copy.deepcopy(model).bfloat16().save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


def weights(folder):
    """The state of the model as `transformers` loads it, with dequantised weights."""
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True))
    return loaded.state_dict()


def check(dacapo, name, form, home):
    plain, folder = home / name, home / f"{name}-{form}"
    before = make(name, plain)
    report = subprocess.run([dacapo, "quantize", plain, "-o", folder, "--format", form, "--json"], check=True,
                            capture_output=True, text=True).stdout
    loaded = weights(folder)
    found = {key: loaded[key] for key in before.state_dict()}
    error = size = 0.0
    for key, value in before.state_dict().items():
        error += (found[key].double() - value.double()).square().sum().item()
        size += value.double().square().sum().item()
    relative = (error / size) ** 0.5
    experts = [value for key, value in found.items() if ".experts." in key]
    rounds = form == "int4" and bool(experts) and all(torch.equal(value, value.half().float()) for value in experts)
    assert 1e-3 < relative < ERRORS[form], relative
    # Weights only: the configuration also asks for activations in fp8.
    before.load_state_dict(found)
    ids = Tokenizer.from_file(str(plain / "tokenizer.json")).encode(PROMPT).ids
    with torch.no_grad():
        scores = before(torch.tensor([ids])).logits[0].log_softmax(1)
    expected = [scores[at, token].item() for at, token in enumerate(ids[1:])]
    answer = subprocess.run(
        [dacapo, "run", folder, "--raw", "-p", PROMPT, "-n", "1", "--json", "--prompt-logprobs", "0", "--numerics", "exact",
         "--device", "cpu", "--max-context", "128"], check=True, capture_output=True, text=True).stdout
    ours = [score["logprob"] for score in json.loads(answer)["prompt_logprobs"]]
    assert len(ours) == len(expected) == len(ids) - 1
    worst = max(abs(a - b) for a, b in zip(ours, expected))
    print(f"{name} {form}: {json.loads(report)['matrices']}: weights differ by {relative:.2%} from the model before, "
          f"{len(ours)} log-probabilities by at most {worst:.1e} from transformers")
    assert worst < (ROUNDED if rounds else TOLERANCE), worst


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("dacapo", type=pathlib.Path)
    dacapo = parser.parse_args().dacapo.resolve()
    for name in MODELS:
        for form in ERRORS:
            with tempfile.TemporaryDirectory() as home:
                check(dacapo, name, form, pathlib.Path(home))


if __name__ == "__main__":
    main()
