"""Where the time of a server under load goes, in about a minute: steps by bucket from the server's trace, and the same steps alone.

where.py DACAPO [CLIENTS] [OUT]    DACAPO: the program; CLIENTS: 64 or 256; OUT: a folder for the trace and the logs
where.py --trace FILE              only the table of a trace that exists

Part 1 serves the traffic `mixed` and prints for each bucket how many steps it had, their live tokens and rows, their milliseconds
from result to result, and how much of that the host needed for itself; what is left of the time is the device waiting for work.
Part 2 measures steps of one bucket alone and changes one thing at a time: what the server adds to its first line is contexts that are
longer, of different lengths, prompts in the middle of one, several prompts, and the clock under steady load.
"""
import collections, json, os, subprocess, sys, tempfile, time, urllib.request

MODEL = ["qwen3-8b", "--load-format", "dummy"]
URL, PORT = "http://127.0.0.1:%d", 8137
RAGGED = "20x1@180+20x1@400+14x1@900+7x1@1600+2x1@2900"
# What is measured alone: what it tells, steps, shape.
ALONE = (
    ("as BENCHMARKS has it", 5, "63x1@512+1x193"),
    ("steady load: power", 300, "63x1@512+1x193"),
    ("longer contexts", 300, "63x1@660+1x193"),
    ("of different lengths", 300, RAGGED + "+1x193"),
    ("and a prompt's later chunk", 300, RAGGED + "+1x193@1500"),
    ("and three prompts", 300, RAGGED + "+2x64+1x65@300"),
)


def table(path):
    records = [json.loads(line) for line in open(path) if line.rstrip().endswith("}")]
    # The ramp up and the end, where clients are missing, are left out.
    most = max(r["live_rows"] for r in records)
    full = [i for i, r in enumerate(records) if r["live_rows"] >= 0.9 * most]
    records = records[full[0]:full[-1] + 1]
    groups = collections.defaultdict(list)
    for r in records:
        groups[r["phase"], r["bucket_tokens"]].append(r)
    first, last = records[0], records[-1]
    wall = last["at"] + last["device_us"] - first["at"]
    mean = lambda rs, key: sum(r[key] for r in rs) / len(rs)
    tokens = sum(r["live_rows"] for r in records)
    print("phase    bucket  steps  tokens   rows      ms   p99  host ms  of the time")
    for key, rs in sorted(groups.items()):
        times = sorted(r["device_us"] for r in rs)
        print("%-8s %6d %6d %7.1f %6.1f %7.2f %5.1f %8.2f %11.1f%%" % (
            key[0], key[1], len(rs), mean(rs, "live_tokens"), mean(rs, "live_rows"), mean(rs, "device_us") * 1e-3,
            times[len(times) * 99 // 100] * 1e-3, mean(rs, "host_us") * 1e-3, 100 * sum(times) / wall))
    busy = sum(r["device_us"] for r in records)
    padded = sum(r["bucket_tokens"] - r["live_tokens"] for r in records if r["phase"] == "prefill")
    fed = sum(r["bucket_tokens"] for r in records if r["phase"] == "prefill")
    print("%.1f s, about %.0f rows/s; the device waited %.1f %% of it; padding of steps with prompts %.1f %%; not replayed: %d" % (
        wall * 1e-6, tokens / wall * 1e6, 100 * (1 - busy / wall), 100 * padded / max(fed, 1), sum(r["run"] != "replayed" for r in records)))
    print("share of steps with prompts:", dict(collections.Counter(r.get("share") for r in records if r["phase"] == "prefill")))


def serve(program, clients, folder):
    trace, url = os.path.join(folder, "steps.jsonl"), URL % PORT
    gap, count = ("20", "512") if clients <= 64 else ("38", "1024")
    log = open(os.path.join(folder, "serve.log"), "w")
    command = [program, "serve", *MODEL, "--max-batch", "256", "--port", str(PORT), "--target-itl", gap, "--trace", trace]
    server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(url + "/health/ready", timeout=1)
                break
            except OSError:
                time.sleep(0.1)
        subprocess.run([program, "bench", "serve", "--base-url", url, "--preset", "mixed", "--token-ids", "150000", "-c", str(clients),
                        "-n", count, "--seed", "1"], check=True)
    finally:
        server.terminate()
        server.wait()
    table(trace)


def alone(program, folder):
    print("\nsteps of 256 tokens alone, 63 rows that decode:")
    for what, steps, shape in ALONE:
        out = os.path.join(folder, "alone.json")
        command = [program, "bench", "prefill", *MODEL, "--max-context", "4096", "--graph-buckets-prefill", "256", "--steps", str(steps),
                   "--shape", shape, "--json", out]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(what, "FAILED", done.stderr[-300:])
            continue
        found = find(json.load(open(out)), "ms")
        print("%7.2f ms  %-26s %d steps of %s" % (found, what, steps, shape), flush=True)


def find(value, name):
    """The first number of that name in a JSON value."""
    if isinstance(value, dict):
        if isinstance(value.get(name), (int, float)):
            return value[name]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            found = find(item, name)
            if found is not None:
                return found
    return None


def main():
    if sys.argv[1] == "--trace":
        return table(sys.argv[2])
    folder = sys.argv[3] if len(sys.argv) > 3 else tempfile.mkdtemp()
    os.makedirs(folder, exist_ok=True)
    clients = int(sys.argv[2]) if len(sys.argv) > 2 else 64
    serve(sys.argv[1], clients, folder)
    if clients <= 64:
        alone(sys.argv[1], folder)


if __name__ == "__main__":
    main()
