"""How answers are chosen, and when they end."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Union

__all__ = ["SamplingParams", "StructuredOutputsParams"]


@dataclass
class StructuredOutputsParams:
    """Restricts answers; one of these.

    `json` is a schema: a dict, its text, or a pydantic model.

    >>> StructuredOutputsParams(choice=["yes", "no"]).to_dict()
    {'choice': ['yes', 'no']}
    """

    json: Union[Dict[str, Any], str, type, None] = None
    regex: Optional[str] = None
    choice: Optional[List[str]] = None
    #: A Lark grammar.
    grammar: Optional[str] = None
    #: Any JSON object.
    json_object: Optional[bool] = None

    def to_dict(self) -> Dict[str, Any]:
        """What is set, with a pydantic model as its schema."""
        made = {name: value for name, value in vars(self).items() if value is not None}
        if "json" in made:
            made["json"] = _schema(made["json"])
        return made


def _schema(schema: Any) -> Union[Dict[str, Any], str]:
    of_model = getattr(schema, "model_json_schema", None)
    if of_model is not None:
        made: Dict[str, Any] = of_model()
        return made
    if isinstance(schema, (dict, str)):
        return schema
    raise TypeError(f"a JSON schema is a dict, its text or a pydantic model, not {type(schema).__name__}")


@dataclass
class SamplingParams:
    """How answers are chosen, and when they end; names and defaults are vLLM's.

    >>> params = SamplingParams(temperature=0.8, top_p=0.95)
    >>> params.max_tokens, params.n
    (16, 1)
    """

    #: Answers per prompt.
    n: int = 1
    #: 0 always takes the likeliest token.
    temperature: float = 1.0
    top_p: float = 1.0
    #: 0 and -1 are all tokens.
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    #: The same seed gives the same answer. None is a different one for each prompt of an `LLM`.
    seed: Optional[int] = None
    #: Strings that end an answer; they are not part of it.
    stop: Union[str, List[str], None] = None
    stop_token_ids: Optional[List[int]] = None
    #: None is as many as fit the context.
    max_tokens: Optional[int] = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    #: Log-probabilities of the tokens, with this many alternatives, at most 20.
    logprobs: Optional[int] = None
    #: The same for the tokens of the prompt.
    prompt_logprobs: Optional[int] = None
    #: Added to the logits of tokens.
    logit_bias: Optional[Dict[int, float]] = None
    #: Keep the last tokens of a prompt only.
    truncate_prompt_tokens: Optional[int] = None
    #: Restricts answers; a dict or a pydantic model is a JSON schema.
    structured_outputs: Union[StructuredOutputsParams, Dict[str, Any], type, None] = field(default=None)

    def to_dict(self) -> Dict[str, Any]:
        """The parameters as the engine reads them."""
        made = {name: value for name, value in vars(self).items() if value is not None}
        if isinstance(self.stop, str):
            made["stop"] = [self.stop]
        restrict = self.structured_outputs
        if restrict is not None:
            if not isinstance(restrict, StructuredOutputsParams):
                restrict = StructuredOutputsParams(json=restrict)
            made["structured_outputs"] = restrict.to_dict()
        # An error about a value that is not JSON names it here, not in the engine.
        json.dumps(made, allow_nan=False)
        return made
