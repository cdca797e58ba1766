#!/usr/bin/env python3
"""Trains an EAGLE-3 head for a small model on its own answers and writes it as the usual checkpoint.

    python -m venv .venv && .venv/bin/pip install torch transformers safetensors gguf
    .venv/bin/python tools/train_eagle3.py MODEL OUT [--minutes 15] [--device cuda]
    dacapo run MODEL --spec eagle3:3 --spec-model OUT

MODEL is a folder or a .gguf file that `transformers` reads, such as SmolLM2-135M-Instruct. The prompts are made here from lists of
words, and the answers are drawn from the model, so nothing is downloaded. A third of the time goes to answers, the rest to training. The head
is trained on its own drafts: for --depth tokens it continues from its own states, as it will when it drafts, and
learns the model's distribution over the tokens that are most frequent in the answers (--draft-vocab). At the end it prints
how often its first, second, … draft is what the model says next, on answers that it was not trained on. With
`--minutes 0.5 --answers 4 --length 48` it takes a minute on a CPU, to see that everything fits together.
"""

import argparse
import json
import pathlib
import random
import time

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

THINGS = """rivers bread clocks volcanoes libraries bees bridges glass music rain trains gardens chess salt whales maps
paper windmills coffee snow computers birds markets lighthouses cheese dreams islands bicycles stars wool""".split()
TASKS = [
    "Explain how {a} are related to {b}.", "Write a short story about {a} and {b}.", "List five facts about {a}.",
    "Describe {a} to a child.", "Write a Python function that sorts a list of {a} by name.",
    "Translate to French: I like {a} and {b}.", "What is the difference between {a} and {b}?",
    "Write a polite letter that asks for {a}.", "Summarise the history of {a} in a paragraph.",
    "Give me a recipe that has something to do with {a}.", "Compare {a} with {b} in a table.", "Why do people like {a}?",
]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--answers", type=int, default=64, help="answers that are drawn at once")
    parser.add_argument("--length", type=int, default=384, help="tokens of an answer")
    parser.add_argument("--depth", type=int, default=4, help="drafts that are trained one after the other")
    parser.add_argument("--draft-vocab", type=int, default=16384)
    parser.add_argument("--rate", type=float, default=4e-4)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def load(path, device):
    where = dict(gguf_file=path.name) if path.suffix == ".gguf" else {}
    folder = path.parent if where else path
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=dtype, **where).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", **where)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model, tokenizer


def draw(model, tokenizer, count, length):
    """Prompts and the model's answers, as rows of token ids without padding."""
    asked = []
    for _ in range(count):
        a, b = random.sample(THINGS, 2)
        asked.append(random.choice(TASKS).format(a=a, b=b))
    if tokenizer.chat_template:
        turn = lambda text: [{"role": "user", "content": text}]
        asked = [tokenizer.apply_chat_template(turn(text), tokenize=False, add_generation_prompt=True) for text in asked]
    batch = tokenizer(asked, return_tensors="pt", padding=True).to(model.device)
    with torch.no_grad():
        rows = model.generate(**batch, do_sample=True, temperature=0.8, max_new_tokens=length,
                              pad_token_id=tokenizer.pad_token_id)
    padding = batch.attention_mask.shape[1] - batch.attention_mask.sum(1)
    texts = []
    for row, skip in zip(rows.tolist(), padding.tolist()):
        row = row[skip:]
        while len(row) > 1 and row[-1] == row[-2] == tokenizer.pad_token_id:
            row.pop()
        texts.append(torch.tensor(row))
    return texts


def norm(x, weight, eps):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


