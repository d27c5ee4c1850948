"""The process that runs vLLM for a trainer: one request at a time over an inherited socket, until either ends.

    python -m ppo_core.rollout.vllm_server SOCKET TRAINER

Its first message holds the engine's settings. It dies with the trainer, and ignores the signals of its group: the
trainer ends it.
"""

from __future__ import annotations

import socket
import sys
import traceback
from typing import Any

from ppo_core.rollout.vllm_channel import Channel, ChannelClosed, Message
from ppo_core.rollout.vllm_host import Aborted, EngineHost, Refused
from ppo_core.scoring.function_worker import die_with

IDLE_S = 3600.0


class Server:
    """Answers the trainer's requests in their order."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._waiting: list[Message] = []
        self._call = 0
        self._host: EngineHost | None = None

    def serve(self) -> None:
        """Until the trainer is gone."""
        try:
            while True:
                while not self._waiting:
                    self._waiting += self._channel.exchange(IDLE_S)
                request = self._waiting.pop(0)
                if "call" in request:  # An abort that came too late has none.
                    self._call = request.pop("call")
                    self._say(**self._answer(request.pop("operation"), request))
        except ChannelClosed:
            return

    def _answer(self, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._do(operation, arguments)
        except Aborted:
            return {"aborted": True}
        except Refused as fault:
            return {"error": fault.kind, "message": str(fault)}
        except Exception as fault:  # Whatever vLLM raises, the trainer must hear of it.
            traceback.print_exc()
            return {"error": "engine", "message": f"{operation}: {type(fault).__name__}: {fault}"[:4000]}

    def _do(self, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if operation == "start":
            self._host = EngineHost(arguments["settings"])
            return {}
        assert self._host is not None  # The trainer starts it before it asks for anything.
        match operation:
            case "generate":
                return self._host.generate(**arguments, is_unwanted=self._is_unwanted, tell=self._tell)
            case "last_logprobs":
                return {"logprobs": self._host.last_logprobs(**arguments)}
            case "begin_update" | "update" | "finish_update" | "fingerprint" | "examine" | "accept" | "rest":
                answer: dict[str, Any] = getattr(self._host, operation)(**arguments)
                return answer
        raise Refused(f"{operation!r} is no operation")

    def _is_unwanted(self) -> bool:
        self._waiting += self._channel.exchange(0)
        return any(message["operation"] == "abort" for message in self._waiting)

    def _tell(self, num_steps: int) -> None:
        self._channel.post({"call": self._call, "progress": num_steps})

    def _say(self, **answer: Any) -> None:
        self._channel.post({"call": self._call, **answer})
        while self._channel.has_unsent:
            self._waiting += self._channel.exchange(IDLE_S)


def main() -> None:
    descriptor, trainer = int(sys.argv[1]), int(sys.argv[2])
    die_with(trainer)
    Server(Channel(socket.socket(fileno=descriptor))).serve()


if __name__ == "__main__":
    main()
