"""A router from PyPI in front of several workers: cache-aware routing against round-robin, a worker that is killed,
a worker that is drained. Dynamo is started by deploy/dynamo/run, which starts its workers too.

    python testing/fleet/routers.py smg --dacapo target/release/dacapo --cache .cache/fleet [--quick]
"""

import argparse
import atexit
import concurrent.futures
import itertools
import os
import random
import re
import shutil
import subprocess
import threading
import time

from workers import THREADS, Failed, Foreign, Worker, complete, free_port, get, model_arguments, until

parser = argparse.ArgumentParser()
parser.add_argument("router", choices=["smg", "sglang-router", "vllm-router", "dynamo"])
parser.add_argument("--dacapo", required=True)
parser.add_argument("--cache", required=True)
parser.add_argument("--quick", action="store_true")
parser.add_argument("--part", action="append", choices=["aware", "turns", "killed", "drained"], help="only this part")
args = parser.parse_args()

# Dynamo tokenizes, so it needs a model with a tokenizer.
if args.router == "dynamo":
    os.environ.setdefault("MODEL", "smollm2")
REAL = os.environ.get("MODEL")
# A real model takes a second of a core for a prompt of 1,024 tokens.
SMALL = args.quick or REAL
REQUESTS = int(os.environ.get("REQUESTS", 180 if SMALL else 1000))
DISTURBED = int(os.environ.get("DISTURBED", REQUESTS // 2))
PREFIXES = int(os.environ.get("PREFIXES", 24 if SMALL else 120))
WORKERS = int(os.environ.get("WORKERS", 3))
PREFIX_TOKENS = 1024
AT_ONCE = 8
# What prompts are made of, each about a token: the small model's tokens are bytes, those of real models words.
WORDS = "time year people way day man thing woman life child world school state family student group country".split()
UNITS = [" " + word for word in WORDS] if REAL else list("abcdefghijklmnopqrstuvwxyz      ")
# Bytes of a token in the cache: layers, keys and values, heads, numbers of 2 bytes; of the small model, and of SmolLM2.
TOKEN_BYTES = int(os.environ.get("TOKEN_BYTES", 30 * 2 * 3 * 64 * 2 if REAL else 2 * 2 * 1 * 32 * 2))
# A worker's cache holds a third of the prefixes.
KV_CACHE = os.environ.get("KV_CACHE", str((PREFIXES // 3) * (PREFIX_TOKENS + 64) * TOKEN_BYTES))
# Each has its own package, with its own programs.
COMMANDS = {
    "smg": ["bin/smg", "launch"],
    "sglang-router": ["bin/python", "-m", "sglang_router.launch_router"],
    "vllm-router": ["bin/vllm-router"],
}


def worker_flags():
    # After SIGTERM health checks fail while requests are still accepted, until the router has looked.
    return ["--kv-cache", KV_CACHE, "--max-batch", "32", "--limit", "leave_ms=3000"]


def workers():
    more = worker_flags()
    started = [Worker(args.dacapo, args.cache, more) for _ in range(WORKERS)]
    return [worker.ready() for worker in started]


class Router:
    def __init__(self, behind, policy):
        self.port, venv = free_port(), os.path.join(args.cache, args.router)
        self.url = f"http://127.0.0.1:{self.port}"
        program, *rest = COMMANDS[args.router]
        command = [os.path.join(venv, program), *rest, "--policy", policy, "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--prometheus-port", str(free_port())]
        # Round-robin is to be compared with routing by prefix, not by load.
        if policy == "cache_aware":
            command += ["--balance-abs-threshold", "32"]
        command += ["--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
        command += ["--worker-urls", *[worker.url for worker in behind]]
        self.log = open(os.path.join(args.cache, f"{args.router}-{policy}.log"), "w")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        atexit.register(self.process.kill)
        self.model = re.search(r'"id":"([^"]+)"', get(behind[0].url + "/v1/models").replace(" ", "")).group(1)

        def answers():
            if self.process.poll() is not None:
                raise SystemExit(f"error: {args.router} ended; see {self.log.name}")
            try:
                return complete(self.url, self.model, "hello", 1) is not None
            except Failed:
                return False

        until(f"{args.router} answers", answers)

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log.close()


class Dynamo:
    """The frontend, sidecars and workers that deploy/dynamo/run starts."""

    def __init__(self, policy):
        self.port, logs = free_port(), os.path.abspath(os.path.join(args.cache, f"dynamo-{policy}"))
        shutil.rmtree(logs, ignore_errors=True)
        self.url = f"http://127.0.0.1:{self.port}"
        mode = "kv" if policy == "cache_aware" else "round-robin"
        model, *rest = model_arguments(args.cache)
        command = ["deploy/dynamo/run", model, "-n", str(WORKERS), "-p", str(self.port), "--", *rest]
        command += ["--device", "cpu", "--threads", THREADS, "--max-context", "2048", *worker_flags()]
        venv = os.path.join(args.cache, "dynamo")
        more = {"DACAPO": os.path.abspath(args.dacapo), "DYNAMO_VENV": os.path.abspath(venv), "LOGS": logs, "MODE": mode}
        # As above: a prefix to compute counts more than requests that are running.
        more |= {"DYN_ROUTER_PREFILL_LOAD_SCALE": "8", "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT": "8"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **more})
        atexit.register(self.process.terminate)
        self.behind = []
        for line in self.process.stdout:
            found = re.match(r"worker \d+: process (\d+), sidecar (\d+), (\S+)", line)
            if found:
                self.behind.append(Foreign(int(found.group(1)), int(found.group(2)), found.group(3)))
            elif line.startswith(self.url):
                break
        else:
            raise SystemExit(f"error: dynamo ended; see {logs}")
        # What it says later is not needed, but must not block it.
        threading.Thread(target=self.process.stdout.read, daemon=True).start()
        self.model = re.search(r'"id":"([^"]+)"', get(self.behind[0].url + "/v1/models").replace(" ", "")).group(1)

        def answers():
            try:
                return complete(self.url, self.model, "hello", 1) is not None
            except Failed:
                return False

        until("dynamo answers", answers)

    def stop(self):
        self.process.terminate()
        self.process.wait(timeout=60)


def fleet(policy):
    """Fresh workers and a router before them."""
    if args.router == "dynamo":
        router = Dynamo(policy)
        return router.behind, router
    behind = workers()
    return behind, Router(behind, policy)


def prompts(count, seed):
    """Prompts over shared prefixes, in random order."""
    dice = random.Random(seed)
    prefixes = ["".join(dice.choices(UNITS, k=PREFIX_TOKENS)) for _ in range(PREFIXES)]
    chosen = [prefixes[n % PREFIXES] for n in range(count)]
    dice.shuffle(chosen)
    return [f"{prefix} {number:06}" for number, prefix in enumerate(chosen)]


def load(router, count, seed, events=()):
    """Sends requests, several at once; `events` are (share of the requests sent, what happens then).
    Returns for each request when it began, and None or why it failed."""
    sent, due, lock = itertools.count(), sorted(events, key=lambda e: e[0]), threading.Lock()

    def one(prompt):
        number = next(sent)
        with lock:
            if due and number >= due[0][0] * count:
                due.pop(0)[1]()
        began = time.monotonic()
        try:
            complete(router.url, router.model, prompt, 4)
            return began, None
        except Failed as error:
            return began, error

    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(one, prompts(count, seed)))


def hits(behind):
    found = [worker.metrics() for worker in behind]
    looked_up = sum(metrics["dacapo_prefix_tokens_looked_up"] for metrics in found)
    return sum(metrics["dacapo_prefix_tokens_found"] for metrics in found) / looked_up


def rate(policy):
    """The prefix hit rate of fresh workers behind a router."""
    behind, router = fleet(policy)
    try:
        failed = [error for _, error in load(router, REQUESTS, 1) if error]
        assert not failed, f"{len(failed)} of {REQUESTS} requests failed: {failed[0]}"
        # The gauges are read from snapshots, ten a second.
        time.sleep(1)
        return hits(behind)
    finally:
        router.stop()
        for worker in behind:
            worker.stop()


def disturbed(what, happens, count):
    """The failures of a load during which something happens to the first worker."""
    behind, router = fleet("cache_aware")
    when = []

    def now():
        when.append(time.monotonic())
        happens(behind[0])

    try:
        results = load(router, count, 2, [(0.4, now)])
        failed = [(began, error) for began, error in results if error]
        # A router needs a moment to see that a worker is gone.
        late = [error for began, error in failed if began > when[0] + 5]
        behind[0].ended()
        unclear = [error for _, error in failed if not error.clear]
        print(f"{what}: {count - len(failed)} of {count} answered, {len(failed)} told that they failed", flush=True)
        assert not unclear, f"{what}: {unclear[0]}"
        assert not late, f"{what}: {len(late)} failed long after: {late[0]}"
        return failed
    finally:
        router.stop()
        for worker in behind:
            worker.stop()


def main():
    began = time.monotonic()
    parts, rates = args.part or ["aware", "turns", "killed", "drained"], {}
    for part, policy in [("aware", "cache_aware"), ("turns", "round_robin")]:
        if part in parts:
            rates[part] = rate(policy)
            print(f"{policy}: {REQUESTS} of {REQUESTS} answered, prefix hit rate {rates[part]:.2f}", flush=True)
    if len(rates) == 2:
        aware, turns = rates["aware"], rates["turns"]
        print(f"prefix hit rate: cache-aware {aware:.2f}, round-robin {turns:.2f}, {aware / turns:.1f} times")
        assert aware >= 2 * turns, "cache-aware routing should find twice as much"
    if "killed" in parts:
        killed = disturbed("killed with SIGKILL", lambda worker: worker.kill(), DISTURBED)
        assert len(killed) <= AT_ONCE, f"more failed than were under way: {killed[-1][1]}"
        if args.router == "dynamo":
            assert not killed, f"another worker goes on with a stream: {killed[0][1]}"
    if "drained" in parts:
        drained = disturbed("drained with SIGTERM", lambda worker: worker.drain(), DISTURBED)
        assert not drained, f"{len(drained)} failed: {drained[0][1]}"
    print(f"{args.router}: ok, {time.monotonic() - began:.0f} s")


main()
