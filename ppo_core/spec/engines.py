"""The groups of a run spec that belong to the engines: what generates with vLLM, and what trains."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from ppo_core.spec.hosts import parse_endpoint
from ppo_core.spec.setting import Group, Misfits, setting

# vLLM raises what is lower to this without an error, and refuses what is higher.
VLLM_TEMPERATURES = (0.01, 2.0)

# What somebody else decides where the engines are servers.
OF_OWN_PROCESSES = ("replicas", "tensor_parallel", "gpu_memory_utilization", "kv_cache_gib")


class VLLMConfig(Group):
    """Processes that run vLLM beside the trainer, or beside each of its ranks; or servers that others started."""

    servers: list[Annotated[str, Field(min_length=1, max_length=1024)]] = setting(
        [],
        "rollback",
        "Addresses of vLLM servers that generate in place of own processes, http or https, of hosts in "
        "PPO_ENGINE_HOSTS; rows are dealt out among them. See docs/engines.md.",
        max_length=64,
    )
    replicas: int = setting(
        1, "rollback", "Engines among which rows are dealt out; each is a process with weights of its own.", ge=1, le=64
    )
    tensor_parallel: int = setting(1, "rollback", "GPUs over which each engine spreads the model.", ge=1, le=64)
    max_rows: int = setting(
        256,
        "rollback",
        "Responses that an engine generates at once; halved by itself when memory runs out.",
        ge=1,
        le=8192,
    )
    gpu_memory_utilization: float = setting(
        0.3,
        "rollback",
        "Share of its GPU's whole memory that an engine takes for weights, passes and key-value cache; on a GPU only.",
        gt=0,
        le=0.95,
    )
    kv_cache_gib: float = setting(
        1.0, "rollback", "Memory of an engine's key-value cache; on a processor only.", gt=0, le=4096
    )
    timeout_s: float = setting(
        600.0,
        "rollback",
        "An engine that says nothing for so long while it generates or takes over weights is ended, and the run fails.",
        ge=1,
        le=86400,
    )

    @field_validator("servers")
    @classmethod
    def _servers_are_plain_and_differ(cls, urls: list[str]) -> list[str]:
        places = [parse_endpoint(url) for url in urls]
        if len(set(places)) < len(places):
            raise ValueError("a server stands here twice; its rows would be asked for twice at once")
        return urls

    @model_validator(mode="after")
    def _servers_have_their_own_settings(self) -> Self:
        given = [name for name in OF_OWN_PROCESSES if getattr(self, name) != type(self).model_fields[name].default]
        if self.servers and given:
            message = "is for processes that the run starts itself, and `servers` is given; leave it out"
            raise Misfits((f"/{name}", f"`{name}` {message}") for name in given)
        return self


class TrainingConfig(Group):
    """What runs the passes and the optimizer."""

    engine: Literal["local", "deepspeed"] = setting(
        "local", "rollback", "One process with plain torch (`local`), or any number of ranks with DeepSpeed."
    )
    ranks: int = setting(1, "rollback", "Processes that train together; with `local` only 1.", ge=1, le=1024)
    zero_stage: int = setting(
        0,
        "rollback",
        "What DeepSpeed shares out over the ranks: nothing (0), optimizer states (1), gradients too (2), weights too "
        "(3).",
        ge=0,
        le=3,
    )
    offload: Literal["none", "optimizer"] = setting(
        "none", "rollback", "What DeepSpeed keeps in the host's memory: nothing, or float32 weights and moments."
    )
    peer_timeout_s: float = setting(
        1200.0,
        "rollback",
        "Longest time that a rank waits for the others.",
        ge=1,
        le=86400,
    )

    @model_validator(mode="after")
    def _engine_can(self) -> Self:
        misfits = []
        if self.engine == "local":
            for name, plain in (("ranks", 1), ("zero_stage", 0), ("offload", "none")):
                if getattr(self, name) != plain:
                    message = (
                        f"training.{name} is {getattr(self, name)!r} but training.engine is local, one process that "
                        f"shares nothing out; set training.engine to deepspeed, or training.{name} to {plain!r}"
                    )
                    misfits.append((f"/{name}", message))
        elif self.offload == "optimizer" and self.zero_stage == 0:
            message = "training.offload is optimizer, which DeepSpeed can from ZeRO stage 1 on; set zero_stage to 1"
            misfits.append(("/zero_stage", message))
        if misfits:
            raise Misfits(misfits)
        return self
