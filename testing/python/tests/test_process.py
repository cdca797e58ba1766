"""The end of a process: clean, interrupted, killed, forked; and the command line."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from .models import TINY

LOAD = f"""
import dacapo
llm = dacapo.LLM({TINY!r}, load_format="dummy", device="cpu", max_context=4096, max_batch=4, kv_cache="64MiB")
long = dacapo.SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
short = dacapo.SamplingParams(temperature=0, max_tokens=4)
"""


def start(program, **options):
    def hear_interrupts():
        # A shell that starts these tests in the background lets its children ignore them.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return subprocess.Popen(
        [sys.executable, "-c", LOAD + program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_interrupts,
        **options,
    )


def children(pid):
    """The processes that this one started."""
    return pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


class Ends(unittest.TestCase):
    def test_a_process_ends_cleanly_with_requests_under_way(self):
        program = """
stream = llm.stream("a", long)
next(stream)
import threading
threading.Thread(target=lambda: list(llm.stream("b", long)), daemon=True).start()
print("last line")
"""
        process = start(program)
        out, error = process.communicate(timeout=60)
        self.assertEqual((process.returncode, out.strip(), error), (0, "last line", ""))

    def test_ctrl_c_ends_a_call_and_the_engine_goes_on(self):
        program = """
print("ready", flush=True)
try:
    llm.generate(["a"] * 20000, long, use_tqdm=False)
except KeyboardInterrupt:
    print("interrupted", flush=True)
while llm.stats()["running"]:
    pass
print(len(llm.generate("a", short, use_tqdm=False)), flush=True)
"""
        process = start(program)
        self.assertEqual(process.stdout.readline().strip(), "ready")
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        sent = time.monotonic()
        self.assertEqual(process.stdout.readline().strip(), "interrupted")
        self.assertLess(time.monotonic() - sent, 5)
        out, error = process.communicate(timeout=60)
        self.assertEqual((process.returncode, out.strip(), error), (0, "1", ""))

    def test_a_killed_interpreter_leaves_nothing_behind(self):
        with tempfile.TemporaryDirectory() as folder:
            env = {**os.environ, "TMPDIR": folder, "DACAPO_CACHE": f"{folder}/cache", "HOME": folder}
            before = set(os.listdir("/dev/shm"))
            process = start('print("ready", flush=True)\nwhile True: list(llm.stream(["a"] * 8, long))', env=env)
            self.assertEqual(process.stdout.readline().strip(), "ready")
            time.sleep(0.2)
            self.assertEqual(children(process.pid), [], "the engine is a thread, not a process")
            process.kill()
            process.communicate(timeout=60)
            self.assertEqual(process.returncode, -signal.SIGKILL)
            left = [str(path) for path in pathlib.Path(folder).rglob("*") if path.is_file()]
            self.assertEqual(left, [])
            self.assertEqual(set(os.listdir("/dev/shm")) - before, set())

    def test_a_forked_process_gets_an_error_not_a_hang(self):
        program = """
import os
pid = os.fork()
if pid == 0:
    try:
        llm.generate("a", short, use_tqdm=False)
    except dacapo.EngineError as error:
        print("fork" in str(error), flush=True)
    raise SystemExit(0)
os.waitpid(pid, 0)
print(len(llm.generate("a", short, use_tqdm=False)))
"""
        process = start(program)
        out, error = process.communicate(timeout=60)
        self.assertEqual((process.returncode, out.split()), (0, ["True", "1"]), error)


class CommandLine(unittest.TestCase):
    def run_module(self, *args):
        return subprocess.run([sys.executable, "-m", "dacapo", *args], capture_output=True, text=True, timeout=60)

    def test_the_module_is_the_command_line(self):
        version = self.run_module("--version")
        self.assertEqual(version.returncode, 0)
        self.assertRegex(version.stdout, r"^dacapo [0-9.]+ \(\w+\)\n.* build\nfeatures: cpu .*cuda")
        self.assertEqual(self.run_module("--no-such-flag").returncode, 2)
        self.assertEqual(self.run_module("run", "no such model", "-p", "x").returncode, 2)
