"""Models that tests share, loaded at the first use."""

import functools
import os
import pathlib

from dacapo import LLM, SamplingParams

#: The root of the checkout.
ROOT = pathlib.Path(__file__).resolve().parents[3]
#: A checkpoint of a few hundred kilobytes.
TINY = str(ROOT / "crates/model/tests/goldens/qwen3")
#: The release build's tests, which take minutes.
FULL = os.environ.get("DACAPO_TESTS") == "full"

GREEDY = SamplingParams(temperature=0, max_tokens=16)


@functools.lru_cache(maxsize=None)
def smollm2() -> LLM:
    """SmolLM2-135M-Instruct."""
    return LLM(device="cpu", max_context=1024)


@functools.lru_cache(maxsize=None)
def tiny() -> LLM:
    """Random weights in the shape of a tiny checkpoint; its tokens are bytes and words.

    An answer does not depend on the other requests.
    """
    return LLM(TINY, load_format="dummy", device="cpu", max_context=256, max_batch=8, deterministic=True)


def ask(text: str) -> list:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]
