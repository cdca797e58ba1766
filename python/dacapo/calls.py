"""What `LLM` and `AsyncLLM` share: options to flags, prompts to requests, replies to outputs."""

from __future__ import annotations

import atexit
import itertools
import json
import weakref
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

from ._dacapo import Engine, EngineError, InvalidInput, Submitted, exiting
from .array import Array
from .outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    Logprobs,
    RequestOutput,
    StreamOutput,
)
from .sampling_params import SamplingParams

#: A text, tokens, or vLLM's dicts `{"prompt": …}` and `{"prompt_token_ids": …}`.
PromptType = Union[str, Sequence[int], Mapping[str, Any]]
#: A message is a dict with `role` and `content`.
Messages = Sequence[Mapping[str, Any]]
Params = Union[SamplingParams, Sequence[SamplingParams], None]

#: vLLM's names of options.
_ALIASES = {
    "max_model_len": "max_context",
    "max_num_seqs": "max_batch",
    "gpu_memory_utilization": "memory_share",
    "quantization": "quantize",
    "kv_cache_dtype": "kv_dtype",
}


def flags(options: Mapping[str, Any]) -> List[str]:
    """Keyword arguments as flags of the command line.

    >>> flags({"max_context": 512, "no_prefix_cache": True, "threads": None, "deterministic": False})
    ['--max-context=512', '--no-prefix-cache']
    >>> flags({"graph_config": {"decode": {"backend": "full"}}})
    ['--graph-config={"decode": {"backend": "full"}}']
    """
    made = []
    for name, value in options.items():
        flag = "--" + _ALIASES.get(name, name).replace("_", "-")
        if value is None or value is False:
            continue
        if value is True:
            made.append(flag)
            continue
        made.append(f"{flag}={json.dumps(value) if isinstance(value, dict) else value}")
    return made


class Client:
    """A loaded model, and the requests to it."""

    _open: weakref.WeakSet[Client] = weakref.WeakSet()

    def __init__(self, model: Optional[str], seed: int, options: Mapping[str, Any]) -> None:
        self.engine = Engine([*flags(options), *(["--", model] if model is not None else [])])
        self.about: Dict[str, Any] = json.loads(self.engine.about())
        self._seed = seed
        self._numbers = itertools.count()
        self._words: Dict[int, str] = {}
        Client._open.add(self)

    @classmethod
    def close_all(cls) -> None:
        """Ends every engine before the interpreter does; daemon threads that wait for one wait until then."""
        exiting()
        for client in list(cls._open):
            client.engine.close()

    def default_params(self) -> SamplingParams:
        """What the model suggests; where it suggests nothing, greedy."""
        made = {name: value for name, value in self.about["sampling"].items() if value is not None}
        return SamplingParams(**{"temperature": 0.0, "max_tokens": 512, **made})

    def submit(self, prompts: List[Any], params: Params, *, stream: bool, priority: int, waker: Any = None) -> Submitted:
        """Submits prompts as one call."""
        chosen = self.default_params() if params is None else params
        several = [chosen] if isinstance(chosen, SamplingParams) else list(chosen)
        if not isinstance(chosen, SamplingParams) and len(several) != len(prompts):
            raise InvalidInput(f"{len(several)} sampling parameters for {len(prompts)} prompts")
        made = []
        for one in several:
            fields = one.to_dict()
            # Requests without a seed draw different numbers, the same in every run of a program.
            fields.setdefault("seed", (self._seed + next(self._numbers) * 0x9E3779B97F4A7C15) % 2**64)
            made.append(fields)
        asked = {"prompts": prompts, "params": made, "priority": priority}
        return self.engine.submit(json.dumps(asked), stream, waker)

    def submit_embed(
        self, prompts: List[Any], pooling: str, normalize: bool, truncate: Optional[int], waker: Any = None
    ) -> Submitted:
        """Submits prompts whose vectors are wanted."""
        embed = {"pooling": pooling, "normalize": normalize, "truncate_prompt_tokens": truncate}
        return self.engine.submit(json.dumps({"prompts": prompts, "embed": embed}), False, waker)

    def stats(self) -> Dict[str, Any]:
        """The state of the engine."""
        stats: Dict[str, Any] = json.loads(self.engine.stats())
        return stats

    def word(self, token: int) -> str:
        """The text of one token."""
        found = self._words.get(token)
        if found is None:
            found = self._words[token] = self.engine.decode([token])
        return found

    def logprobs(self, scored: List[Any]) -> Logprobs:
        """Log-probabilities as vLLM has them."""
        made = []
        for token, logprob, top in scored:
            entry = {}
            ranks = {other: rank for rank, (other, _) in enumerate(top, 1)}
            entry[token] = Logprob(logprob, ranks.get(token), self.word(token))
            for other, value in top:
                entry.setdefault(other, Logprob(value, ranks[other], self.word(other)))
            made.append(entry)
        return made


