"""A model for asyncio."""

from __future__ import annotations

import asyncio
from typing import Any, AsyncGenerator, AsyncIterator, Dict, List, Mapping, Optional, Sequence, Union

from ._dacapo import Submitted, Waker
from .calls import Client, Gathering, Messages, PromptType, as_chats, as_embedding, as_prompts
from .graphs import Graphs
from .llm import LLM
from .outputs import EmbeddingRequestOutput, RequestOutput, StreamOutput
from .sampling_params import SamplingParams
from .tokenizer import Tokenizer

__all__ = ["AsyncLLM"]


class AsyncLLM:
    """A model for asyncio. Nothing waits in the event loop, and no thread is started for a request.

    >>> import asyncio
    >>> async def main():
    ...     llm = AsyncLLM(device="cpu", max_context=1024)
    ...     async for output in llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=2)):
    ...         print(output.outputs[0].text)
    >>> asyncio.run(main())
     Paris
     Paris.

    `AsyncLLM(llm)` uses the model of an `LLM`; both may be used at once.
    """

    def __init__(self, model: Union[str, LLM, None] = None, *, seed: int = 0, **options: Any) -> None:
        if isinstance(model, LLM):
            if options:
                raise TypeError("options belong to the LLM")
            self._client = model._client
        else:
            self._client = Client(model, seed, options)
        self._loops: Dict[asyncio.AbstractEventLoop, _Loop] = {}

    def generate(
        self,
        prompt: PromptType,
        sampling_params: Optional[SamplingParams] = None,
        request_id: Optional[str] = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Continues a prompt; yields the answer so far with every new piece, at last complete.

        Leaving the loop cancels the request, and so does cancelling the task.
        """
        made, texts = as_prompts(prompt)
        return self._outputs(made, texts, sampling_params, request_id, priority)

    def chat(
        self,
        messages: Messages,
        sampling_params: Optional[SamplingParams] = None,
        request_id: Optional[str] = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Optional[List[Dict[str, Any]]] = None,
        chat_template_kwargs: Optional[Mapping[str, Any]] = None,
    ) -> AsyncIterator[RequestOutput]:
        """As `generate`, for a conversation."""
        made = as_chats(messages, tools, add_generation_prompt, continue_final_message, chat_template_kwargs)
        return self._outputs(made, [], sampling_params, request_id, 0)

    async def stream(
        self, prompts: Union[PromptType, Sequence[PromptType]], sampling_params: Optional[SamplingParams] = None
    ) -> AsyncIterator[StreamOutput]:
        """Continues prompts; yields each new piece by itself."""
        made, texts = as_prompts(prompts)
        async with _Closing(self._replies(made, texts, sampling_params, 0)) as replies:
            async for _, pieces in replies:
                for piece in pieces:
                    yield piece

    async def embed(
        self, prompt: PromptType, *, pooling: str = "mean", normalize: bool = True
    ) -> EmbeddingRequestOutput:
        """The vector of a prompt."""
        made, _ = as_prompts(prompt)
        loop = self._loop()
        call = self._client.submit_embed(made, pooling, normalize, None, loop.waker)
        tokens = call.prompts()
        async with _Closing(loop.replies(call)) as replies:
            async for reply in replies:
                return as_embedding(call, tokens, reply)[1]
        raise RuntimeError("an embedding ended without a vector")

    async def _outputs(
        self,
        made: List[Any],
        texts: List[Optional[str]],
        params: Optional[SamplingParams],
        request_id: Optional[str],
        priority: int,
    ) -> AsyncIterator[RequestOutput]:
        async with _Closing(self._replies(made, texts, params, priority)) as replies:
            async for request, _ in replies:
                if request_id is not None:
                    request.request_id = request_id
                yield request

    async def _replies(
        self, made: List[Any], texts: List[Optional[str]], params: Optional[SamplingParams], priority: int
    ) -> AsyncGenerator[Any, None]:
        loop = self._loop()
        call = self._client.submit(made, params, stream=True, priority=priority, waker=loop.waker)
        gathering = Gathering(self._client, call, texts)
        async with _Closing(loop.replies(call)) as replies:
            async for reply in replies:
                yield gathering.add(reply)

    def _loop(self) -> _Loop:
        loop = asyncio.get_running_loop()
        for ended in [known for known in self._loops if known.is_closed()]:
            del self._loops[ended]
        if loop not in self._loops:
            self._loops[loop] = _Loop(loop)
        return self._loops[loop]

    @property
    def graphs(self) -> Graphs:
        """Its device graphs."""
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

    def shutdown(self) -> None:
        """Frees the model. Calls that are not answered fail."""
        self._client.engine.close()


class _Closing:
    """Closes a generator at the end of a block, not when it is collected."""

    def __init__(self, generator: AsyncGenerator[Any, None]) -> None:
        self._generator = generator

    async def __aenter__(self) -> AsyncGenerator[Any, None]:
        return self._generator

    async def __aexit__(self, *_: object) -> None:
        await self._generator.aclose()


class _Loop:
    """The calls of one event loop. The engine makes a descriptor readable when there are replies."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.waker = Waker()
        self._events: Dict[int, asyncio.Event] = {}

    def _wake(self) -> None:
        for call in self.waker.ready():
            if call in self._events:
                self._events[call].set()

    async def replies(self, call: Submitted) -> AsyncGenerator[Any, None]:
        """The replies of a call; it is cancelled if they are not all taken."""
        event = self._events[call.id] = asyncio.Event()
        # Replies may have come before the event was known.
        event.set()
        if len(self._events) == 1:
            self._loop.add_reader(self.waker.fileno(), self._wake)
        try:
            while True:
                await event.wait()
                event.clear()
                taken, ended = call.take()
                for reply in taken:
                    yield reply
                if ended:
                    return
        finally:
            call.cancel()
            del self._events[call.id]
            if not self._events and not self._loop.is_closed():
                self._loop.remove_reader(self.waker.fileno())
