"""Ids of rows that people see: a letter for the kind, then 80 random bits in base 32."""

from __future__ import annotations

import base64
import secrets


def new_id(prefix: str) -> str:
    """`r-...` for runs, `c-...` for commands, `k-...` for checkpoints; 16 characters after the dash."""
    return f"{prefix}-{base64.b32encode(secrets.token_bytes(10)).decode('ascii').lower()}"
