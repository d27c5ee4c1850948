"""The vLLM engine as the trainer uses it: processes or servers that generate, take over weights, and are not trusted.

Whatever comes back is compared with what was asked: every row by its number and its prompt's ids, some of them by
asking once more what their last token is worth; every sync by digest, version, probe and a canary for stale states.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import torch

from ppo_core.errors import DataError, EngineLostError, EngineTimeoutError, RolloutError, WeightSyncError
from ppo_core.models.policy import PolicyModel
from ppo_core.rollout.cuda_ipc import CudaIPCWeights
from ppo_core.rollout.engine import Response, SyncReport
from ppo_core.rollout.engine_folder import EngineFolder
from ppo_core.rollout.nccl_weights import NCCLGroup, NCCLWeights
from ppo_core.rollout.shared_weights import SharedWeights, read_weights
from ppo_core.rollout.transformers_engine import PROBE_TOLERANCE, stop_ids_of
from ppo_core.rollout.vllm_answers import Asked, in_order
from ppo_core.rollout.vllm_process import VLLMProcess
from ppo_core.rollout.vllm_replica import Message, Replica, answers
from ppo_core.rollout.vllm_servers import common_way, met_by_nccl, services
from ppo_core.rollout.vllm_settings import CUDA_IPC, NCCL, SHARED_MEMORY, environment_of, settings_of
from ppo_core.rollout.weights import PolicyWeights, Probe
from ppo_core.spec.groups import RolloutConfig

EXTENSION = "ppo_core.rollout.vllm_worker.WeightReceiver"
# Importing, building and, on a GPU, capturing graphs; on a busy machine.
START_TIMEOUT_S = 900.0
# A stop must not wait long for an engine that no longer listens.
ABORT_TIMEOUT_S = 10.0
# Rows of each answer that are asked about once more.
NUM_ASKED_AGAIN = 4
# Nats at temperature 1, between two of the engine's own routes; another row's token is off by far more. In bfloat16
# another shape of the batch alone moves single tokens.
ROUTE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}


class Transfer(Protocol):
    """One transfer of weights, part by part; a part is good until the next is asked for."""

    digest: str  #: of all that was sent, once every part was taken

    def deliver(self) -> None:
        """What has to happen while the part that was last given is being read."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def __iter__(self) -> Iterator[dict[str, Any]]: ...


