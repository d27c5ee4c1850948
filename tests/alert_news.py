"""Payloads of a journal's `alert` event, as a trainer writes them."""

from __future__ import annotations

from typing import Any


def news(
    rule: str = "band:kl/ref_sequence",
    *,
    raised: int = 8,
    onset: int = 6,
    status: str = "raised",
    severity: str = "warning",
    **fields: Any,
) -> dict[str, Any]:
    """An alert that was raised at iteration `raised`; every field of the contract is there."""
    name = rule.partition(":")[2].replace("/", "-")
    return {
        "id": f"al-{name}-{onset}-{raised}",
        "status": status,
        "rule": rule,
        "kind": rule.partition(":")[0],
        "severity": severity,
        "metrics": ["kl/ref_sequence", "response/length_mean"],
        "title": f"KL to the reference tripled since iteration {onset}",
        "detail": "KL to the reference is 12.4 nats; it was 4.1.",
        "meaning": "The policy moves away from where it started.",
        "remedy": "Raise kl.coef.",
        "iteration": raised,
        "onset": onset,
        "value": 12.4,
        "baseline": 4.1,
        "bound": 12.3,
        "evidence": [{"metric": "kl/ref_sequence", "then": 4.1, "now": 12.4, "text": "KL 4.1 → 12.4 nats"}],
        "snapshot": {"kl/ref_sequence": [[iteration, iteration * 1.5] for iteration in range(1, raised + 1)]},
        "action": "note",
        "suggestion": None,
        **fields,
    }
