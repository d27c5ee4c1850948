"""Exit codes stand in the README and in `ppo --help` as the code has them."""

from __future__ import annotations

import re
from pathlib import Path

from ppo import exits
from ppo.exits import Exit
from ppo_core.rundir import ExitCode

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_every_code_is_told() -> None:
    codes = {str(int(code)) for code in Exit}
    assert codes == set(re.findall(r"(?:^|· )(\d+) ", exits.CODES))
    header = next(line for line in README.splitlines() if line.startswith("| 0 |"))
    assert codes == set(re.findall(r"\d+", header))


def test_the_trainers_codes_and_what_becomes_of_them_are_told() -> None:
    told = {
        int(code): int(exit_code)
        for codes, exit_code in re.findall(r"^\| ([\d, ]+) \([^)]*\) \| (\d+) \|$", README, flags=re.MULTILINE)
        for code in codes.split(",")
    }
    assert told == {int(code): int(exits.of_trainer(code)) for code in ExitCode}


def test_a_run_held_up_by_a_full_disk_is_over_for_whoever_waits() -> None:
    assert exits.is_over("paused", "disk_full")
    assert exits.of_ended("paused", "disk_full") == exits.of_trainer(ExitCode.PAUSED) == Exit.STOPPED
    assert not exits.is_over("paused", "paused")
