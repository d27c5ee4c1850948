"""A checkpoint as a tar file: whole or visibly not, never more than a piece of it in memory, nothing from elsewhere."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from sqlalchemy.orm import Session, sessionmaker
from starlette.testclient import TestClient

from api.archive import CHUNK, Archive, open_archive
from api.settings import ApiSettings
from ppo_core.errors import CheckpointError
from ppo_core.rundir import MANIFEST, new_checkpoint, remove_checkpoint, segment_dir
from tests.api.checkpoint_files import SavedRun
from tests.api.live_server import in_thread

PATH = "segment-0001/checkpoints/iter-000020"


@pytest.fixture
def saved(settings: ApiSettings, sessions: sessionmaker[Session], make_run: Callable[..., str]) -> SavedRun:
    run_id = make_run()
    run = SavedRun(sessions, settings.data_dir / "runs" / run_id, run_id)
    run.save(20)
    return run


def download(run: SavedRun, **params: str) -> tuple[str, dict[str, str]]:
    return f"/v1/runs/{run.run_id}/checkpoints/k-{run.run_id}-1-20/download", params


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def opened(run_dir: Path, part: str = "all") -> Archive:
    digest = hashlib.sha256((run_dir / PATH / MANIFEST).read_bytes()).hexdigest()
    return open_archive(run_dir, PATH, digest, part, "top")  # type: ignore[arg-type]


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """A run's folder with a checkpoint of 64 MiB in two files."""
    run_dir = tmp_path / "runs" / "r-big"
    with new_checkpoint(segment_dir(run_dir, 1).checkpoint(20)) as made:
        for name in ("a", "b"):
            (made / name).write_bytes(os.urandom(1024) * 32 * 1024)
    return run_dir


def test_the_whole_checkpoint_comes_with_its_manifest(viewer: TestClient, saved: SavedRun, tmp_path: Path) -> None:
    url, _ = download(saved)
    answer = viewer.get(url)
    name = f"{saved.run_id}-segment-1-iteration-20"
    assert answer.status_code == 200
    assert answer.headers["Content-Type"] == "application/x-tar"
    assert answer.headers["Content-Disposition"] == f'attachment; filename="{name}.tar"'
    assert int(answer.headers["Content-Length"]) == len(answer.content)
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        for member in tar.getmembers():
            assert member.isfile()
            assert member.name.startswith(f"{name}/")
            assert ".." not in member.name
        tar.extractall(tmp_path, filter="data")
    assert files_of(tmp_path / name) == files_of(saved.folder(20))


def test_the_policy_alone_is_the_folder_that_loads_as_it_is(
    viewer: TestClient, saved: SavedRun, tmp_path: Path
) -> None:
    """Unpacked, the one folder in it is what `from_pretrained` takes: the files lie in it directly."""
    url, params = download(saved, part="policy")
    answer = viewer.get(url, params=params)
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        tar.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    assert folder.name == f"{saved.run_id}-segment-1-iteration-20-policy"
    assert files_of(folder) == files_of(saved.folder(20) / "policy")
    assert viewer.get(url, params={"part": "critic"}).status_code == 422


def test_what_is_sent_is_never_held_whole(big: Path) -> None:
    archive = opened(big)
    tracemalloc.start()
    digest, size = hashlib.sha256(), 0
    for chunk in archive.chunks():
        digest.update(chunk)
        size += len(chunk)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size == archive.bytes > 64 * CHUNK
    assert peak < 4 * CHUNK


def test_a_transfer_begun_before_the_removal_comes_whole(big: Path) -> None:
    """P17: the remover takes names away; the files that are being read stay until they are closed."""
    before = files_of(big / PATH)
    chunks = opened(big).chunks()
    begun = next(chunks)
    remove_checkpoint(big / PATH)
    assert not (big / PATH).exists()
    with tarfile.open(fileobj=io.BytesIO(begun + b"".join(chunks))) as tar:
        found = {member.name.removeprefix("top/"): tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    assert found == before


def test_a_removed_one_cannot_be_opened(big: Path) -> None:
    digest = hashlib.sha256((big / PATH / MANIFEST).read_bytes()).hexdigest()
    remove_checkpoint(big / PATH)
    with pytest.raises(CheckpointError, match=r"manifest.json is missing"):
        open_archive(big, PATH, digest, "all", "top")


def test_files_are_closed_however_it_ends(big: Path) -> None:
    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = num_open()
    list(opened(big).chunks())
    assert num_open() == before
    broken_off = opened(big).chunks()
    next(broken_off)
    assert num_open() > before
    broken_off.close()  # type: ignore[attr-defined]
    assert num_open() == before
    (big / PATH / "b").write_bytes(b"")
    with pytest.raises(CheckpointError, match="b has 0 bytes"):
        opened(big)
    assert num_open() == before


def test_links_among_the_files_are_not_followed(big: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes((big / PATH / "b").read_bytes())
    (big / PATH / "b").unlink()
    (big / PATH / "b").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="cannot be read"):
        opened(big)


def test_a_damaged_file_ends_the_transfer_short_of_its_length(
    settings: ApiSettings, saved: SavedRun, keys_by_role: dict[str, str]
) -> None:
    """A flipped byte is found on the way: no reader can take what came for a whole file."""
    with (saved.folder(20) / "policy" / "model.safetensors").open("r+b") as file:
        file.write(b"\xff")
    url, _ = download(saved)
    headers = {"Authorization": f"Bearer {keys_by_role['viewer']}"}
    with in_thread(settings) as (base, _), httpx.stream("GET", base + url, headers=headers, trust_env=False) as answer:
        assert answer.status_code == 200
        with pytest.raises(httpx.RemoteProtocolError, match="without sending complete message body"):
            answer.read()
