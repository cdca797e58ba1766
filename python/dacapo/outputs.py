"""Results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional, Union

from .array import Array

__all__ = [
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "RequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StreamOutput",
]


@dataclass
class Logprob:
    """The log-probability of a token."""

    logprob: float
    #: Its place among all tokens, from 1; None if it is not among those asked for.
    rank: Optional[int]
    decoded_token: str


#: For each token: the token and its likeliest alternatives, by id.
Logprobs = List[Dict[int, Logprob]]


def array_of(token_ids: List[int], logprobs: Optional[Logprobs]) -> Array:
    """The log-probabilities of the tokens themselves."""
    return Array(of_token[token].logprob for token, of_token in zip(token_ids, logprobs or []))


@dataclass
class CompletionOutput:
    """One answer."""

    #: Which answer to the prompt, from 0.
    index: int
    text: str
    #: Without the token that ended it.
    token_ids: List[int]
    #: One per token, if asked for.
    logprobs: Optional[Logprobs] = None
    #: `stop`, `length` or `abort`; None while it is not complete.
    finish_reason: Optional[str] = None
    #: The stop string or stop token of the request that ended it.
    stop_reason: Union[int, str, None] = None

    def finished(self) -> bool:
        """Whether it is complete."""
        return self.finish_reason is not None

    @property
    def cumulative_logprob(self) -> Optional[float]:
        """The log-probability of the whole answer, if log-probabilities were asked for."""
        return None if self.logprobs is None else sum(self.token_logprobs)

    @property
    def token_logprobs(self) -> Array:
        """The log-probabilities of the tokens, as an array; empty unless asked for."""
        return array_of(self.token_ids, self.logprobs)


@dataclass
class RequestOutput:
    """The answers to one prompt."""

    request_id: str
    #: The text of the prompt; None if it was given as tokens.
    prompt: Optional[str]
    prompt_token_ids: List[int]
    outputs: List[CompletionOutput]
    finished: bool
    #: The first is None: nothing comes before it.
    prompt_logprobs: Optional[List[Optional[Dict[int, Logprob]]]] = None
    #: Prompt tokens that were found in the prefix cache.
    num_cached_tokens: int = 0

    @property
    def prompt_token_logprobs(self) -> Array:
        """The log-probabilities of the prompt's tokens after the first, as an array; empty unless asked for."""
        scored = [score for score in self.prompt_logprobs or [] if score is not None]
        return array_of(self.prompt_token_ids[1:], scored)


@dataclass
class StreamOutput:
    """More of an answer."""

    #: Which prompt of the list, from 0.
    prompt_index: int
    #: Which answer to the prompt, from 0.
    index: int
    #: The text since the last piece.
    text: str
    #: The tokens since the last piece.
    token_ids: List[int] = field(default_factory=list)
    logprobs: Optional[Logprobs] = None
    #: Set in the last piece of an answer.
    finish_reason: Optional[str] = None
    stop_reason: Union[int, str, None] = None


@dataclass
class EmbeddingOutput:
    """The vector of a prompt."""

    embedding: Array

    @property
    def hidden_size(self) -> int:
        """Its length."""
        return len(self.embedding)


@dataclass
class EmbeddingRequestOutput:
    """The vector of one prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: List[int]
    finished: bool = True


@dataclass
class ScoringOutput:
    """How well two texts fit."""

    score: float


@dataclass
class ScoringRequestOutput:
    """How well one pair of texts fits."""

    request_id: str
    outputs: ScoringOutput
    #: Of both texts.
    prompt_token_ids: List[int]
    finished: bool = True
