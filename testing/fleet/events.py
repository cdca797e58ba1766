"""KV events read with pyzmq and decoded with the types of vLLM's own wheel: what a subscriber has rebuilt predicts how
much of every prompt a server finds.

    python testing/fleet/events.py --dacapo target/release/dacapo --cache .cache/fleet
"""

import argparse
import glob
import json
import os
import random
import time
import urllib.request
import zipfile

import msgspec
import zmq

from workers import Worker, free_port, get

parser = argparse.ArgumentParser()
parser.add_argument("--dacapo", required=True)
parser.add_argument("--cache", required=True)
args = parser.parse_args()
PAGE = 16


def vllm_types():
    """The classes of events in the newest wheel; the rest of vLLM is not imported."""
    wheel = sorted(glob.glob(os.path.join(args.cache, "wheels", "vllm-*.whl")))[-1]
    source = zipfile.ZipFile(wheel).read("vllm/distributed/kv_events.py").decode()
    first, last = source.index("class EventBatch("), source.index("class KVEventAggregator")
    names = {"msgspec": msgspec, "Any": __import__("typing").Any, "ExternalBlockHash": bytes | int}
    exec(compile(source[first:last], wheel, "exec"), names)
    return os.path.basename(wheel), names


def ask(url, prompt, tokens=2):
    """How many tokens of a prompt the server found."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        usage = json.load(answer)["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


class Index:
    """What a router knows: which prefixes are cached."""

    def __init__(self, types):
        self.types = types
        self.decoder = msgspec.msgpack.Decoder(types["KVEventBatch"])
        self.blocks = {}
        self.next = 0

    def take(self, number, body):
        assert number == self.next, f"message {number} instead of {self.next}"
        self.next += 1
        for event in self.decoder.decode(body).events:
            if isinstance(event, self.types["AllBlocksCleared"]):
                self.blocks.clear()
            elif isinstance(event, self.types["BlockRemoved"]):
                for block in event.block_hashes:
                    del self.blocks[block]
            else:
                assert event.block_size == PAGE and event.medium == "GPU"
                before = self.blocks[event.parent_block_hash] if event.parent_block_hash is not None else ()
                for at, block in enumerate(event.block_hashes):
                    before += tuple(event.token_ids[at * PAGE : (at + 1) * PAGE])
                    self.blocks[block] = before

    def expected(self, prompt):
        """How much of a prompt should be found: whole pages, short of the last token."""
        tokens, known = tuple(prompt.encode()), set(self.blocks.values())
        pages = 0
        while (pages + 1) * PAGE < len(tokens) and tokens[: (pages + 1) * PAGE] in known:
            pages += 1
        return pages * PAGE


def main():
    wheel, types = vllm_types()
    events, replay = free_port(), free_port()
    more = ["--kv-events", f"tcp://127.0.0.1:{events}", "--kv-events-replay", f"tcp://127.0.0.1:{replay}"]
    more += ["--kv-cache", str(300 * PAGE * 256), "--max-batch", "8"]
    worker = Worker(args.dacapo, args.cache, more).ready()
    context = zmq.Context()
    index, dice = Index(types), random.Random(3)

    def catch_up():
        """Asks for everything from the first missing message on, as vLLM's subscribers do."""
        asker = context.socket(zmq.DEALER)
        asker.connect(f"tcp://127.0.0.1:{replay}")
        asker.send_multipart([b"", index.next.to_bytes(8, "big")])
        while True:
            assert asker.poll(10_000), "no answer to a replay"
            _, number, body = asker.recv_multipart()
            if number == b"\xff" * 8:
                break
            index.take(int.from_bytes(number, "big"), body)
        asker.close()

    def prompt():
        family = dice.randrange(12)
        text = "".join(random.Random(family).choices("abcdefgh ", k=400))
        return text[: dice.randrange(20, 400)] + "".join(dice.choices("xyz", k=dice.randrange(100)))

    try:
        checked = 0
        for part in range(6):
            subscriber = context.socket(zmq.SUB)
            subscriber.connect(f"tcp://127.0.0.1:{events}")
            subscriber.subscribe(b"")
            time.sleep(0.5)
            # Of every other part nothing is heard: then the gap is filled by a replay.
            deaf = part % 2 == 1
            for _ in range(100):
                ask(worker.url, prompt())
            heard = 0
            while not deaf and subscriber.poll(500):
                topic, number, body = subscriber.recv_multipart()
                number = int.from_bytes(number, "big")
                if number > index.next:
                    catch_up()
                elif number == index.next:
                    index.take(number, body)
                heard += 1
            assert deaf or heard > 50, f"{heard} messages"
            subscriber.close(linger=0)
            for _ in range(20):
                catch_up()
                one = prompt()
                expected = index.expected(one)
                found = ask(worker.url, one, 1)
                assert found == expected, f"{found} tokens found, {expected} expected"
                checked += expected > 0
        assert checked > 40, "too few prompts were cached at all"
        config = [line for line in get(worker.url + "/metrics").splitlines() if "cache_config_info{" in line]
        print(f"events: ok, {index.next} messages, {len(index.blocks)} blocks, decoded with {wheel}; {config[0]}")
    finally:
        worker.stop()


main()
