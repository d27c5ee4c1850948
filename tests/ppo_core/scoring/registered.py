"""Registers functions the way an installed package does: a module and its entry points on the path."""

from __future__ import annotations

from pathlib import Path

import pytest

FUNCTIONS = '''
import os, signal, time

def length(text):
    return len(text)

def response_length(response, prompt):
    return float(len(response) - len(prompt))

def by_text(text):
    """What the text says: it may hang, raise, die, or give back what is no score."""
    word = text.split()[-1]
    if word == "sleep":
        time.sleep(3600)
    if word == "raise":
        raise ValueError("no such film")
    if word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "exit":
        raise SystemExit(3)
    if word == "print":
        print("loud", flush=True)
    if word == "slow":
        time.sleep(1.5)
    return {"nan": float("nan"), "none": None, "inf": float("inf"), "text": "good", "true": True, "big": 10**400}.get(
        word, float(len(text))
    )
'''


def register(folder: Path, monkeypatch: pytest.MonkeyPatch, group: str, **more: str) -> None:
    """Put `FUNCTIONS` on the path and register them, and `more` (name=module:attribute), in `group`."""
    (folder / "scoring_for_tests.py").write_text(FUNCTIONS)
    info = folder / "scoring_for_tests-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scoring-for-tests\nVersion: 1.0\n")
    names = {name: f"scoring_for_tests:{name}" for name in ("length", "response_length", "by_text")} | more
    (info / "entry_points.txt").write_text(f"[{group}]\n" + "".join(f"{a} = {b}\n" for a, b in names.items()))
    monkeypatch.syspath_prepend(str(folder))
