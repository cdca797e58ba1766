"""Dacapo: language models recorded as device graphs and replayed, from Python.

>>> from dacapo import LLM, SamplingParams
>>> llm = LLM(device="cpu", max_context=1024)
>>> question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
>>> answer = llm.chat(question, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
>>> print(answer[0].outputs[0].text)
The capital of France is Paris.

The engine runs in this process on a thread of its own and releases the GIL. Names are those of vLLM where it has the
same thing.
"""

import os as _os

from ._dacapo import EngineError, InvalidInput, __version__, search_packages as _search_packages
from .array import Array
from .async_llm import AsyncLLM
from .graphs import Difference, Explanation, Graphs, Verification
from .llm import LLM
from .outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    StreamOutput,
)
from .sampling_params import SamplingParams, StructuredOutputsParams
from .tokenizer import Tokenizer

# The CUDA libraries of this environment: packages `nvidia-*` beside this one.
_search_packages(_os.path.dirname(_os.path.dirname(_os.path.abspath(__file__))))

__all__ = [
    "LLM",
    "Array",
    "AsyncLLM",
    "CompletionOutput",
    "Difference",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineError",
    "Explanation",
    "Graphs",
    "InvalidInput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StreamOutput",
    "StructuredOutputsParams",
    "Tokenizer",
    "Verification",
    "__version__",
]
