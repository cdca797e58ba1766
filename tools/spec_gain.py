#!/usr/bin/env python3
"""What drafts gain on ordinary prompts: greedy answers with and without them, in turns, one sequence at a time.

    python tools/spec_gain.py MODEL --spec eagle3:3 [--spec-model HEAD] [--device cuda] [--rounds 3]

Prints the share of drafts that were accepted, tokens for each step, answer tokens for a second of the whole request and their ratio, and in how
many answers the text differs (in bf16 a verified token may differ from a decoded one where two are nearly equal; --numerics exact: none).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

PROMPTS = """What is the capital of Australia, and why was it chosen?
Explain how a refrigerator keeps food cold.
Write a short poem about the sea in winter.
Give me three tips for sleeping better.
How do I boil an egg so that the yolk stays soft?
Write a Python function that returns the n-th Fibonacci number.
Summarise the story of Romeo and Juliet in four sentences.
What is the difference between weather and climate?
Translate to Spanish: Where is the nearest train station?
List five animals that live in the desert.
Why is the sky blue?
Write an email to my landlord about a broken heater.
Explain photosynthesis to a ten-year-old.
What should I pack for a week in the mountains?
Tell me a story about a fox who learns to swim.
How does a bill become a law in the United States?
Compare cats and dogs as pets.
What are the primary colours, and how do they mix?
Write a SQL query that counts orders per customer.
Give me a simple recipe for tomato soup.""".splitlines()


class Server:
    """A server of the model, with drafts or without."""

    def __init__(self, args, port, spec):
        command = [args.dacapo, "serve", args.model, "--device", args.device, "--port", str(port), "--max-batch", "1", "--no-prefix-cache"]
        command += ["--numerics", args.numerics] if args.numerics else []
        self.url, self.log = f"http://127.0.0.1:{port}", tempfile.TemporaryFile()
        self.process = subprocess.Popen(command + spec, stdout=self.log, stderr=self.log)
        for _ in range(600):
            try:
                urllib.request.urlopen(self.url + "/health/ready", timeout=1)
                return
            except OSError:
                time.sleep(0.2)
            if self.process.poll() is not None:
                self.log.seek(0)
                sys.exit(self.log.read().decode())
        sys.exit("the server does not become ready")

    def answer(self, prompt, tokens):
        """Text, tokens of the answer, drafts, accepted drafts, seconds."""
        asked = dict(messages=[dict(role="user", content=prompt)], max_tokens=tokens, temperature=0)
        request = urllib.request.Request(self.url + "/v1/chat/completions", json.dumps(asked).encode(), {"content-type": "application/json"})
        began = time.perf_counter()
        found = json.load(urllib.request.urlopen(request))
        seconds = time.perf_counter() - began
        usage = found["usage"]
        details = usage.get("completion_tokens_details") or {}
        taken, refused = details.get("accepted_prediction_tokens", 0), details.get("rejected_prediction_tokens", 0)
        return found["choices"][0]["message"]["content"], usage["completion_tokens"], taken + refused, taken, seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--spec", default="eagle3:3")
    parser.add_argument("--spec-model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--numerics")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dacapo", default="target/release/dacapo")
    args = parser.parse_args()
    spec = ["--spec", args.spec] + (["--spec-model", args.spec_model] if args.spec_model else [])
    servers = [Server(args, 8141, []), Server(args, 8142, spec)]
    try:
        for server in servers:
            server.answer(PROMPTS[0], args.tokens)
        turns = [[[server.answer(prompt, args.tokens) for prompt in PROMPTS] for server in servers] for _ in range(args.rounds)]
    finally:
        for server in servers:
            server.process.terminate()
            server.process.wait()
    plain, drafted = turns[0]
    tokens, asked, taken = (sum(a[at] for a in drafted) for at in (1, 2, 3))
    rates = [[sum(a[1] for a in found) / sum(a[4] for a in found) for found in turn] for turn in turns]
    median = [statistics.median(column) for column in zip(*rates)]
    ratios = [with_drafts / without for without, with_drafts in rates]
    differ = sum(a[0] != b[0] for a, b in zip(plain, drafted))
    print(f"{taken} of {asked} drafts accepted ({taken / max(asked, 1):.0%}); {tokens / max(tokens - taken, 1):.2f} tokens for each step")
    print(f"{median[0]:.1f} tok/s without drafts, {median[1]:.1f} with: {statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"{differ} of {len(PROMPTS)} answers differ")


if __name__ == "__main__":
    main()