class VLLMEngine:
    """One or several vLLM processes on this machine, or servers, with equal weights; rows are dealt out among them.

    They hold nothing before the first sync, which checks more than the later ones do: it loads the weights twice.

    Args:
        policy: whose shape, precision and device they have.
        tokenizer: for stop ids and stop strings.
        config: the spec's.
        max_prompt_tokens: longest prompt.
        logs: the folder of their logs.
        label: tells the logs of several engines apart.
        transfer: the way on which weights come; None: the one that fits the device.
        extension: what is mixed into vLLM's worker; tests put their faults in by it.

    Raises:
        DataError: vLLM is not installed or cannot run this model, a server must not be used or does not fit, or nothing
            could end a response.
        EngineLostError, EngineTimeoutError, RolloutError: it could not be started, or a server is not there.
    """

    def __init__(
        self,
        policy: PolicyModel,
        tokenizer: Any,
        config: RolloutConfig,
        *,
        max_prompt_tokens: int,
        logs: Path,
        label: str = "vllm",
        transfer: str | None = None,
        extension: str = EXTENSION,
    ) -> None:
        self._config = config
        self._rows_at_once: int | None = None
        self._dtype: torch.dtype = policy.model.dtype
        self._num_tokens: int = policy.model.get_input_embeddings().num_embeddings
        self._version = -1  # of no policy
        self._is_checked = False
        self._device = policy.device
        self._sleeps = policy.device.type == "cuda" and not config.vllm.servers
        # Workers that share the model out among GPUs read it from the host's memory, each its part.
        shares_gpu = self._sleeps and config.vllm.tensor_parallel == 1
        self._transfer = transfer or (CUDA_IPC if shares_gpu else SHARED_MEMORY)
        # An id that the model does not have ends nothing, and vLLM takes none.
        self._stop_ids = [token for token in stop_ids_of(policy, tokenizer, config) if token < self._num_tokens]
        if not self._stop_ids and not config.stop_strings:
            raise DataError(
                "neither the model nor its tokenizer has an end-of-text id, so no response could ever end",
                hint="Give rollout.stop_ids or rollout.stop_strings.",
            )
        # Until the end: vLLM leaves files of its own where it is told that temporary ones go. A server has its own.
        self._folder = None if config.vllm.servers else EngineFolder()
        settings = settings_of(
            policy,
            config,
            folder=None if self._folder is None else self._folder.path,
            max_prompt_tokens=max_prompt_tokens,
            transfer=self._transfer,
            extension=extension,
        )
        self._replicas: list[Replica]
        if self._folder is None:
            self._replicas = services(config, tokenizer)
        else:
            _require_vllm()
            _write_model(policy, tokenizer, self._folder.path)
            environment = environment_of(policy.device, config.vllm.replicas, self._folder.path)
            self._replicas = [
                VLLMProcess(f"vLLM engine {place}", logs / f"{label}-{place}.log", environment, config.vllm.timeout_s)
                for place in range(config.vllm.replicas)
            ]
        self._group: NCCLGroup | None = None
        try:
            started = self._ask_all("start", timeout_s=START_TIMEOUT_S, settings=settings)
            if self._folder is None:
                self._transfer = common_way(started, self._device)
            if self._transfer == NCCL:
                self._group = met_by_nccl(self._replicas, started, self._device, config.vllm.timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """As the engine said it with its last answer."""
        return self._version

    @property
    def rows_at_once(self) -> int | None:
        return self._rows_at_once

    @property
    def transfer(self) -> str:
        """The way on which weights come."""
        return self._transfer

    @property
    def pids(self) -> list[int]:
        """Of its processes."""
        return [replica.pid for replica in self._replicas if isinstance(replica, VLLMProcess)]

    def generate(
        self, prompt_ids: list[list[int]], *, seeds: list[int], check: Callable[[], None] | None = None
    ) -> list[Response]:
        """See `RolloutEngine`. Out of memory: fewer rows are generated at once from then on.

        Raises:
            EngineLostError, EngineTimeoutError: a process died, or is silent.
            WeightSyncError: it does not hold verified weights of the last sync's version.
            RolloutError: an answer cannot be right: another order, an id that the model does not have, a reason to
                end that is none, or a token that is not worth what was said of it.
        """
        if len(prompt_ids) != len(seeds):
            raise RolloutError(f"{len(prompt_ids)} prompts but {len(seeds)} seeds: every row needs its own")
        empty = [row for row, ids in enumerate(prompt_ids) if not ids]
        if empty:
            raise RolloutError(f"prompt {empty[0]} has no token: nothing predicts the first token of its response")
        if check is not None:
            check()
        dealt = self._dealt(len(prompt_ids))
        calls = []
        for process, rows in dealt:
            some = [{"row": row, "prompt": prompt_ids[row], "seed": seeds[row]} for row in rows]
            call = process.ask("generate", rows=some, sampling=self._sampling(), version=str(self._version))
            calls.append((process, call))
        responses: list[Response | None] = [None] * len(prompt_ids)
        asked = Asked(
            self._num_tokens, self._config.max_new_tokens, frozenset(self._stop_ids), bool(self._config.stop_strings)
        )
        for (process, rows), answer in zip(dealt, self._answers(calls, check), strict=True):
            if answer["version"] != str(self._version):
                raise WeightSyncError(
                    f"{process.name} generated with version {answer['version']}, expected {self._version}"
                )
            for row, found in zip(rows, in_order(process.name, rows, prompt_ids, answer["rows"]), strict=True):
                responses[row] = asked.response(process.name, row, found)
            at_once = answer.get("chunk_rows")  # Servers do not say.
            if at_once is not None and at_once < self._config.vllm.max_rows:
                self._rows_at_once = at_once * len(self._replicas)
        whole = [response for response in responses if response is not None]
        self._ask_again(dealt, prompt_ids, whole)
        return whole

    def sync_weights(self, weights: PolicyWeights, probe: Probe, version: int) -> SyncReport:
        """See `RolloutEngine`. The first one loads the weights twice and compares what the engine computes with."""
        if self._sleeps:
            torch.cuda.empty_cache()  # What training has freed, torch keeps from the engine, which is about to wake up.
        pairs = iter(weights)
        try:
            digest, received = (self._send if self._is_checked else self._send_twice)(pairs, version)
        finally:
            for _ in pairs:  # Ranks that make weights whole together do so to the end, whatever happens to one engine.
                pass
        examined = self._ask_all("examine", probe=[list(row) for row in probe.rows])
        gap = 0.0
        for process, taken, answer in zip(self._replicas, received, examined, strict=True):
            _require_received(process.name, version, digest, taken["digest"])
            gap = max(gap, self._verified_gap(process.name, answer, digest, probe, version))
        accepted = self._ask_all("accept", version=str(version))
        self._version = int(accepted[0]["version"])
        self._is_checked = True
        return SyncReport(self._version, received[0]["digest"], gap)

    def rest(self) -> None:
        """See `RolloutEngine`. It sleeps where it shares a GPU with the trainer."""
        if self._sleeps:
            self._ask_all("rest")

    def close(self) -> None:
        """End all of its processes, and let go of servers; harmless when repeated."""
        for replica in self._replicas:
            replica.kill()
        if self._folder is not None:
            self._folder.remove()

    def _send(self, pairs: Iterable[tuple[str, torch.Tensor]], version: int) -> tuple[str, list[Message]]:
        """Send all weights to every process: the digest of what was sent, and what each says that it received."""
        self._ask_all("begin_update")
        with self._transferred(pairs) as transfer:
            for part in transfer:
                calls = self._asked("update", part=part)
                transfer.deliver()
                answers(calls)
            return transfer.digest, self._ask_all("finish_update", version=str(version))

    def _send_twice(self, pairs: Iterable[tuple[str, torch.Tensor]], version: int) -> tuple[str, list[Message]]:
        """The same, from a copy: other ranks iterate the weights once, and so must this one."""
        with SharedWeights(pairs) as kept:
            (part,) = kept
            copies = read_weights(part["path"], part["index"])
            self._send(copies, version)
            first = self._ask_all("fingerprint")
            sent = self._send(copies, version)
        for process, one, other in zip(self._replicas, first, self._ask_all("fingerprint"), strict=True):
            if one["workers"] != other["workers"]:
                raise WeightSyncError(f"version {version}: {process.name}, loaded twice, holds two different things")
        return sent

    def _transferred(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> Transfer:
        if self._group is not None:
            return NCCLWeights(pairs, self._group, self._device)
        return CudaIPCWeights(pairs, self._device) if self._transfer == CUDA_IPC else SharedWeights(pairs)

    def _asked(self, operation: str, **arguments: Any) -> list[tuple[Replica, int]]:
        return [(replica, replica.ask(operation, **arguments)) for replica in self._replicas]

    def _ask_all(self, operation: str, **arguments: Any) -> list[Message]:
        return answers(self._asked(operation, **arguments))

    def _verified_gap(self, name: str, answer: Message, digest: str, probe: Probe, version: int) -> float:
        """Nats between the probe's logprobs of engine and trainer, once all else that was found is right."""
        if answer["version"] != str(version):
            raise WeightSyncError(f"{name} is labelled version {answer['version']}, expected {version}")
        if answer["num_cached"] or not answer["canary_gap"] <= ROUTE_TOLERANCE[self._dtype]:
            raise WeightSyncError(
                f"version {version}, digest {digest}: {name} still reads {answer['num_cached']} tokens of its prefix "
                f"cache, emptied before; a token is {answer['canary_gap']:.3g} nats off by it"
            )
        gap = probe.gap(torch.tensor([row[-probe.num_forced :] for row in answer["probe"]]))
        allowed = PROBE_TOLERANCE[self._dtype]
        if not gap <= allowed:
            raise WeightSyncError(
                f"version {version}, digest {digest}: logprobs of the probe by {name} differ from the trainer's by "
                f"{gap:.3g} nats, allowed are {allowed}"
            )
        return gap

    def _sampling(self) -> dict[str, Any]:
        return {
            "temperature": self._config.temperature,
            "max_new_tokens": self._config.max_new_tokens,
            "stop_ids": self._stop_ids,
            "stop_strings": list(self._config.stop_strings),
        }

    def _dealt(self, num_rows: int) -> list[tuple[Replica, list[int]]]:
        """Which rows each process generates; none is asked for nothing."""
        count = len(self._replicas)
        shares = [list(range(place, num_rows, count)) for place in range(count)]
        return [(process, rows) for process, rows in zip(self._replicas, shares, strict=True) if rows]

    def _answers(self, calls: Sequence[tuple[Replica, int]], check: Callable[[], None] | None) -> list[Message]:
        """The answers, or what `check` raises once every process has given up its rows."""
        interrupted: list[BaseException] = []

        def look() -> None:
            try:
                if check is not None:
                    check()
            except BaseException as reason:
                interrupted.append(reason)
                raise

        try:
            return answers(calls, look)
        except BaseException:
            if interrupted:
                self._abort(calls)
            raise

    def _abort(self, calls: Sequence[tuple[Replica, int]]) -> None:
        for process, call in calls:
            try:
                process.abort(call, ABORT_TIMEOUT_S)
            except (EngineLostError, EngineTimeoutError):
                process.kill()  # Nobody needs it before the run goes on, if it ever does.

    def _ask_again(
        self, dealt: Sequence[tuple[Replica, list[int]]], prompt_ids: list[list[int]], responses: list[Response]
    ) -> None:
        """Responses that were mixed up among rows carry logprobs that are not theirs: look at some of each process."""
        calls, chosen = [], []
        for process, rows in dealt:
            some = [row for row in rows if responses[row].ids]
            some = some[:: max(1, len(some) // NUM_ASKED_AGAIN)][:NUM_ASKED_AGAIN]
            if some:
                ids = [prompt_ids[row] + responses[row].ids for row in some]
                calls.append((process, process.ask("last_logprobs", rows=ids, temperature=self._config.temperature)))
                chosen.append(some)
        allowed = ROUTE_TOLERANCE[self._dtype] / min(1.0, self._config.temperature)
        for (process, _), rows, answer in zip(calls, chosen, answers(calls), strict=True):
            for row, logprob in zip(rows, answer["logprobs"], strict=True):
                said = responses[row].logprobs[-1]
                if not abs(said - logprob) <= allowed:
                    raise RolloutError(
                        f"row {row}: {process.name} said {said:.4g} nats of its last token and says {logprob:.4g} when "
                        f"asked again, allowed are {allowed:.3g} apart: its responses are not those of their rows",
                        hint="The engine returned responses in another order, or of other weights. Do not train on it.",
                    )


def _require_received(name: str, version: int, sent: str, received: str) -> None:
    if received != sent:
        raise WeightSyncError(f"version {version}: sent weights of digest {sent}, {name} received {received}")


def _write_model(policy: PolicyModel, tokenizer: Any, folder: Path) -> None:
    """The model's shape, for vLLM to build it by; its weights come with the first sync."""
    config = policy.model.config
    if not config.architectures:
        config.architectures = [type(policy.model).__name__]
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _require_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise DataError(
            "rollout.engine is vllm, but vLLM is not installed here",
            hint="Install it beside this package (requirements/engines.txt says how), or use the transformers engine.",
        )
