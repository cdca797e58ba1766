"""Workers for the tests of a fleet: servers with a small model, and requests to them."""

import atexit
import http.client
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request

# Small enough that prompts of 1,024 tokens take milliseconds; its weights are random, its tokens are bytes.
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 510,
    "eos_token_id": 511,
}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def until(what, happens, seconds=120):
    """Waits until `happens` returns something true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            found = happens()
            if found:
                return found
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.1)
    raise SystemExit(f"error: not within {seconds} s: {what}")


def get(url, timeout=10):
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        return answer.read().decode()


def model_arguments(cache):
    """The model of MODEL, or a folder with the small one."""
    if os.environ.get("MODEL"):
        return [os.environ["MODEL"]]
    folder = os.path.join(cache, "tiny")
    os.makedirs(folder, exist_ok=True)
    path, text = os.path.join(folder, "config.json"), json.dumps(TINY)
    # Written once: workers that are starting read it.
    if not os.path.exists(path) or open(path).read() != text:
        with open(path, "w") as file:
            file.write(text)
    return [folder, "--load-format", "dummy"]


# Threads of a worker.
THREADS = os.environ.get("THREADS", "1")


class Worker:
    """A `dacapo serve` on a free port."""

    def __init__(self, dacapo, cache, more=(), port=None):
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [dacapo, "serve", *model_arguments(cache), "--device", "cpu", "--threads", THREADS]
        command += ["--port", str(self.port), "--max-context", "2048", *more]
        self.log = open(os.path.join(cache, f"worker-{self.port}.log"), "w")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        # A test that fails leaves no worker behind.
        atexit.register(self.process.kill)

    def ready(self):
        def healthy():
            if self.process.poll() is not None:
                raise SystemExit(f"error: a worker ended; see {self.log.name}")
            return get(self.url + "/health")

        until("a worker is ready", healthy)
        return self

    def metrics(self):
        """The metrics without labels, by name."""
        lines = (line.split() for line in get(self.url + "/metrics").splitlines() if "#" not in line)
        return {line[0]: float(line[1]) for line in lines if len(line) == 2 and "{" not in line[0]}

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def drain(self):
        """SIGTERM; the worker must end by itself, without an error."""
        self.process.send_signal(signal.SIGTERM)

    def ended(self):
        """Waits for its end, which must be one that was asked for."""
        code = self.process.wait(timeout=60)
        assert code in (0, -9), f"the worker's exit code is {code}"

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                self.kill()
        self.log.close()


class Foreign:
    """A worker that another program started, and the process that registers it."""

    def __init__(self, pid, sidecar, url):
        self.pid, self.sidecar, self.url = pid, sidecar, url

    metrics = Worker.metrics

    def kill(self):
        """Both, as when their machine is lost."""
        os.kill(self.sidecar, signal.SIGKILL)
        os.kill(self.pid, signal.SIGKILL)

    def drain(self):
        os.kill(self.pid, signal.SIGTERM)

    def ended(self):
        """Waits for its end, which its parent sees."""
        until("a worker ends", lambda: not os.path.exists(f"/proc/{self.pid}"), 60)

    def stop(self):
        """Its own program ends it."""


class Failed(Exception):
    """A request that was not answered: `clear` if the client was told so."""

    def __init__(self, what, clear):
        super().__init__(what)
        self.clear = clear


def complete(url, model, prompt, tokens):
    """The text of a streamed completion."""
    host = url.removeprefix("http://")
    wire = http.client.HTTPConnection(host, timeout=120)
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 0}
    try:
        wire.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = wire.getresponse()
        if answer.status != 200:
            raise Failed(f"status {answer.status}: {answer.read(300)!r}", True)
        text, finish = "", None
        for line in answer:
            line = line.decode().strip()
            if not line.startswith("data: "):
                continue
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                if finish is None:
                    raise Failed("a stream ended without a reason", False)
                return text
            event = json.loads(data)
            if "error" in event:
                raise Failed(f"an error in the stream: {event['error']}", True)
            for choice in event["choices"]:
                text += choice["text"]
                finish = choice.get("finish_reason") or finish
        # The connection ended before the stream did, which every client sees.
        raise Failed("the stream broke off", True)
    except (OSError, http.client.HTTPException) as error:
        raise Failed(f"the connection failed: {error!r}", True) from error
    finally:
        wire.close()
