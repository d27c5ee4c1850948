"""A vLLM server that somebody else started, as the trainer sees it: asked over HTTP what a process of its own is asked.

It is believed as little as that one: the same digest, label, canary and probe. A label names the trainer besides the
version, so that a second trainer which takes the server over is found out. While weights change, the server is paused
for everyone; it stays so when that fails. Its process is never ended from here.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import secrets
import threading
from collections.abc import Awaitable, Coroutine, Iterable, Mapping
from typing import Any

from ppo_core.errors import DataError, EngineLostError, EngineTimeoutError, PPOCoreError, RolloutError
from ppo_core.rollout.stop_strings import StopStrings
from ppo_core.rollout.vllm_host import Refused, received
from ppo_core.rollout.vllm_http import ServerConnection, ServerFault
from ppo_core.rollout.vllm_replica import Message, answered
from ppo_core.rollout.vllm_requests import (
    RowSoFar,
    about_last,
    completion_request,
    last_logprob,
    require_prompt,
)
from ppo_core.rollout.vllm_settings import NCCL, SHARED_MEMORY

# Between two looks at whether the engine lives while it generates, seconds.
PULSE_S = 1.0
CLOSING_S = 5.0
# Tokens between two signs of life of a row.
TOKENS_AN_EVENT = 32
START_HINT = "Start it with `python -m ppo_core.rollout.vllm_serve`, see docs/engines.md."


class VLLMService:
    """The server at `url`.

    Args:
        name: what errors call it.
        url: of the server; its host has to be in `PPO_ENGINE_HOSTS`.
        environment: of the trainer.
        timeout_s: longest wait for an answer; while it generates, for a sign of life.
        max_rows: requests under way at once.
        tokenizer: finds stop strings.

    Raises:
        DataError: the host is not allowed.
    """

    def __init__(
        self,
        name: str,
        url: str,
        environment: Mapping[str, str],
        *,
        timeout_s: float,
        max_rows: int,
        tokenizer: Any,
    ) -> None:
        self.name = name
        self._server = ServerConnection(name, url, environment, timeout_s)
        self._timeout_s = timeout_s
        self._max_rows = max_rows
        self._tokenizer = tokenizer
        self._trainer = secrets.token_hex(6)
        self._weights_ok: str | None = None  # the version whose weights it is known to hold
        self._heard = 0.0  # when the last token came, by the loop's clock
        self._settings: dict[str, Any] = {}
        self._next_call = 0
        self._calls: dict[int, concurrent.futures.Future[Message]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def ask(self, operation: str, *, timeout_s: float | None = None, **arguments: Any) -> int:
        """See `Replica`."""
        if not self._thread.is_alive():
            raise EngineLostError(f"{self.name} was let go of before, and cannot be asked to {operation}")
        self._next_call += 1
        call = self._within(timeout_s, self._answer(operation, arguments))
        self._calls[self._next_call] = asyncio.run_coroutine_threadsafe(call, self._loop)
        return self._next_call

    def answer(self, call: int, wait_s: float) -> Message | None:
        """See `Replica`."""
        future = self._calls[call]
        if not concurrent.futures.wait([future], wait_s).done:
            return None
        del self._calls[call]
        return answered(self.name, future.result())

    def abort(self, call: int, timeout_s: float) -> None:
        """See `Replica`."""
        future = self._calls.pop(call, None)
        if future is None:
            return
        future.cancel()
        aborting = self._within(timeout_s, self._server.post("/abort_requests", {}))
        try:
            asyncio.run_coroutine_threadsafe(aborting, self._loop).result()
        except ServerFault as fault:  # It gives them up once nobody is connected to it.
            raise EngineLostError(f"{self.name} does not give up its requests: {fault}") from fault

    def kill(self) -> None:
        """Let go of the server."""
        if not self._thread.is_alive():
            return
        for future in self._calls.values():
            future.cancel()
        closing = asyncio.run_coroutine_threadsafe(self._server.close(), self._loop)
        with contextlib.suppress(concurrent.futures.TimeoutError):
            closing.result(CLOSING_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSING_S)

    async def _within(self, timeout_s: float | None, call: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await call
        except TimeoutError:
            raise EngineTimeoutError(f"{self.name} did not answer within {timeout_s:g} s") from None

    async def _answer(self, operation: str, arguments: dict[str, Any]) -> Message:
        try:
            answer: Message = await getattr(self, f"_{operation}")(**arguments)
            return answer
        except Refused as fault:
            return {"error": fault.kind, "message": str(fault)}
        except ServerFault as fault:
            await self._require_alive(fault)
            return {"error": "engine", "message": f"{operation}: {fault}"}
        except PPOCoreError:  # Some of them are a ValueError, too.
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as fault:
            raise RolloutError(
                f"{self.name}, {operation}: what it answered cannot be read: {type(fault).__name__}: {fault}",
                hint="Look at what listens there, and whether it is the vLLM of requirements/engines.txt.",
            ) from fault

    async def _require_alive(self, fault: ServerFault) -> None:
        """The web part of a server goes on for a while when its engine is dead."""
        try:
            await self._server.get("/health")
        except ServerFault:
            raise EngineLostError(f"{self.name}: its engine is dead; {fault}") from fault

    async def _start(self, settings: dict[str, Any]) -> Message:
        """Compare what the server runs with what the policy needs."""
        self._settings = settings
        await self._server.open()
        described = (await self._described())[0]
        _require_fit(self.name, described, settings)
        if described["transfer"] == SHARED_MEMORY:
            await self._require_shared_memory()
        return {"transfer": described["transfer"], "world_size": described["world_size"]}

    async def _described(self) -> list[dict[str, Any]]:
        try:
            return await self._rpc("describe")
        except ServerFault as fault:
            if fault.status == 404:
                what = "it has no /collective_rpc: it was started without VLLM_SERVER_DEV_MODE=1, or is no vLLM server"
            elif "has no attribute" in str(fault):
                what = "its workers lack the extension by which weights are received and verified"
            else:
                raise
            raise DataError(f"{self.name} cannot be used: {what}", hint=START_HINT) from fault

    async def _require_shared_memory(self) -> None:
        """It can read what this process writes into memory, which is on one machine only."""
        token = secrets.token_hex(16)
        memory = os.memfd_create("ppo-token")
        try:
            os.write(memory, token.encode("ascii"))
            workers = await self._rpc("read_back", [f"/proc/{os.getpid()}/fd/{memory}"])
        finally:
            os.close(memory)
        if any(worker["text"] != token for worker in workers):
            raise DataError(
                f"{self.name} takes weights by shared memory, but cannot read this process's: it runs on another "
                "machine, in another container, or as another user",
                hint="Start it beside the trainer as the same user, or on a GPU, where weights come by NCCL.",
            )

    async def _generate(self, rows: list[dict[str, Any]], sampling: dict[str, Any], version: str) -> Message:
        await self._require(version)
        strings = StopStrings(self._tokenizer, sampling["stop_strings"])
        turn = asyncio.Semaphore(self._max_rows)

        async def one(row: dict[str, Any]) -> dict[str, Any]:
            async with turn:
                asked = self._row_request(row, sampling)
                return {"row": row["row"], **await self._streamed(asked, strings)}

        found = await self._while_alive(_together(one(row) for row in rows))
        await self._require(version)
        return {"rows": found, "version": version}

    def _row_request(self, row: dict[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
        room = self._settings["engine"]["max_model_len"] - len(row["prompt"])
        return completion_request(
            row["prompt"],
            temperature=sampling["temperature"],
            max_tokens=min(sampling["max_new_tokens"], room),
            seed=row["seed"],
            stop_token_ids=sampling["stop_ids"],
        )

    async def _streamed(self, asked: dict[str, Any], strings: StopStrings) -> dict[str, Any]:
        """Some tokens at a time; token by token where there are stop strings, and given up at the one in which one
        appears. That tokens come is what shows that a row is not forgotten."""
        row = RowSoFar()
        interval = 1 if strings else TOKENS_AN_EVENT
        events = self._server.events("/v1/completions", {**asked, "stream": True, "stream_interval": interval})
        async with contextlib.aclosing(events):
            async for event in events:
                self._heard = self._loop.time()
                for choice in event["choices"]:
                    for _ in row.tokens_of(choice):
                        if strings and strings.just_appeared(row.ids):
                            return row.ended_by("stop")
        return row.ended_by(row.finish_reason)

    async def _last_logprobs(self, rows: list[list[int]], temperature: float) -> Message:
        asked = [about_last(ids, temperature) for ids in rows]
        answers = await self._while_alive(_together(self._server.post("/v1/completions", a) for a in asked))
        return {"logprobs": [last_logprob(answer, ids[-1]) for answer, ids in zip(answers, rows, strict=True)]}

    async def _meet(self, invitation: dict[str, Any]) -> Message:
        """Come into the trainer's group, in place of the one of a trainer that was here before."""
        await self._rpc("give_up_update")
        await self._server.post("/shutdown_weight_transfer_engine")
        await self._server.post("/init_weight_transfer_engine", {"init_info": invitation})
        return {}

    async def _begin_update(self) -> Message:
        self._weights_ok = None
        await self._server.post("/pause?mode=abort")
        await self._rpc("begin_receiving")
        await self._server.post("/start_weight_update", {})
        return {}

    async def _update(self, part: dict[str, Any]) -> Message:
        await self._server.post("/update_weights", {"update_info": part})
        return {}

    async def _finish_update(self, version: str) -> Message:
        await self._server.post("/finish_weight_update", {"weight_version": self._label(version)})
        return received(await self._rpc("end_receiving"), version)

    async def _fingerprint(self) -> Message:
        return {"workers": await self._rpc("weights_fingerprint")}

    async def _examine(self, probe: list[list[int]]) -> Message:
        if not (await self._server.post("/reset_prefix_cache"))["success"]:
            raise Refused("the prefix cache cannot be emptied", "weights")
        await self._server.post("/resume")
        logprobs = await self._prompt_logprobs(probe)
        return {"version": await self._version(), "probe": logprobs, **await self._canary()}

    async def _accept(self, version: str) -> Message:
        if await self._version() != version:
            raise Refused(f"version {version} is not what is held: {await self._held()}", "weights")
        self._weights_ok = version
        return {"version": version}

    async def _canary(self) -> dict[str, Any]:
        """See `EngineHost`: a cached row, by the route that reads the cache and by the one that does not."""
        row: list[int] = self._settings["canary"]
        cached = await self._server.post("/v1/completions", about_last(row, 1.0))
        (whole,) = await self._prompt_logprobs([row])
        details = cached["usage"]["prompt_tokens_details"]
        if details is None:
            raise DataError(f"{self.name} was started without --enable-prompt-tokens-details", hint=START_HINT)
        gap = abs(last_logprob(cached, row[-1]) - whole[-1])
        return {"num_cached": details["cached_tokens"] or 0, "canary_gap": gap}

    async def _prompt_logprobs(self, rows: list[list[int]]) -> list[list[float]]:
        asked = [completion_request(ids, temperature=1.0, max_tokens=1, seed=0, prompt_logprobs=0) for ids in rows]
        answers = await _together(self._server.post("/v1/completions", one) for one in asked)
        found = []
        for answer, ids in zip(answers, rows, strict=True):
            (choice,) = answer["choices"]
            require_prompt(choice, ids)
            said = zip(choice["prompt_logprobs"][1:], ids[1:], strict=True)
            found.append([one[str(token)]["logprob"] for one, token in said])
        return found

    async def _while_alive(self, work: Coroutine[Any, Any, list[Any]]) -> list[Any]:
        """What the work comes to, unless meanwhile the engine stops answering between two of its steps, makes no token
        for too long, or is taken away."""
        self._heard = self._loop.time()
        tasks: set[asyncio.Task[Any]] = {asyncio.ensure_future(work), asyncio.ensure_future(self._pulse())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            found: list[Any] = done.pop().result()
            return found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pulse(self) -> None:
        """What is asked here is known to the engine alone, not to the web part of the server."""
        while True:
            await asyncio.sleep(PULSE_S)
            await self._require(self._weights_ok)
            if self._loop.time() - self._heard > self._timeout_s:
                raise EngineTimeoutError(
                    f"{self.name} answers, but has made no token within {self._timeout_s:g} s",
                    hint="Look at the server's own log, and at who else uses it.",
                )

    async def _require(self, version: str | None) -> None:
        """The weights are those of this version, and it generates: one that is paused keeps requests for ever.

        Raises:
            Refused: another trainer has sent weights, or somebody has paused it, which another trainer does first.
        """
        held = await self._held()
        if self._weights_ok != version or held != self._label(str(version)):
            raise Refused(
                f"asked for policy version {version}, but the engine holds {held!r}, expected is "
                f"{self._label(str(version))!r}, verified is {self._weights_ok!r}",
                "weights",
            )
        if (await self._server.get("/is_paused"))["is_paused"]:
            raise Refused("somebody has paused it, so another trainer may be sending weights", "weights")

    async def _version(self) -> str:
        """The version that it holds, if this trainer has sent it."""
        trainer, _, version = (await self._held()).partition("/")
        return version if trainer == self._trainer else f"{version} of trainer {trainer}"

    async def _held(self) -> str:
        held: str = (await self._server.get("/weight_info"))["weight_version"]
        return held

    def _label(self, version: str) -> str:
        return f"{self._trainer}/{version}"

    async def _rpc(self, method: str, args: list[str] | None = None) -> list[dict[str, Any]]:
        """What every worker answers."""
        answer = await self._server.post("/collective_rpc", {"method": method, "args": args or []})
        results: list[dict[str, Any]] = [] if answer is None else answer["results"]
        return results


async def _together(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """All answers, in order; the first that fails ends the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _require_fit(name: str, described: dict[str, Any], settings: dict[str, Any]) -> None:
    """The server's model is the policy's, in its precision, and says what is asked."""
    wanted = settings["engine"]
    expected = {
        **settings["shape"],
        "dtype": wanted["dtype"],
        "logprobs_mode": wanted["logprobs_mode"],
        "prefix_caching": True,
    }
    found = {**described["shape"], **{key: described[key] for key in ("dtype", "logprobs_mode", "prefix_caching")}}
    for key, value in expected.items():
        if found[key] != value:
            raise DataError(f"{name} has {key} {found[key]!r}, and this run needs {value!r}", hint=START_HINT)
    if described["max_model_len"] < wanted["max_model_len"]:
        raise DataError(
            f"{name} takes {described['max_model_len']} tokens of prompt and response, and this run needs "
            f"{wanted['max_model_len']}",
            hint=f"Start it with --max-model-len {wanted['max_model_len']} or more.",
        )
    if described["transfer"] not in (SHARED_MEMORY, NCCL):
        raise DataError(f"{name} takes weights by {described['transfer']!r}, which is not known here", hint=START_HINT)
