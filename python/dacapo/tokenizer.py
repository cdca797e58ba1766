"""The tokenizer of a model."""

from __future__ import annotations

import json
from typing import Any, List, Mapping, Sequence

from ._dacapo import Engine

__all__ = ["Tokenizer"]


class Tokenizer:
    """Text to tokens and back, as the model does it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def encode(self, text: str, add_special_tokens: bool = True) -> List[int]:
        """The tokens of a text; special tokens that are spelled out in it are recognized."""
        return self._engine.encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return self._engine.decode(list(token_ids))

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation."""
        return self._engine.render(json.dumps(list(messages)), add_generation_prompt)
