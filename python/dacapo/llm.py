"""A model in this process."""

from __future__ import annotations

import importlib
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Union

from ._dacapo import Submitted
from .calls import Client, Gathering, Messages, Params, PromptType, as_chats, as_embedding, as_prompts, cosine
from .graphs import Graphs
from .outputs import (
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    StreamOutput,
)
from .sampling_params import SamplingParams
from .tokenizer import Tokenizer

__all__ = ["LLM"]


class LLM:
    """A model in this process, on a thread of its own. Any number of threads may use it at once.

    `model` is what the command line takes: a folder, a `.gguf` file, a hub id, or nothing for SmolLM2-135M-Instruct. The
    options are the flags of the command line: `device="cpu"`, `threads=4`, `max_context=4096`, `max_batch=16`,
    `quantize="int4"`, `graph_backend_decode="disabled"`, … vLLM's `max_model_len`, `max_num_seqs`,
    `gpu_memory_utilization`, `quantization` and `kv_cache_dtype` are understood, too.

    >>> llm = LLM(device="cpu", max_context=1024)
    >>> [output] = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    >>> output.prompt, output.outputs[0].text
    ('The capital of France is', ' Paris.')
    >>> for piece in llm.stream("One, two, three,", SamplingParams(temperature=0, max_tokens=4)):
    ...     print(repr(piece.text))
    ' four'
    ','
    ' five'
    ','
    """

    def __init__(self, model: Optional[str] = None, *, seed: int = 0, **options: Any) -> None:
        self._client = Client(model, seed, options)

    # Answers.

    def generate(
        self,
        prompts: Union[PromptType, Sequence[PromptType]],
        sampling_params: Params = None,
        *,
        use_tqdm: Union[bool, Callable[..., Any]] = True,
        priority: int = 0,
        on_output: Optional[Callable[[RequestOutput], None]] = None,
    ) -> List[RequestOutput]:
        """Continues prompts: texts or lists of tokens; the answers come in their order.

        `sampling_params` are for all prompts, or a list with those of each. Without them the model's own are used, with
        at most 512 tokens. `on_output` is called with each answer as soon as it is complete; if it raises, the other
        prompts are cancelled.
        """
        made, texts = as_prompts(prompts)
        call = self._client.submit(made, sampling_params, stream=False, priority=priority)
        return self._finish(call, texts, use_tqdm, on_output)

    def chat(
        self,
        messages: Union[Messages, Sequence[Messages]],
        sampling_params: Params = None,
        *,
        use_tqdm: Union[bool, Callable[..., Any]] = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Optional[List[Dict[str, Any]]] = None,
        chat_template_kwargs: Optional[Mapping[str, Any]] = None,
        on_output: Optional[Callable[[RequestOutput], None]] = None,
    ) -> List[RequestOutput]:
        """Answers a conversation, or each of several, with the model's chat template."""
        made = as_chats(messages, tools, add_generation_prompt, continue_final_message, chat_template_kwargs)
        call = self._client.submit(made, sampling_params, stream=False, priority=0)
        return self._finish(call, [], use_tqdm, on_output)

    def stream(
        self, prompts: Union[PromptType, Sequence[PromptType]], sampling_params: Params = None
    ) -> Iterator[StreamOutput]:
        """As `generate`, piece by piece. Leaving the loop cancels what is not answered."""
        made, texts = as_prompts(prompts)
        call = self._client.submit(made, sampling_params, stream=True, priority=0)
        return self._pieces(call, texts)

    def chat_stream(
        self,
        messages: Union[Messages, Sequence[Messages]],
        sampling_params: Params = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Optional[List[Dict[str, Any]]] = None,
        chat_template_kwargs: Optional[Mapping[str, Any]] = None,
    ) -> Iterator[StreamOutput]:
        """As `chat`, piece by piece. Leaving the loop cancels what is not answered."""
        made = as_chats(messages, tools, add_generation_prompt, continue_final_message, chat_template_kwargs)
        call = self._client.submit(made, sampling_params, stream=True, priority=0)
        return self._pieces(call, [])

    def _finish(
        self,
        call: Submitted,
        texts: List[Optional[str]],
        use_tqdm: Union[bool, Callable[..., Any]],
        on_output: Optional[Callable[[RequestOutput], None]],
    ) -> List[RequestOutput]:
        gathering = Gathering(self._client, call, texts)
        bar = _bar(len(gathering.requests), use_tqdm)
        try:
            while (reply := call.next()) is not None:
                request, _ = gathering.add(reply)
                if request.finished:
                    bar.update(1)
                    if on_output is not None:
                        on_output(request)
        finally:
            call.cancel()
            bar.close()
        return gathering.requests

    def _pieces(self, call: Submitted, texts: List[Optional[str]]) -> Iterator[StreamOutput]:
        gathering = Gathering(self._client, call, texts)
        try:
            while (reply := call.next()) is not None:
                yield from gathering.add(reply)[1]
        finally:
            call.cancel()

    # Vectors.

    def embed(
        self,
        prompts: Union[PromptType, Sequence[PromptType]],
        *,
        pooling: str = "mean",
        normalize: bool = True,
        truncate_prompt_tokens: Optional[int] = None,
        use_tqdm: Union[bool, Callable[..., Any]] = True,
    ) -> List[EmbeddingRequestOutput]:
        """The vectors of prompts: of all their tokens (`pooling="mean"`) or the last one's (`"last"`).

        >>> llm = LLM(device="cpu", max_context=1024)
        >>> [output] = llm.embed("Hello", use_tqdm=False)
        >>> output.outputs.hidden_size
        576
        """
        made, _ = as_prompts(prompts)
        call = self._client.submit_embed(made, pooling, normalize, truncate_prompt_tokens)
        tokens = call.prompts()
        bar = _bar(len(tokens), use_tqdm)
        outputs: List[Any] = [None] * len(tokens)
        try:
            while (reply := call.next()) is not None:
                index, outputs[index] = as_embedding(call, tokens, reply)
                bar.update(1)
        finally:
            call.cancel()
            bar.close()
        return outputs

    def score(
        self,
        data_1: Union[PromptType, Sequence[PromptType]],
        data_2: Union[PromptType, Sequence[PromptType]],
        *,
        pooling: str = "mean",
        truncate_prompt_tokens: Optional[int] = None,
        use_tqdm: Union[bool, Callable[..., Any]] = True,
    ) -> List[ScoringRequestOutput]:
        """How well texts fit, as the cosine of their vectors: one text with each of several, or pair by pair."""
        first, second = (list(as_prompts(data)[0]) for data in (data_1, data_2))
        if len(first) not in (1, len(second)):
            raise ValueError(f"{len(first)} texts do not pair with {len(second)}")

        def prompts(made: List[Any]) -> List[Any]:
            return [one["text"] if "text" in one else one["tokens"] for one in made]

        vectors = self.embed(
            prompts(first + second),
            pooling=pooling,
            truncate_prompt_tokens=truncate_prompt_tokens,
            use_tqdm=use_tqdm,
        )
        scores = []
        for index, b in enumerate(vectors[len(first) :]):
            a = vectors[index if len(first) > 1 else 0]
            score = cosine(a.outputs.embedding, b.outputs.embedding)
            tokens = a.prompt_token_ids + b.prompt_token_ids
            scores.append(ScoringRequestOutput(b.request_id, ScoringOutput(score), tokens))
        return scores

    # The model.

    @property
    def graphs(self) -> Graphs:
        """Its device graphs: `explain`, `diff`, `verify`.

        >>> llm = LLM(device="cpu", max_context=1024)
        >>> print(str(llm.graphs.diff("decode/8/full", "decode/8/disabled")).splitlines()[1])
        backend: full → disabled
        """
        return Graphs(self._client.engine)

    @property
    def about(self) -> Dict[str, Any]:
        """Facts: model, device, memory, context, the graph configuration with its reasons."""
        return self._client.about

    def stats(self) -> Dict[str, Any]:
        """The state of the engine, and its last steps with their times in microseconds."""
        return self._client.stats()

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return Tokenizer(self._client.engine)

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model suggests; where it suggests nothing, greedy."""
        return self._client.default_params()

    def close(self) -> None:
        """Frees the model. Calls that are not answered fail."""
        self._client.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _NoBar:
    def update(self, _: int) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def _bar(total: int, use_tqdm: Union[bool, Callable[..., Any]]) -> Any:
    """A progress bar, if one is wanted and tqdm is installed."""
    make: Any = use_tqdm
    if use_tqdm is True:
        try:
            make = importlib.import_module("tqdm.auto").tqdm
        except ImportError:
            return _NoBar()
    return make(total=total, desc="Processed prompts", dynamic_ncols=True) if make else _NoBar()
