"""A real vLLM server for tests, started by the product's own command: small, on a processor."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx

from ppo_core.models.policy import PolicyModel
from ppo_core.rollout.vllm_engine import _write_model
from tests.ppo_core.tiny_models import tiny_tokenizer

START_S = 800.0
MAX_MODEL_LEN = 128


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port


class LiveServer:
    """One server of a policy's shape, which starts; `wait` for it. It prints to `server.log` in its folder."""

    def __init__(
        self, policy: PolicyModel, folder: Path, extension: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "server.log"
        _write_model(policy, tiny_tokenizer(), folder / "model")
        command = [sys.executable, "-m", "ppo_core.rollout.vllm_serve", str(folder / "model")]
        options = [f"--port={self.port}", f"--max-model-len={MAX_MODEL_LEN}", "--dtype=float32", "--max-num-seqs=32"]
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, *options, "--kv-cache-memory-bytes=67108864", f"--worker-extension-cls={extension}"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(folder), **(environment or {})},
                process_group=0,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """End it and whatever it started; harmless when repeated."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health", trust_env=False, timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.2)
        self.stop()
        raise AssertionError(f"the server did not start:\n{self.log.read_text(errors='replace')[-4000:]}")
