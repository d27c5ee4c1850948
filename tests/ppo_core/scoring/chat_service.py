"""What a served model that compares answers is asked, and says, in the form of OpenAI's chat completions."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.ppo_core.scoring.live_service import Said


def completion(content: Any) -> Said:
    """A chat completion with one choice."""
    message = {"role": "assistant", "content": content}
    body = {"id": "c-1", "object": "chat.completion", "choices": [{"index": 0, "message": message}]}
    return Said(json.dumps(body).encode())


def material(request: dict[str, Any]) -> dict[str, str]:
    """The `prompt`, `first` and `second` that a request is about."""
    found: dict[str, str] = json.loads(request["messages"][-1]["content"])
    return found


def preferring(value: Callable[[str], float]) -> Callable[[dict[str, Any]], Said]:
    """A model that honestly prefers the answer of more value, whatever place it has."""

    def answer(request: dict[str, Any]) -> Said:
        pair = material(request)
        first, second = value(pair["first"]), value(pair["second"])
        return completion("first" if first > second else "second" if second > first else "tie")

    return answer
