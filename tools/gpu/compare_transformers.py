"""Compares the output of `cargo run -p model --example parity -- MODEL FOLDER` with `transformers`.

    python3 tools/gpu/compare_transformers.py FOLDER

The reference computes in float32 with the same weights. Each layer gets Dacapo's output
of the previous layer, so errors do not accumulate; the logits of the batches are those of the whole model.
Exits with 1 if a layer differs by more than 1e-2 of its output's norm, or a distribution by a
divergence of more than 1e-4.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask

LAYER, DIVERGENCE = 1e-2, 1e-4


def load(folder, name):
    about = json.loads((folder / f"{name}.json").read_text())
    return about, np.fromfile(folder / f"{name}.f32", dtype=np.float32)


def layers(model, folder, phase):
    """The worst error of a layer relative to its output, with Dacapo's input to each layer."""
    about, prefill = load(folder, "layers-prefill")
    hidden, count = about["hidden"], about["layers"]
    prefill = torch.tensor(prefill.reshape(count, -1, hidden), device=model.device)
    _, decode = load(folder, "layers-decode")
    if phase == "decode" and decode.size == 0:
        return 0.0, 0.0
    decode = torch.tensor(decode.reshape(-1, len(about["prompts"]), hidden), device=model.device)
    if phase == "decode" and len(decode) != count:
        return 0.0, 0.0
    worst, start = 0.0, 0
    whole = []
    for row, prompt in enumerate(about["prompts"]):
        ours = prefill[:, start : start + len(prompt)]
        start += len(prompt)
        if phase == "decode":
            ours = torch.cat([ours, decode[:, row : row + 1]], dim=1)
        positions = torch.arange(ours.shape[1], device=model.device)[None]
        for index, layer in enumerate(model.model.layers):
            x = ours[index][None]
            rope = model.model.rotary_emb(x, positions)
            mask = create_causal_mask(model.config, x, None, None, position_ids=positions)
            y = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rope)
            y = (y[0] if isinstance(y, tuple) else y)[0]
            # After the last layer only the last tokens are computed.
            lasts = phase == "decode" or index + 2 == count
            part = slice(-1, None) if lasts else slice(None)
            error = (ours[index + 1][part] - y[part]).norm(dim=-1) / y[part].norm(dim=-1)
            worst = max(worst, error.max().item())
        ids = torch.tensor([prompt + ([about["first"][row]] if phase == "decode" else [])], device=model.device)
        states = model(ids, output_hidden_states=True).hidden_states[count - 1]
        # The last state of `transformers` is after the final norm; ours is before.
        last = model.model.norm(ours[-1])[-1]
        whole.append(((last - states[0, -1]).norm() / states[0, -1].norm()).item())
    return worst, max(whole)


def batches(model, folder):
    worst = 0.0
    for path in sorted(folder.glob("batch-*.json"), key=lambda p: int(p.stem.split("-")[1])):
        about, logits = load(folder, path.stem)
        steps, vocab = about["steps"], model.config.vocab_size
        logits = torch.tensor(logits.reshape(steps, -1, vocab))
        divergences, same, gap = [], 0, 0.0
        for row, tokens in enumerate(about["tokens"]):
            # The last token was sampled by the last step; it has no logits.
            ids = torch.tensor([tokens[:-1]], device=model.device)
            reference = model(ids, logits_to_keep=steps).logits[0].float()
            ours = logits[:, row].to(model.device)
            p, q = reference.log_softmax(-1), ours.log_softmax(-1)
            divergences.append((p.exp() * (p - q)).sum(-1).max().item())
            said = torch.tensor(tokens[-steps:], device=model.device)
            best = reference.max(-1).values - reference.gather(-1, said[:, None])[:, 0]
            same += (best == 0).sum().item()
            gap = max(gap, best.max().item())
        most = max(divergences)
        worst = max(worst, most)
        lengths = [len(t) for t in about["tokens"]]
        print(
            f"batch {about['rows']:>3}: {about['bucket']:<12} replayed {about['replayed']!s:<5} contexts {min(lengths)}–{max(lengths)}: "
            f"KL mean {sum(divergences) / len(divergences):.1e} max {most:.1e}; "
            f"{same} of {steps * len(lengths)} tokens are the reference's, the others at most {gap:.4f} below"
        )
    return worst


@torch.no_grad()
def main():
    folder = Path(sys.argv[1])
    place = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").to(place)
    model.eval()
    failed = False
    for phase in ("prefill", "decode"):
        worst, whole = layers(model, folder, phase)
        print(f"{phase}: worst layer {worst:.1e} of its output; whole model before the head {whole:.1e}")
        failed |= worst > LAYER
    worst = batches(model, folder)
    failed |= worst > DIVERGENCE
    print("worst divergence", f"{worst:.1e}")
    sys.exit(failed)


main()
