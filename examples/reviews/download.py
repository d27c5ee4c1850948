"""Fetching the source distribution that holds the rated texts: by pip, checked by SHA-256, kept for the next time."""

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

from examples.reviews.settings import SourceSettings


class DownloadError(RuntimeError):
    """The source distribution could not be had; the message names the remedy."""


def fetch_source(source: SourceSettings, folder: Path) -> Path:
    """The verified source distribution in `folder`, downloaded if it is not there yet.

    Raises:
        DownloadError: pip could not fetch it, or the file is not the expected one.
    """
    kept = folder / f"{source.package}-{source.version}.tar.gz"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            fetched = pip_download(source, Path(aside))
            check_sha256(fetched, source.sha256)
            fetched.replace(kept)
    check_sha256(kept, source.sha256)
    return kept


def pip_download(source: SourceSettings, folder: Path) -> Path:
    """Let pip fetch the source distribution into `folder`; pip checks the hash before it runs the package's set-up."""
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{source.package}=={source.version} --hash=sha256:{source.sha256}\n")
    options = ["--no-deps", "--no-binary", source.package, "--dest", str(folder), "--requirement", str(wanted)]
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    archives = list(folder.glob("*.tar.gz"))
    if done.returncode == 0 and archives:
        return archives[0]
    output = done.stderr + done.stdout
    if "DO NOT MATCH THE HASHES" in output:
        raise DownloadError(
            f"the package index gave another {source.package} {source.version} than expected (SHA-256 differs): "
            "use an index that mirrors PyPI unchanged"
        )
    if "No module named pip" in output:
        raise DownloadError(f"pip is missing in {sys.prefix}: run `{sys.executable} -m ensurepip`, then this again")
    reason = next((line for line in reversed(output.splitlines()) if line.startswith("ERROR:")), "pip failed")
    raise DownloadError(
        f"pip could not fetch {source.package} {source.version} ({reason.removeprefix('ERROR: ')}): "
        f"check the network and pip's index setting, or put {source.package}-{source.version}.tar.gz "
        f"into {folder.parent}, then run this again"
    )


def check_sha256(path: Path, expected: str) -> None:
    """Refuse a file that is not the expected one."""
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != expected:
        raise DownloadError(
            f"{path} is damaged or another file (SHA-256 {found[:12]}..., expected {expected[:12]}...): "
            "delete it, then run this again"
        )
