#!/usr/bin/env python3
"""A policy-gradient loop: Dacapo draws answers, torch turns their rewards into an adapter, Dacapo draws from it.

    python -m venv .venv && .venv/bin/pip install torch transformers peft gguf
    .venv/bin/python examples/policy_gradient.py $(dacapo pull smollm2) [--dacapo target/release/dacapo]

The model, SmolLM2-135M-Instruct, continues the same few words again and again; the reward of an answer is the share of its words
that begin with `s`. Every round (REINFORCE with the mean of the group as the baseline):

1. `POST /v1/completions` draws a group of answers that share the pages of their prompt. `return_token_ids` gives exactly the
   tokens that were drawn, the end of the text included, and `logprobs_mode` their probabilities under the distribution
   they were drawn from.
2. torch computes the same probabilities with a gradient. The ratio of the two is 1 up to rounding as long as both hold the
   same weights; it weighs each token, so the gradient is right also where they differ.
3. The adapter is saved and loaded under the same name. Pages of the old one are never used again.

It prints the reward before and after.
"""

import argparse
import json
import pathlib
import re
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = "Once upon a time there was a"
NAME = "policy"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path, help="a folder or a .gguf file that transformers reads")
    parser.add_argument("--dacapo", default="dacapo", help="the program")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--answers", type=int, default=64, help="answers in a group")
    parser.add_argument("--tokens", type=int, default=16, help="most tokens of an answer")
    parser.add_argument("--layers", type=int, default=8, help="layers that the adapter changes, the last ones")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--raise", dest="least", type=float, default=0.0, help="fail unless the reward rises by this much")
    return parser.parse_args()


def load(path, folder, args):
    """The model with a new adapter, and its tokenizer; the model itself is saved for the server."""
    where = dict(gguf_file=path.name) if path.suffix == ".gguf" else {}
    source = path.parent if where else path
    tokenizer = AutoTokenizer.from_pretrained(source, **where)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, **where)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    layers = model.config.num_hidden_layers
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=targets,
                        layers_to_transform=list(range(max(0, layers - args.layers), layers)))
    model = get_peft_model(model, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model, tokenizer


class Server:
    """`dacapo serve` with the operator's routes, as long as the block runs."""

    def __init__(self, program, model, root, args):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.command = [program, "serve", str(model), "--device", "cpu", "--port", str(self.port), "--admin-api",
                        "--weight-root", str(root), "--max-loras", "2", "--max-lora-rank", str(args.rank),
                        "--max-batch", str(args.answers), "--max-context", "256"]

    def __enter__(self):
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL)
        while self.process.poll() is None:
            try:
                self.call("/health", None)
                return self
            except OSError:
                time.sleep(0.1)
        raise SystemExit(f"the server ended with {self.process.returncode}")

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def call(self, route, body):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{route}", data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            if error.code == 503:
                raise
            raise SystemExit(f"{route}: {error.code} {error.read().decode()}") from None
        return json.loads(text) if text.startswith(b"{") else None

    def adopt(self, model, folder, again):
        """The adapter as it is now answers from here on."""
        model.save_pretrained(folder)
        if again:
            self.call("/v1/unload_lora_adapter", {"lora_name": NAME})
        self.call("/v1/load_lora_adapter", {"lora_name": NAME, "lora_path": str(folder)})

    def draw(self, prompt, seed, args):
        """A group of answers: their texts, their tokens and the log-probability of each."""
        answer = self.call("/v1/completions", {
            "model": NAME, "prompt": prompt, "n": args.answers, "max_tokens": args.tokens, "temperature": 1.0, "top_p": 1.0,
            "seed": seed, "return_token_ids": True, "logprobs": 0, "logprobs_mode": "processed_logprobs",
        })
        choices = answer["choices"]
        scores = [torch.tensor(choice["logprobs"]["token_logprobs"]) for choice in choices]
        return [choice["text"] for choice in choices], [choice["token_ids"] for choice in choices], scores


def reward(text):
    """The share of words that begin with an s."""
    words = re.findall(r"[a-z]+", text.lower())
    return sum(word.startswith("s") for word in words) / max(len(words), 1)


def loss_of(model, prompt, tokens, drawn, advantages):
    """The loss of a group, and how far the two log-probabilities are apart."""
    longest = max(map(len, tokens))
    rows = torch.tensor([prompt + answer + [0] * (longest - len(answer)) for answer in tokens])
    real = torch.tensor([[1.0] * len(answer) + [0.0] * (longest - len(answer)) for answer in tokens])
    drawn = torch.nn.utils.rnn.pad_sequence(drawn, batch_first=True)
    # Padding stands at the end, where no other token sees it.
    logits = model(rows[:, :-1], logits_to_keep=longest).logits.float()
    scores = logits.log_softmax(-1).gather(-1, rows[:, len(prompt):, None]).squeeze(-1)
    ratio = (scores.detach() - drawn).exp().clamp(max=2.0)
    loss = -(advantages[:, None] * ratio * scores * real).sum() / real.sum()
    return loss, (((scores - drawn).abs() * real).sum() / real.sum()).item()


def main():
    args = arguments()
    torch.manual_seed(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        model, tokenizer = load(args.model, folder / "base", args)
        learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimiser = torch.optim.AdamW(learned, lr=args.rate, weight_decay=0.0)
        prompt = tokenizer(PROMPT)["input_ids"]
        rewards = []
        with Server(args.dacapo, folder / "base", folder, args) as server:
            began = time.monotonic()
            for turn in range(args.rounds + 1):
                server.adopt(model, folder / "adapter", again=turn > 0)
                at = time.monotonic()
                texts, tokens, drawn = server.draw(prompt, args.seed * 1000 + turn * args.answers, args)
                drawing = time.monotonic() - at
                got = torch.tensor([reward(text) for text in texts])
                rewards.append(got.mean().item())
                line = f"round {turn:2}: reward {rewards[-1]:.3f}, {sum(map(len, tokens))} tokens drawn in {drawing:.1f} s"
                if turn == args.rounds:
                    print(line)
                    break
                loss, apart = loss_of(model, prompt, tokens, drawn, (got - got.mean()) / (got.std() + 1e-6))
                optimiser.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(learned, 1.0)
                optimiser.step()
                print(f"{line}, learned in {time.monotonic() - at - drawing:.1f} s; log-probabilities are {apart:.4f} apart")
            print(f"an answer now: {PROMPT}{texts[0]!r}")
        print(f"reward before {rewards[0]:.3f}, after {rewards[-1]:.3f}, in {time.monotonic() - began:.0f} s")
        if rewards[-1] < rewards[0] + args.least:
            raise SystemExit("the reward did not rise")


if __name__ == "__main__":
    main()
