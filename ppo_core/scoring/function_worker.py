"""A process that runs one registered scoring function, a request a line, and can be killed at any time.

Started by `ppo_core.scoring.python_function`, which owns the deadlines. Loads no torch. Requests come on standard
input; answers go out on what was standard output, which the function itself no longer reaches.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import inspect
import json
import numbers
import os
import signal
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TextIO

PR_SET_PDEATHSIG = 1


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ppo_core.scoring.function_worker")
    parser.add_argument("group", help="entry point group")
    parser.add_argument("name", help="registered name in it")
    parser.add_argument("parent", type=int, help="process id of the trainer, whose end ends this process")
    arguments = parser.parse_args()
    die_with(arguments.parent)
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    try:
        function = load(arguments.group, arguments.name)
        call, content = of_prompt_and_response(function), content_of(function)
    except Exception as error:  # Whatever the import of a stranger's module raises, the trainer must hear of it.
        say(answers, {"failed": f"{type(error).__name__}: {error}"})
        return
    say(answers, {"ready": True, "content": content})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        say(answers, {"row": request["row"], **answer(call, request["prompt"], request["response"])})


def die_with(parent: int) -> None:
    """A function that never returns must not outlive the trainer. Signals for the trainer's group are not for us."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def load(group: str, name: str) -> Callable[..., Any]:
    """The registered function."""
    found = [entry for entry in entry_points(group=group) if entry.name == name]
    if not found:
        raise LookupError(f"no {name!r} is registered in {group!r}")
    function: Callable[..., Any] = found[0].load()
    return function


def of_prompt_and_response(function: Callable[..., Any]) -> Callable[[str, str], Any]:
    """The function as one of prompt and response.

    One that has parameters `prompt` and `response` is given both; any other is given prompt + response as one text.
    """
    if {"prompt", "response"} <= set(inspect.signature(function).parameters):
        return lambda prompt, response: function(prompt=prompt, response=response)
    return lambda prompt, response: function(prompt + response)


def content_of(function: Callable[..., Any]) -> str | None:
    """A digest of what a function computes: its code and its module's source. None where that says not all of it.

    Names count for nothing, nor does where the module lies: a copy under another name is the same function. Two that
    read the same and stand in different modules are not, for what they call may differ.
    """
    if not inspect.isfunction(function) or function.__closure__:
        return None  # An object or a closure holds values of its own.
    try:
        source = Path(inspect.getfile(function)).read_bytes()
    except (OSError, TypeError):
        return None
    code = function.__code__
    parts = (code.co_code, code.co_names, code.co_varnames, _plain(code.co_consts), function.__defaults__)
    return hashlib.sha256(repr(parts).encode("utf-8", "backslashreplace") + source).hexdigest()


def _plain(constant: Any) -> Any:
    """A constant without what is another in each process: nested code is shown by its own, a set in one order."""
    if inspect.iscode(constant):
        return constant.co_code, constant.co_names, _plain(constant.co_consts)
    if isinstance(constant, tuple):
        return tuple(_plain(each) for each in constant)
    return sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant


def answer(call: Callable[[str, str], Any], prompt: str, response: str) -> dict[str, Any]:
    """`{"score": number or null}`, `{"wrong_type": its name}` or `{"error": text}`."""
    try:
        score = call(prompt, response)
        if score is None:
            return {"score": None}
        if isinstance(score, bool) or not isinstance(score, numbers.Real):
            return {"wrong_type": type(score).__name__}
        return {"score": float(score)}
    except Exception as error:  # The fault of one sample is that sample's, whatever it is.
        return {"error": f"{type(error).__name__}: {error}"[:1000]}


def say(stream: TextIO, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


if __name__ == "__main__":
    main()
