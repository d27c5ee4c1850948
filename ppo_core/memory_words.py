"""A memory estimate in words: what each process needs, by phase, and a warning where GPUs will hardly have it.

How much memory the machine has is not known when a spec is checked, so the common sizes of GPUs are named.
"""

from __future__ import annotations

from collections.abc import Iterator

from ppo_core.memory import PROGRAM_BYTES, MemoryEstimate
from ppo_core.spec import RunSpec

GB = 10**9
# Of the GPUs that models of billions of parameters are trained on: the usual one, and the larger ones.
USUAL_GPU, LARGE_GPUS = 80, (141, 192)
# Phases in which vLLM sleeps where it shares a GPU, and what it keeps there: its context and captured graphs. Not
# measured here; others report 3 to 5 GB.
_ASLEEP = ("logprobs", "update")
_ASLEEP_BYTES = 5 * GB


def memory_lines(spec: RunSpec, memory: MemoryEstimate, parameters: int) -> Iterator[str]:
    """What a run needs, line by line."""
    ranks, on_gpu = spec.training.ranks, spec.resources.gpus > 0
    who = "the run" if ranks == 1 else f"each of {ranks} ranks"
    where = "a GPU's memory" if on_gpu else "memory"
    fullest = max(memory.phases, key=lambda phase: memory.phases[phase])
    yield (
        f"a policy of {parameters:,} parameters: {who} needs about {size_text(memory.peak_bytes)} of {where} at the "
        f"peak ({fullest}), {size_text(memory.states_bytes)} of it weights, gradients and moments"
    )
    phases = ", ".join(f"{phase} {size_text(held)}" for phase, held in memory.phases.items())
    yield f"memory by phase, the program's own {size_text(PROGRAM_BYTES)} aside: {phases}"
    if memory.engines_bytes:
        beside = " beside each rank" if ranks > 1 else ""
        share = f"; it is given {_given(spec)} of 80 GB, and sleeps in logprobs and update" if on_gpu else ""
        yield f"vLLM{beside} needs about {size_text(memory.engines_bytes)} for weights and key-value cache{share}"
    if on_gpu or ranks > 1:
        yield f"main memory: about {size_text(memory.host_bytes)} for all processes"


def memory_warnings(spec: RunSpec, memory: MemoryEstimate) -> Iterator[str]:
    """A warning where a GPU of the usual size cannot hold the run."""
    if not spec.resources.gpus:
        return
    share = _share_of_gpu(spec)
    needed = gpu_bytes(spec, memory, USUAL_GPU * GB)
    if needed > USUAL_GPU * GB:
        fits = next((size for size in LARGE_GPUS if gpu_bytes(spec, memory, size * GB) <= size * GB), None)
        larger = f"one of {fits} GB would hold it; else " if fits else ""
        usual = f"the {size_text(USUAL_GPU * GB)} of one of {USUAL_GPU} GB"
        yield f"each GPU needs about {size_text(needed)}, more than {usual}; {larger}{', or '.join(_remedies(spec))}"
    if memory.engines_bytes > share * USUAL_GPU * GB:
        given = spec.rollout.vllm.gpu_memory_utilization
        yield (
            f"rollout.vllm.gpu_memory_utilization {given:g} gives vLLM {_given(spec)} of {USUAL_GPU} GB, but it needs "
            f"about {size_text(memory.engines_bytes)} to generate all rows at once; raise it, or lower "
            "rollout.batch_size"
        )


def gpu_bytes(spec: RunSpec, memory: MemoryEstimate, size: int) -> int:
    """Most bytes of a GPU of `size` that a rank and its engines hold at once."""
    engines = max(memory.engines_bytes, int(_share_of_gpu(spec) * size))
    asleep = min(engines, _ASLEEP_BYTES)
    return PROGRAM_BYTES + max(
        held + (asleep if phase in _ASLEEP else engines) for phase, held in memory.phases.items()
    )


def size_text(num_bytes: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} GiB"


def _share_of_gpu(spec: RunSpec) -> float:
    """The share of a GPU that vLLM takes, whatever it needs."""
    if not spec.rollout.starts_vllm:
        return 0.0
    return spec.rollout.vllm.gpu_memory_utilization * spec.rollout.vllm.replicas


def _given(spec: RunSpec) -> str:
    return size_text(_share_of_gpu(spec) * USUAL_GPU * GB)


def _remedies(spec: RunSpec) -> Iterator[str]:
    """What would lower the need, of what the spec has not done yet."""
    if spec.training.engine == "local":
        yield "share it out with training.engine deepspeed"
    elif spec.training.zero_stage < 3:
        yield "raise training.zero_stage"
    if spec.training.offload == "none" and spec.training.engine != "local":
        yield "set training.offload to optimizer"
    if not spec.policy.gradient_checkpointing:
        yield "set policy.gradient_checkpointing"
    if spec.policy.value_head == "separate":
        yield "use a shared value head"
    if spec.policy.lora is None:
        yield "train adapters (policy.lora)"
    if spec.policy.dtype == "float32":
        yield "set policy.dtype to bfloat16"
    yield "lower update.token_budget"
