"""Requests to the completions route of a vLLM server, with every setting of sampling, and what its answers say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ppo_core.rollout.vllm_host import Refused, folded_seed


def completion_request(
    prompt: list[int],
    *,
    temperature: float,
    max_tokens: int,
    seed: int,
    stop_token_ids: list[int] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Every setting by name: what is left out here the server fills in."""
    return {
        "prompt": prompt,
        "add_special_tokens": False,
        "n": 1,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": folded_seed(seed),
        "stop": [],
        "stop_token_ids": stop_token_ids or [],
        "ignore_eos": True,  # The ids above are all that end a response.
        "min_tokens": 0,
        "max_tokens": max_tokens,
        "logprobs": 0,
        "prompt_logprobs": None,
        "echo": False,
        "stream": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **more,
    }


def about_last(ids: list[int], temperature: float) -> dict[str, Any]:
    """What its last token is worth, read through the cache as sampling does."""
    last = ids[-1]
    return completion_request(
        ids[:-1], temperature=temperature, max_tokens=1, seed=0, logprobs=1, logprob_token_ids=[last]
    )


def last_logprob(answer: dict[str, Any], token: int) -> float:
    """What an answer says of the one token that it was asked about."""
    (choice,) = answer["choices"]
    said = choice["logprobs"]["top_logprobs"][0]
    if f"token_id:{token}" not in said:
        raise Refused(
            f"vLLM was asked about id {token} and told of {list(said)}: its answers are not those of its rows"
        )
    logprob: float = said[f"token_id:{token}"]
    return logprob


def require_prompt(choice: dict[str, Any], prompt: list[int]) -> None:
    if choice["prompt_token_ids"] != prompt:
        raise Refused(f"vLLM answered prompt {choice['prompt_token_ids'][:8]} where {prompt[:8]} was asked")


class RowSoFar:
    """One row's response, as far as the events of its stream have come.

    Attributes:
        ids: the tokens so far.
        finish_reason: None while nothing has ended it.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.finish_reason: str | None = None
        self._prompt: list[int] | None = None
        self._logprobs: list[float] = []

    def tokens_of(self, choice: dict[str, Any]) -> Iterator[int]:
        """Take over what an event says, token by token.

        Raises:
            LookupError, TypeError, ValueError: it is not what vLLM says.
        """
        self._prompt = self._prompt or choice["prompt_token_ids"]
        logprobs = choice["logprobs"]["token_logprobs"] if choice["logprobs"] is not None else []
        for token, logprob in zip(choice["token_ids"], logprobs, strict=True):
            if type(token) is not int:
                raise TypeError(f"{token!r} is no token id")
            self.ids.append(token)
            self._logprobs.append(float(logprob))
            yield token
        self.finish_reason = choice["finish_reason"]

    def ended_by(self, reason: str | None) -> dict[str, Any]:
        """The row as the trainer compares it with what it asked for."""
        return {"prompt": self._prompt, "ids": self.ids, "logprobs": self._logprobs, "finish_reason": reason}
