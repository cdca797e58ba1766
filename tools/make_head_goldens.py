#!/usr/bin/env python3
"""Makes small random drafters for small random models, with what PyTorch computes with both (CPU, float32), under
crates/model/tests/heads/: an EAGLE-3 head, and a layer of a model's own that predicts the token after the next (MTP).

    python -m venv .venv && .venv/bin/pip install torch transformers safetensors
    .venv/bin/python tools/make_head_goldens.py

The models are `goldens/smollm3` and `goldens/smollm2`, and for models with recurrent layers `goldens/qwen3-next` and
`goldens/qwen3-5`, as `transformers` runs them. The head is written in the usual format
(config.json, model.safetensors), and its forward pass is below, from the published description: at position p it reads the
embedding of the token at p + 1 and the hidden states of the model at p, which enter three of its layers. The MTP layer has the
names of Qwen3-Next (mtp.safetensors, a shard beside the model's own file) and reads the last state of the model; it is a layer of
`transformers` over the joined embedding and state. golden.safetensors has the greedy
tokens of the model (`tokens`: the prompt, then the answer), the drafts at each step of that answer (`drafts`: steps × 3), and the logits
they were chosen from (`logits`: steps × 3 × draft vocabulary). Seeds are fixed, so a rerun gives the same files.
"""

import copy
import json
import pathlib

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaModel, Qwen3_5TextModel, Qwen3NextModel

TESTS = pathlib.Path(__file__).resolve().parent.parent / "crates/model/tests"
# Heads, the models that they draft for, and the layers whose inputs they read.
EAGLE3 = [("eagle3", "smollm3", [1, 2, 4]), ("eagle3-next", "qwen3-next", [0, 1, 2])]
# Layers of models' own: their models, what runs them, and whether norms are stored less 1.
MTP = [("mtp", "smollm2", LlamaModel, False), ("mtp-next", "qwen3-next", Qwen3NextModel, True),
       ("mtp-3-5", "qwen3-5", Qwen3_5TextModel, True)]
PROMPT, STEPS, DRAFTS = 21, 8, 3
HEADS, KV_HEADS, DIM, INNER, DRAFT_VOCAB, EPS, THETA = 4, 2, 16, 96, 70, 1e-5, 10000.0


def norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rotate(x, positions):
    """x: heads × tokens × dim; element i is paired with i + dim / 2."""
    frequencies = THETA ** (-torch.arange(0, DIM, 2).float() / DIM)
    angles = positions.float()[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., : DIM // 2], x[..., DIM // 2:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Head:
    def __init__(self, hidden, vocab):
        torch.manual_seed(3000)
        matrix = lambda rows, cols: 0.15 * torch.randn(rows, cols)
        vector = lambda cols: 1 + 0.3 * torch.randn(cols)
        kept = torch.randperm(vocab)[:DRAFT_VOCAB].sort().values
        t2d = torch.zeros(vocab, dtype=torch.bool)
        t2d[kept] = True
        self.w = {
            "fc.weight": matrix(hidden, 3 * hidden),
            "midlayer.input_layernorm.weight": vector(hidden),
            "midlayer.hidden_norm.weight": vector(hidden),
            "midlayer.self_attn.q_proj.weight": matrix(HEADS * DIM, 2 * hidden),
            "midlayer.self_attn.k_proj.weight": matrix(KV_HEADS * DIM, 2 * hidden),
            "midlayer.self_attn.v_proj.weight": matrix(KV_HEADS * DIM, 2 * hidden),
            "midlayer.self_attn.o_proj.weight": matrix(hidden, HEADS * DIM),
            "midlayer.post_attention_layernorm.weight": vector(hidden),
            "midlayer.mlp.gate_proj.weight": matrix(INNER, hidden),
            "midlayer.mlp.up_proj.weight": matrix(INNER, hidden),
            "midlayer.mlp.down_proj.weight": matrix(hidden, INNER),
            "norm.weight": vector(hidden),
            "lm_head.weight": matrix(DRAFT_VOCAB, hidden),
            "d2t": kept - torch.arange(DRAFT_VOCAB),
            "t2d": t2d,
        }

    def forward(self, embeds, hidden, positions, cache):
        """One pass over new tokens; returns logits and the hidden states that the next pass reads."""
        w = lambda name: self.w[f"midlayer.{name}.weight"]
        x = torch.cat([norm(embeds, w("input_layernorm")), norm(hidden, w("hidden_norm"))], -1)
        split = lambda y, heads: y.reshape(-1, heads, DIM).transpose(0, 1)
        q = rotate(split(x @ w("self_attn.q_proj").t(), HEADS), positions)
        k = rotate(split(x @ w("self_attn.k_proj").t(), KV_HEADS), positions)
        v = split(x @ w("self_attn.v_proj").t(), KV_HEADS)
        cache["k"] = torch.cat([cache["k"], k], 1) if cache else k
        cache["v"] = torch.cat([cache["v"], v], 1) if "v" in cache else v
        k, v = (cache[which].repeat_interleave(HEADS // KV_HEADS, 0) for which in "kv")
        scores = q @ k.transpose(1, 2) / DIM ** 0.5
        later = torch.arange(k.shape[1])[None, :] > positions[:, None]
        mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        hidden = hidden + mixed.transpose(0, 1).reshape(len(positions), -1) @ w("self_attn.o_proj").t()
        h = norm(hidden, w("post_attention_layernorm"))
        gate = torch.nn.functional.silu(h @ w("mlp.gate_proj").t()) * (h @ w("mlp.up_proj").t())
        hidden = hidden + gate @ w("mlp.down_proj").t()
        return norm(hidden, self.w["norm.weight"]) @ self.w["lm_head.weight"].t(), hidden

    def drafts(self, embed, tokens, states):
        """Drafts after `tokens`, the last of which the model has not seen: `states` are of those before it."""
        cache, logits, drafts = {}, [], []
        fed, hidden = tokens[1:], states @ self.w["fc.weight"].t()
        positions = torch.arange(len(fed))
        for _ in range(DRAFTS):
            scores, hidden = self.forward(embed[fed], hidden, positions, cache)
            logits.append(scores[-1])
            best = scores[-1].argmax()
            drafts.append(best + self.w["d2t"][best])
            fed, hidden, positions = drafts[-1][None], hidden[-1:], positions[-1:] + 1
        return torch.stack(drafts), torch.stack(logits)


def published(name, value):
    """A tensor of `transformers` as checkpoints have it: each expert by itself."""
    root, _, last = name.rpartition(".")
    if not root.endswith("mlp.experts"):
        return {name: value}
    kinds = ["gate_proj", "up_proj"] if last == "gate_up_proj" else [last]
    return {f"{root}.{expert}.{kind}.weight": part
            for expert, matrix in enumerate(value) for kind, part in zip(kinds, matrix.chunk(len(kinds)))}


class NextLayer:
    """A layer that attends over fc(norm(embedding), norm(state)); its own last state is what its norm makes."""

    def __init__(self, model, body, less_one):
        torch.manual_seed(3001)
        hidden = model.config.hidden_size
        config = copy.deepcopy(model.config)
        config.num_hidden_layers, config.vocab_size = 1, 8
        if less_one:
            config.layer_types = ["full_attention"]
        self.body, self.base = body(config).eval().float(), 1.0 if less_one else 0.0
        vector = lambda: 1 - self.base + 0.3 * torch.randn(hidden)
        self.w = {"mtp.fc.weight": 0.15 * torch.randn(hidden, 2 * hidden),
                  "mtp.pre_fc_norm_embedding.weight": vector(), "mtp.pre_fc_norm_hidden.weight": vector()}
        for name, value in self.body.named_parameters():
            value.copy_(vector()[: value.numel()] if "norm" in name else 0.15 * torch.randn_like(value))
            if "embed" not in name:
                self.w |= published(f"mtp.{name}", value)
        self.eps, self.head = model.config.rms_norm_eps, model.lm_head.weight

    def drafts(self, embed, tokens, states):
        weight = lambda name: self.base + self.w[f"mtp.{name}.weight"]
        scale = lambda x, name: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * weight(name)
        fed, joined, logits, drafts = tokens[1:], None, [], []
        for _ in range(DRAFTS):
            new = torch.cat([scale(embed[fed], "pre_fc_norm_embedding"), scale(states, "pre_fc_norm_hidden")], -1)
            new = new @ self.w["mtp.fc.weight"].t()
            joined = new if joined is None else torch.cat([joined, new])
            # Over everything that was fed so far: the layer is causal.
            hidden = self.body(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0]
            logits.append(hidden[-1] @ self.head.t())
            drafts.append(logits[-1].argmax())
            fed, states = drafts[-1][None], hidden[-1:]
        return torch.stack(drafts), torch.stack(logits)


@torch.no_grad()
def mtp(name, target, body, less_one):
    folder = TESTS / "goldens" / target
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval().float()
    embed = model.get_input_embeddings().weight
    tokens = load_file(folder / "golden.safetensors")["tokens"][:PROMPT].long()
    layer = NextLayer(model, body, less_one)
    all_drafts, all_logits = [], []
    for _ in range(STEPS):
        states = model.model(tokens[None]).last_hidden_state[0]
        tokens = torch.cat([tokens, (states[-1] @ layer.head.t()).argmax()[None]])
        drafts, logits = layer.drafts(embed, tokens, states)
        all_drafts.append(drafts)
        all_logits.append(logits)
    out = TESTS / "heads" / name
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: value.detach().contiguous().clone() for name, value in layer.w.items()}, out / "mtp.safetensors")
    finish(name, out, tokens, all_drafts, all_logits)


def finish(name, out, tokens, all_drafts, all_logits):
    save_file({
        "tokens": tokens.to(torch.int32), "drafts": torch.stack(all_drafts).to(torch.int32),
        "logits": torch.stack(all_logits).contiguous(),
    }, out / "golden.safetensors")
    for file in out.iterdir():
        file.chmod(0o644)
    gaps = [sorted(row.tolist())[-1] - sorted(row.tolist())[-2] for step in all_logits for row in step]
    print(f"{name}: {STEPS} steps, the two best logits at least {min(gaps):.4f} apart")


@torch.no_grad()
def eagle3(name, target, taps):
    folder = TESTS / "goldens" / target
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval().float()
    embed = model.get_input_embeddings().weight
    tokens = load_file(folder / "golden.safetensors")["tokens"][:PROMPT].long()
    head = Head(model.config.hidden_size, model.config.vocab_size)
    all_drafts, all_logits = [], []
    for _ in range(STEPS):
        result = model(tokens[None], output_hidden_states=True)
        states = torch.cat([result.hidden_states[tap][0] for tap in taps], -1)
        tokens = torch.cat([tokens, result.logits[0, -1].argmax()[None]])
        drafts, logits = head.drafts(embed, tokens, states)
        all_drafts.append(drafts)
        all_logits.append(logits)
    out = TESTS / "heads" / name
    out.mkdir(parents=True, exist_ok=True)
    config = dict(
        architectures=["LlamaForCausalLMEagle3"], model_type="llama", dtype="float32", hidden_act="silu",
        hidden_size=model.config.hidden_size, intermediate_size=INNER, num_hidden_layers=1, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=DIM, vocab_size=model.config.vocab_size, draft_vocab_size=DRAFT_VOCAB,
        max_position_embeddings=256, rms_norm_eps=EPS, rope_theta=THETA, tie_word_embeddings=False,
        eagle_config=dict(eagle_aux_hidden_state_layer_ids=taps))
    (out / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    save_file({name: value.contiguous() for name, value in head.w.items()}, out / "model.safetensors")
    finish(name, out, tokens, all_drafts, all_logits)


if __name__ == "__main__":
    for head in EAGLE3:
        eagle3(*head)
    for layer in MTP:
        mtp(*layer)