atexit.register(Client.close_all)


def as_prompts(prompts: Union[PromptType, Sequence[PromptType]]) -> Tuple[List[Any], List[Optional[str]]]:
    """A prompt or a list of them, as requests and as texts.

    >>> as_prompts("Hello")
    ([{'text': 'Hello'}], ['Hello'])
    >>> as_prompts([[1, 2], {"prompt": "Hello"}])
    ([{'tokens': [1, 2]}, {'text': 'Hello'}], [None, 'Hello'])
    >>> as_prompts([1, 2])
    ([{'tokens': [1, 2]}], [None])
    """
    several: List[Any] = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
    if several and all(isinstance(token, int) for token in several):
        several = [several]
    made: List[Any] = []
    texts: List[Optional[str]] = []
    for prompt in several:
        if isinstance(prompt, Mapping):
            tokens, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
        elif isinstance(prompt, str):
            tokens, text = None, prompt
        else:
            tokens, text = prompt, None
        if tokens is None and text is None:
            raise InvalidInput("a prompt is a text, a list of tokens, or a dict with `prompt` or `prompt_token_ids`")
        made.append({"text": text} if tokens is None else {"tokens": [int(token) for token in tokens]})
        texts.append(text)
    return made, texts


def as_chats(
    messages: Union[Messages, Sequence[Messages]],
    tools: Optional[List[Dict[str, Any]]],
    add_generation_prompt: bool,
    continue_final_message: bool,
    chat_template_kwargs: Optional[Mapping[str, Any]],
) -> List[Any]:
    """A conversation or a list of them, as requests."""
    several: List[Any] = list(messages)
    if several and isinstance(several[0], Mapping):
        several = [several]
    rest = {
        "tools": tools,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "chat_template_kwargs": dict(chat_template_kwargs or {}),
    }
    return [{"chat": {"messages": list(one), **rest}} for one in several]


def error(problem: Tuple[str, bool]) -> Exception:
    """The exception of a request that failed."""
    text, invalid = problem
    return InvalidInput(text) if invalid else EngineError(text)


class Gathering:
    """The outputs of a call, from its replies."""

    def __init__(self, client: Client, call: Submitted, texts: List[Optional[str]]) -> None:
        self.client = client
        self.requests = []
        for index, (rendered, tokens) in enumerate(call.prompts()):
            text = rendered if rendered is not None else texts[index] if index < len(texts) else None
            self.requests.append(RequestOutput(str(call.id + index), text, tokens, [], False))

    def add(self, reply: Any) -> Tuple[RequestOutput, List[StreamOutput]]:
        """Adds a reply; returns its request and what is new. Raises if the request failed."""
        index, pieces, end = reply
        request = self.requests[index]
        fresh = [self._piece(index, request, piece) for piece in pieces]
        if end is not None:
            cached, scored, _, problem = end
            if problem is not None:
                raise error(problem)
            request.finished, request.num_cached_tokens = True, cached
            request.outputs.sort(key=lambda output: output.index)
            if scored:
                request.prompt_logprobs = [None, *self.client.logprobs(scored)]
        return request, fresh

    def _piece(self, at: int, request: RequestOutput, piece: Any) -> StreamOutput:
        choice, text, tokens, scored, finish, stop_text, stop_token = piece
        output = next((output for output in request.outputs if output.index == choice), None)
        if output is None:
            output = CompletionOutput(choice, "", [])
            request.outputs.append(output)
        logprobs = self.client.logprobs(scored) if scored else None
        output.text += text
        output.token_ids += tokens
        if logprobs is not None:
            output.logprobs = (output.logprobs or []) + logprobs
        output.finish_reason = finish
        output.stop_reason = stop_text if stop_text is not None else stop_token
        return StreamOutput(at, choice, text, tokens, logprobs, finish, output.stop_reason)


def as_embedding(
    call: Submitted, prompts: List[Tuple[Optional[str], List[int]]], reply: Any
) -> Tuple[int, EmbeddingRequestOutput]:
    """The place and the output of an embedding."""
    index, _, end = reply
    _, _, vector, problem = end
    if problem is not None:
        raise error(problem)
    return index, EmbeddingRequestOutput(str(call.id + index), EmbeddingOutput(Array(vector)), prompts[index][1])


def cosine(a: Iterable[float], b: Iterable[float]) -> float:
    """The product of two vectors of length 1."""
    return sum(x * y for x, y in zip(a, b))