class Head(torch.nn.Module):
    """One layer of the model's own shape; parameters have the names of the checkpoint."""

    def __init__(self, config, vocab):
        super().__init__()
        self.c, width = config, config.hidden_size
        self.heads, self.kv = config.num_attention_heads, config.num_key_value_heads
        self.dim = getattr(config, "head_dim", None) or width // self.heads
        self.theta = float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 0)
                           or getattr(config, "rope_theta", 10000.0))
        matrix = lambda rows, cols: torch.nn.Parameter(torch.randn(rows, cols) * cols ** -0.5)
        vector = lambda: torch.nn.Parameter(torch.ones(width))
        self.w = torch.nn.ParameterDict({
            "fc": matrix(width, 3 * width), "input_layernorm": vector(), "hidden_norm": vector(),
            "q_proj": matrix(self.heads * self.dim, 2 * width), "k_proj": matrix(self.kv * self.dim, 2 * width),
            "v_proj": matrix(self.kv * self.dim, 2 * width), "o_proj": matrix(width, self.heads * self.dim),
            "post_attention_layernorm": vector(), "gate_proj": matrix(config.intermediate_size, width),
            "up_proj": matrix(config.intermediate_size, width), "down_proj": matrix(width, config.intermediate_size),
            "norm": vector(), "lm_head": matrix(vocab, width),
        })

    def rotate(self, x, positions):
        frequencies = self.theta ** (-torch.arange(0, self.dim, 2, device=x.device).float() / self.dim)
        angles = positions.float()[:, None] * frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x[..., : self.dim // 2], x[..., self.dim // 2:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, embeds, hidden, step, past):
        """Draft `step` at every position at once. `past` has keys and values of the steps before: those of step 0 are seen
        by every later position, the others only by drafts that started at the same one."""
        w, eps, tokens = self.w, self.c.rms_norm_eps, hidden.shape[0]
        x = torch.cat([norm(embeds, w["input_layernorm"], eps), norm(hidden, w["hidden_norm"], eps)], -1)
        split = lambda y, heads: y.view(tokens, heads, self.dim).transpose(0, 1)
        positions = torch.arange(tokens, device=x.device) + step
        q = self.rotate(split(x @ w["q_proj"].t(), self.heads), positions)
        k = self.rotate(split(x @ w["k_proj"].t(), self.kv), positions)
        past.append((k, split(x @ w["v_proj"].t(), self.kv)))
        group = self.heads // self.kv
        past_k, past_v = ([pair[i].repeat_interleave(group, 0) for pair in past] for i in (0, 1))
        scores = q @ past_k[0].transpose(1, 2)
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
        own = [(q * k).sum(-1, keepdim=True) for k in past_k[1:]]
        share = (torch.cat([scores, *own], -1).float() * self.dim ** -0.5).softmax(-1).to(x.dtype)
        mixed = share[..., :tokens] @ past_v[0]
        for at, v in enumerate(past_v[1:]):
            mixed = mixed + share[..., tokens + at, None] * v
        hidden = hidden + mixed.transpose(0, 1).reshape(tokens, -1) @ w["o_proj"].t()
        h = norm(hidden, w["post_attention_layernorm"], eps)
        hidden = hidden + (F.silu(h @ w["gate_proj"].t()) * (h @ w["up_proj"].t())) @ w["down_proj"].t()
        return norm(hidden, w["norm"], eps) @ w["lm_head"].t(), hidden


def taps(layers):
    return [2, layers // 2, layers - 3] if layers > 5 else [0, layers // 2, layers - 1]


@torch.no_grad()
def observe(model, text, kept, layers):
    """Embeddings, states and the distributions over the kept tokens, of one text."""
    text = text.to(model.device)
    result = model(text[None], output_hidden_states=True)
    states = torch.cat([result.hidden_states[layer][0] for layer in layers], -1)
    return text, model.get_input_embeddings()(text), states, result.logits[0], kept.to(model.device)


def losses(head, seen, depth):
    """For each draft: the divergence from the model's distribution, and how often the best token is the model's."""
    text, embeds, states, logits, kept = seen
    hidden, past, found = states @ head.w["fc"].t(), [], []
    for step in range(depth):
        usable = len(text) - 1 - step
        if usable < 2:
            break
        # The pair at position p: the token at p + 1 + step, and the state of p or of the draft before.
        fed = embeds[1 + step:]
        hidden, past = hidden[:usable], [(k[:, :usable], v[:, :usable]) for k, v in past]
        scores, hidden = head(fed, hidden, step, past)
        wanted = logits[1 + step:]
        best = wanted.argmax(-1)
        known = torch.isin(best, kept)
        if known.any():
            target = wanted[:, kept].float().softmax(-1)
            loss = -(target * scores.float().log_softmax(-1)).sum(-1)[known].mean()
            found.append((loss, (kept[scores.argmax(-1)] == best).float().mean()))
    return found


def write(head, model, kept, layers, out):
    c = model.config
    out.mkdir(parents=True, exist_ok=True)
    middle = {"q_proj": "self_attn.", "k_proj": "self_attn.", "v_proj": "self_attn.", "o_proj": "self_attn.",
              "gate_proj": "mlp.", "up_proj": "mlp.", "down_proj": "mlp."}
    outside = {"fc", "norm", "lm_head"}
    name = lambda key: f"{key}.weight" if key in outside else f"midlayer.{middle.get(key, '')}{key}.weight"
    tensors = {name(key): value.detach().to(torch.bfloat16).cpu().contiguous() for key, value in head.w.items()}
    known = torch.zeros(c.vocab_size, dtype=torch.bool)
    known[kept] = True
    tensors |= {"d2t": kept - torch.arange(len(kept)), "t2d": known}
    config = dict(
        architectures=["LlamaForCausalLMEagle3"], model_type="llama", torch_dtype="bfloat16", hidden_act="silu",
        hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_hidden_layers=1,
        num_attention_heads=head.heads, num_key_value_heads=head.kv, head_dim=head.dim, vocab_size=c.vocab_size,
        draft_vocab_size=len(kept), max_position_embeddings=c.max_position_embeddings, rms_norm_eps=c.rms_norm_eps,
        rope_theta=head.theta, tie_word_embeddings=False, eagle_config=dict(eagle_aux_hidden_state_layer_ids=layers))
    (out / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    save_file(tensors, out / "model.safetensors")


def main():
    args = arguments()
    start, limit = time.time(), args.minutes * 60
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    model, tokenizer = load(args.model, args.device)
    texts = []
    while not texts or time.time() - start < limit / 3:
        texts += [text for text in draw(model, tokenizer, args.answers, args.length) if len(text) > args.depth + 3]
        print(f"{time.time() - start:5.0f} s: {len(texts)} answers, {sum(map(len, texts))} tokens", flush=True)
    counts = torch.bincount(torch.cat(texts), minlength=model.config.vocab_size)
    kept = counts.topk(min(args.draft_vocab, model.config.vocab_size)).indices.sort().values
    layers = taps(model.config.num_hidden_layers)
    head = Head(model.config, len(kept)).to(model.device, model.dtype)
    held = max(1, len(texts) // 20)
    random.shuffle(texts)
    tested, trained = texts[:held], texts[held:] or texts
    wide = [value.detach().float().requires_grad_() for value in head.parameters()]
    optimiser = torch.optim.AdamW(wide, lr=args.rate, betas=(0.9, 0.95), weight_decay=0.0)
    step = 0
    while step < 2 or time.time() - start < limit:
        done = min(1.0, (time.time() - start) / max(limit, 1e-9))
        for group in optimiser.param_groups:
            group["lr"] = args.rate * min(1.0, (step + 1) / 50) * (1.0 - 0.9 * done)
        for text in random.sample(trained, min(8, len(trained))):
            found = losses(head, observe(model, text, kept, layers), args.depth)
            if found:
                sum(loss * 0.8 ** at for at, (loss, _) in enumerate(found)).backward()
        # Weights are updated in float32, whatever they are used in.
        for own, value in zip(wide, head.parameters()):
            own.grad = value.grad.float() / 8 if value.grad is not None else None
        torch.nn.utils.clip_grad_norm_(wide, 1.0)
        optimiser.step()
        with torch.no_grad():
            for own, value in zip(wide, head.parameters()):
                value.copy_(own)
                value.grad = None
        step += 1
        if step % 50 == 1:
            print(f"{time.time() - start:5.0f} s: step {step}, losses "
                  + " ".join(f"{loss.item():.3f}" for loss, _ in found), flush=True)
    with torch.no_grad():
        agreed = [losses(head, observe(model, text, kept, layers), args.depth) for text in tested]
    for at in range(args.depth):
        rates = [found[at][1].item() for found in agreed if at < len(found)]
        if rates:
            print(f"draft {at + 1}: {sum(rates) / len(rates):.1%} of {len(rates)} answers' tokens, if those before were right")
    write(head, model, kept, layers, args.out)
    print(f"{args.out}: {step} steps on {len(trained)} answers in {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
