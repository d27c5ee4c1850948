"""What a watch goes on with where a roll back or a fork has changed settings: measures of something else begin anew.

Baselines and histories hold what was usual under the spec that a checkpoint was written under. Under another engine the
gap to the trainer is another, longer answers are no fault where they were allowed to be, and another reward has another
scale. Compared with what was usual before, each of them would be told as a fault of the program or of the training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppo_core.score_shaping import same_scores
from ppo_core.spec import RunSpec

# Settings that answers and their logprobs do not depend on; all others of these groups make every metric another one.
NOT_OF_ANSWERS = {
    "policy": {"gradient_checkpointing"},
    "data": {"held_out", "seed"},
    "rollout": {"engine", "vllm", "batch_size"},
}
OF_THE_ENGINE = {"rollout.engine", "rollout.vllm"}
# What any setting of the update, of what is trained on, or of the batch changes.
OF_GRADIENTS = ("policy/grad_norm", "value/grad_norm")


def watch_to_start_from(
    kept: dict[str, Any] | None, kept_spec: Mapping[str, Any], spec: RunSpec
) -> tuple[dict[str, Any] | None, list[str]]:
    """A watch's state under a spec that may have changed, and the settings for which some of it begins anew.

    Alerts that are open stay open until their signs have been gone.

    Args:
        kept: the checkpoint's; None where it has none.
        kept_spec: the spec that the checkpoint was written under, as it was stored.
        spec: the spec that goes on.
    """
    begins, because = _begin_anew(kept_spec, spec)
    if kept is None or not begins:
        return kept, []

    def stays(name: str) -> bool:
        return not name.startswith(begins)

    def told(rule: str) -> bool:
        kind, name = rule.split(":", 1)
        return kind == "gate" or (kind == "band" and stays(name))

    state = {part: {name: of for name, of in kept[part].items() if stays(name)} for part in ("baseline", "history")}
    rules = {rule: of if told(rule) else {**of, "levels": []} for rule, of in kept["rules"].items()}
    return {**state, "rules": rules}, because


def _begin_anew(kept_spec: Mapping[str, Any], spec: RunSpec) -> tuple[tuple[str, ...], list[str]]:
    """With what the names of the metrics begin that are of something else now, and the settings that made them so."""
    changed = {
        group: _changed(kept_spec, spec, group) for group in ("policy", "data", "rollout", "reward", "kl", "update")
    }
    of_answers = [
        field
        for group, others in NOT_OF_ANSWERS.items()
        for field in changed[group]
        if field.removeprefix(f"{group}.") not in others
    ]
    if of_answers:
        return ("",), of_answers
    begins: list[str] = []
    of_engine = [field for field in changed["rollout"] if field in OF_THE_ENGINE]
    of_gradients = [*changed["reward"], *changed["kl"], *changed["update"]]
    of_gradients += [field for field in changed["rollout"] if field not in OF_THE_ENGINE]
    if of_engine:
        begins.append("rollout/engine_gap")
    if not same_scores(kept_spec, spec.reward):
        begins += ["reward/", "value/", "advantage/"]
    if of_gradients:
        begins += OF_GRADIENTS
    return tuple(begins), [*of_engine, *of_gradients]


def _changed(kept_spec: Mapping[str, Any], spec: RunSpec, group: str) -> list[str]:
    """Settings of a group, by dotted name, that are others than in the spec as it was stored."""
    now = getattr(spec, group)
    try:
        then = type(now).model_validate(kept_spec.get(group, {}))
    except ValueError:  # Stored by a version with other fields: nothing says what it was made under.
        return [group]
    return [f"{group}.{name}" for name in type(now).model_fields if getattr(then, name) != getattr(now, name)]
