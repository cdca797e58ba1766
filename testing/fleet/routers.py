"""A router from PyPI in front of several workers: cache-aware routing against round-robin, a worker that is killed,
a worker that is drained.

    python testing/fleet/routers.py smg --dacapo target/release/dacapo --cache .cache/fleet [--quick]
"""

import argparse
import atexit
import concurrent.futures
import itertools
import os
import random
import re
import subprocess
import threading
import time

from workers import Failed, Worker, complete, free_port, get, until

parser = argparse.ArgumentParser()
parser.add_argument("router", choices=["smg", "sglang-router", "vllm-router"])
parser.add_argument("--dacapo", required=True)
parser.add_argument("--cache", required=True)
parser.add_argument("--quick", action="store_true")
args = parser.parse_args()

REQUESTS = int(os.environ.get("REQUESTS", 180 if args.quick else 1000))
PREFIXES = int(os.environ.get("PREFIXES", 24 if args.quick else 120))
WORKERS = int(os.environ.get("WORKERS", 3))
PREFIX_TOKENS = 1024
AT_ONCE = 8
# Bytes of a token in the small model's cache: 2 layers, keys and values, one head of 32 numbers of 2 bytes.
TOKEN_BYTES = int(os.environ.get("TOKEN_BYTES", 2 * 2 * 32 * 2))
# A worker's cache holds a third of the prefixes.
KV_CACHE = os.environ.get("KV_CACHE", str((PREFIXES // 3) * (PREFIX_TOKENS + 64) * TOKEN_BYTES))
# Each has its own package, with its own programs.
COMMANDS = {
    "smg": ["bin/smg", "launch"],
    "sglang-router": ["bin/python", "-m", "sglang_router.launch_router"],
    "vllm-router": ["bin/vllm-router"],
}


def workers():
    more = ["--kv-cache", KV_CACHE, "--max-batch", "32"]
    # After SIGTERM health checks fail while requests are still accepted, until the router has looked.
    more += ["--limit", "leave_ms=3000"]
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


def prompts(count, seed):
    """Prompts over shared prefixes, in random order."""
    dice = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz      "
    prefixes = ["".join(dice.choices(letters, k=PREFIX_TOKENS)) for _ in range(PREFIXES)]
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
    behind = workers()
    router = Router(behind, policy)
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
    behind = workers()
    router = Router(behind, "cache_aware")
    when = []

    def now():
        when.append(time.monotonic())
        happens(behind[0])

    try:
        results = load(router, count, 2, [(0.4, now)])
        failed = [(began, error) for began, error in results if error]
        # A router needs a moment to see that a worker is gone.
        late = [error for began, error in failed if began > when[0] + 5]
        assert behind[0].process.wait(timeout=60) in (0, -9), f"{what}: the worker's exit code"
        unclear = [error for _, error in failed if not error.clear]
        print(f"{what}: {count - len(failed)} of {count} answered, {len(failed)} told that they failed")
        assert not unclear, f"{what}: {unclear[0]}"
        assert not late, f"{what}: {len(late)} failed long after: {late[0]}"
        return failed
    finally:
        router.stop()
        for worker in behind:
            worker.stop()


def main():
    began = time.monotonic()
    aware, turns = rate("cache_aware"), rate("round_robin")
    print(f"prefix hit rate: cache-aware {aware:.2f}, round-robin {turns:.2f}, {aware / turns:.1f} times")
    assert aware >= 2 * turns, "cache-aware routing should find twice as much"
    count = REQUESTS // 2
    killed = disturbed("killed with SIGKILL", Worker.kill, count)
    assert len(killed) <= AT_ONCE, f"more failed than were under way: {killed[-1][1]}"
    drained = disturbed("drained with SIGTERM", Worker.drain, count)
    assert not drained, f"{len(drained)} failed: {drained[0][1]}"
    print(f"{args.router}: ok, {time.monotonic() - began:.0f} s")


main()
