"""Compares the output of `cargo run -p model --example parity -- MODEL FOLDER` with `transformers`.

    python3 tools/gpu/compare_transformers.py FOLDER

The reference computes in float32 with the same weights. Each layer gets Dacapo's output
of the previous layer, so errors do not accumulate; the logits of the batches are those of the whole model.
Exits with 1 if a layer differs by more than 1e-2 of its output's norm, or a distribution by a
divergence of more than 1e-4.

Routing decisions are compared by themselves. The reference's router sees Dacapo's input of the layer; no chosen expert
may be further below a rejected one than rounding explains. The layer's output is then compared with the same experts
chosen. In whole models with experts a near tie changes everything after it: the yardstick is how far distributions of
`transformers` in bfloat16 diverge from its own in float32. The mean over all of them may be a quarter larger, the largest, which
is one near tie, twice as large.
"""

import json
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask

LAYER, DIVERGENCE = 1e-2, 1e-4
# Of the deviation of a token's router logits. A router's input is rounded three times, by 2e-3 of its norm each: a logit
# of three deviations changes by 0.02 of one, and two candidates approach each other by twice that.
NEAR = 5e-2


def load(folder, name):
    about = json.loads((folder / f"{name}.json").read_text())
    return about, np.fromfile(folder / f"{name}.f32", dtype=np.float32)


class Choices:
    """What Dacapo's routers chose in a phase, and how it is judged."""

    def __init__(self, folder, phase, device):
        about, ids = load(folder, f"choices-{phase}")
        self.judged = self.differing = self.unread = 0
        self.furthest = 0.0
        shape = (len(about["layers"]), about["tokens"], -1) if about["layers"] else (0, 0, 0)
        self.ids = dict(zip(about["layers"], torch.tensor(ids.reshape(shape), device=device)))

    def run(self, layer, index, rows, *arguments, **named):
        """The layer with Dacapo's choices for its last rows, each judged; others are the router's own."""
        if index not in self.ids:
            return layer(*arguments, **named)
        ids, topk = self.ids[index][rows], torch.topk

        def choose(scores, k, dim=-1):
            own = topk(scores, k, dim=dim).indices
            ours = own.clone()
            ours[-len(ids):] = torch.where(ids.isnan(), ours[-len(ids):], ids.nan_to_num()).long()
            # A softmax's logarithm differs from the logits by a number for the whole token.
            logits = scores.log() if (scores >= 0).all() else scores
            left = logits.scatter(-1, ours, float("-inf")).max(-1).values
            below = ((left - logits.gather(-1, ours).min(-1).values) / logits.std(-1))[-len(ids):]
            read = ~ids.isnan().any(-1)
            distinct = (ours.sort(-1).values.diff(dim=-1) > 0).all(-1)[-len(ids):]
            self.judged += read.sum().item()
            self.unread += (~read).sum().item()
            self.differing += (read & (below > 0)).sum().item()
            worst = torch.where(distinct, below, float("inf"))[read]
            self.furthest = max([self.furthest] + worst.tolist())
            return scores.gather(-1, ours), ours

        with mock.patch("torch.topk", choose), mock.patch("torch.Tensor.topk", choose):
            return layer(*arguments, **named)

    def report(self, phase):
        """Whether all of them are explained."""
        if self.ids:
            print(f"{phase}: {self.judged} decisions ({self.unread} unread), {self.differing} are not the reference's, "
                  f"the furthest by {max(0.0, self.furthest):.1e} of the logits' deviation")
        return self.furthest <= NEAR and (self.judged > 0 or not self.ids)


def layers(model, folder, phase, choices):
    """The worst error of a layer relative to its output, with Dacapo's input to each layer and Dacapo's experts."""
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
            # Of a decode step there is one decision of a row: that of its last token.
            routed = slice(row, row + 1) if phase == "decode" else slice(start - len(prompt), start)
            y = choices.run(layer, index, routed, x, attention_mask=mask, position_ids=positions, position_embeddings=rope)
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


def divergence(reference, logits):
    p, q = reference.log_softmax(-1), logits.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).tolist()


def rounded(model, folder, exact):
    """Divergences of transformers in bfloat16 from itself in float32. The model is not exact afterwards."""
    model.to(torch.bfloat16)
    all_of_them = []
    for path, row, reference in exact:
        about, _ = load(folder, path.stem)
        ids = torch.tensor([about["tokens"][row][:-1]], device=model.device)
        logits = model(ids, logits_to_keep=about["steps"]).logits[0].float()
        all_of_them += divergence(reference.to(model.device), logits)
    return all_of_them


def batches(model, folder, exact):
    """Divergences of all distributions."""
    all_of_them = []
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
            divergences += divergence(reference, ours)
            exact.append((path, row, reference.cpu()))
            said = torch.tensor(tokens[-steps:], device=model.device)
            best = reference.max(-1).values - reference.gather(-1, said[:, None])[:, 0]
            same += (best == 0).sum().item()
            gap = max(gap, best.max().item())
        all_of_them += divergences
        lengths = [len(t) for t in about["tokens"]]
        print(
            f"batch {about['rows']:>3}: {about['bucket']:<12} replayed {about['replayed']!s:<5} contexts {min(lengths)}–{max(lengths)}: "
            f"KL mean {sum(divergences) / len(divergences):.1e} max {max(divergences):.1e}; "
            f"{same} of {steps * len(lengths)} tokens are the reference's, the others at most {gap:.4f} below"
        )
    return all_of_them


@torch.no_grad()
def main():
    folder = Path(sys.argv[1])
    place = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").to(place)
    model.eval()
    failed = False
    for phase in ("prefill", "decode"):
        choices = Choices(folder, phase, place)
        worst, whole = layers(model, folder, phase, choices)
        print(f"{phase}: worst layer {worst:.1e} of its output; whole model before the head {whole:.1e}")
        failed |= worst > LAYER or not choices.report(phase)
    exact, allowed, mean_allowed = [], DIVERGENCE, DIVERGENCE
    ours = batches(model, folder, exact)
    worst, mean = max(ours), sum(ours) / len(ours)
    if choices.ids:
        theirs = rounded(model, folder, exact)
        allowed = max(allowed, 2.0 * max(theirs))
        mean_allowed = max(mean_allowed, 1.25 * sum(theirs) / len(theirs))
    failed |= worst > allowed or mean > mean_allowed
    print(f"divergence: worst {worst:.1e}, allowed {allowed:.1e}; mean {mean:.1e}, allowed {mean_allowed:.1e}")
    sys.exit(failed)


main()
