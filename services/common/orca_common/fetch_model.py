"""Fetches a checkpoint into a folder: the init step of a pod.

    python -m orca_common.fetch_model --to FOLDER [--tokenizer-only | --config-only] --hub NAME [--revision REVISION]
    python -m orca_common.fetch_model --to FOLDER [--tokenizer-only | --config-only] --url URL [--sha256 HEX]
    python -m orca_common.fetch_model --to FOLDER [--tokenizer-only | --config-only] --folder FOLDER

Everything is fetched into `FOLDER.part`, checked, and then renamed. So the folder is either absent or complete, and an
init step that starts again finds its work done. A lock beside the folder lets pods share a volume: one fetches, the
others wait.
"""

import argparse
import fcntl
import hashlib
import http.client
import json
import logging
import os
import shutil
import signal
import sys
import tarfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from . import logs
from .checkpoint import INDEX, TOKENIZER_FILES, WEIGHT_FILES, WEIGHT_NAMES, download_from_hub, read_checkpoint
from .errors import FailedPrecondition
from .settings import fetch_header

log = logging.getLogger(__name__)

MARK = ".fetched.json"  # in the folder: what was asked for when it was fetched
CONFIG_FILES = ("config.json",)
SILENCE_SECONDS = 60.0  # a server that sends nothing for so long is given up
PROGRESS_SECONDS = 5.0
CHUNK = 1 << 20


def fetch(target: Path, source: dict[str, str], fill: Callable[[Path], None], *, tokenizer_only: bool) -> bool:
    """Makes `target` hold what `fill(part)` puts into the folder `part`, or finds that it does already (False).

    `source` names where it comes from. Raises FailedPrecondition when the target holds anything else, or when
    the checkpoint that came is not complete.
    """
    wanted: dict[str, Any] = {**source, "tokenizer_only": tokenizer_only}
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    with _lock(target.with_name(f"{target.name}.lock")):
        if target.is_dir() and any(target.iterdir()):
            _check_mark(target, wanted)
            return False
        shutil.rmtree(part, ignore_errors=True)  # of a step that was killed
        part.mkdir()
        with _progress(part):
            fill(part)
        root = _root(part)
        _check_complete(root, tokenizer_only)
        (root / MARK).write_text(json.dumps(wanted))
        root.rename(target)
        shutil.rmtree(part, ignore_errors=True)  # the rest of an archive with the checkpoint in a folder
    return True


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another process fetches this folder; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _check_mark(target: Path, wanted: dict[str, Any]) -> None:
    """Refuses a folder whose mark is another one: nothing is replaced, for ranks that run may read it again."""
    try:
        found = json.loads((target / MARK).read_bytes())
    except (OSError, ValueError):
        raise FailedPrecondition(f"{target} is not empty, and was not fetched by this command") from None
    if found not in (wanted, {**wanted, "tokenizer_only": False}):  # a whole checkpoint holds the tokenizer, too
        raise FailedPrecondition(f"{target} was fetched from another source ({json.dumps(found)}); name another folder")


def _root(part: Path) -> Path:
    """The folder with config.json: an archive may hold the checkpoint in a folder of its own."""
    folders = sorted((path.parent for path in part.rglob("config.json")), key=lambda folder: len(folder.parts))
    if not folders:
        raise FailedPrecondition("there is no config.json in what was fetched")
    if len(folders) > 1 and len(folders[0].parts) == len(folders[1].parts):
        raise FailedPrecondition(f"there are several checkpoints: {folders[0].name} and {folders[1].name}")
    return folders[0]


def _check_complete(folder: Path, tokenizer_only: bool) -> None:
    read_checkpoint(folder)
    if tokenizer_only:
        return
    if not any((folder / name).exists() for name in WEIGHT_NAMES):
        raise FailedPrecondition(f"there are no weights in what was fetched ({' or '.join(WEIGHT_NAMES)})")
    if (folder / INDEX).exists():
        try:
            shards = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
        except (ValueError, KeyError):
            raise FailedPrecondition(f"{INDEX} has no weight_map") from None
        absent = sorted(name for name in shards if not (folder / name).exists())
        if absent:
            raise FailedPrecondition(f"{INDEX} names files that are not there: {', '.join(absent)}")


@contextmanager
def _progress(part: Path) -> Iterator[None]:
    """Says every few seconds how much has come."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(PROGRESS_SECONDS):
            log.info(f"fetched {_size(part) / 1e6:.0f} MB so far")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _size(folder: Path) -> int:
    """Bytes in a folder. Files may go while it counts: the hub's library renames its own."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def fill_from_hub(part: Path, name: str, revision: str | None, patterns: Sequence[str]) -> None:
    """The hub's library reads HF_TOKEN and HF_ENDPOINT from the environment itself."""
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    download_from_hub(name, patterns, revision=revision, local_dir=part)
    shutil.rmtree(part / ".cache", ignore_errors=True)  # its own notes


def fill_from_folder(part: Path, folder: Path, patterns: Sequence[str]) -> None:
    """Copies the files themselves where the folder has links, as the hub's cache does."""
    if not folder.is_dir():
        raise FailedPrecondition(f"{folder} is not a folder")
    for path in sorted(match for pattern in patterns for match in folder.glob(pattern)):
        target = part / path.relative_to(folder)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)


def fill_from_url(
    part: Path, url: str, sha256: str | None, header: str | None, patterns: Sequence[str], *, config_only: bool = False
) -> None:
    """Unpacks a tar archive while it arrives, so that the volume holds nothing twice. `header` is `NAME: VALUE`.

    config_only: stops at the first config.json, so that the digest of the whole is not compared.
    """
    place = public(url)
    if urlsplit(url).scheme not in ("http", "https"):
        raise FailedPrecondition(f"{place} does not begin with http:// or https://")
    request = urllib.request.Request(url)
    if header is not None:
        name, colon, value = header.partition(":")
        if not colon or not name.strip() or "\n" in header.strip():
            raise FailedPrecondition("FETCH_HEADER is not of the form NAME: VALUE")
        request.add_unredirected_header(name.strip(), value.strip())  # never to the server that a redirect names
    try:
        with urllib.request.urlopen(request, timeout=SILENCE_SECONDS) as response:
            stream = _Download(response)
            if config_only:
                _unpack(stream, part, patterns, most=1)
                return
            _unpack(stream, part, patterns)
            stream.drain()
    except urllib.error.HTTPError as error:
        raise FailedPrecondition(f"{place} answers {error.code} {error.reason}") from None
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise FailedPrecondition(f"{place} cannot be read ({getattr(error, 'reason', error)})") from None
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise FailedPrecondition(f"{place} is not a tar archive that can be unpacked ({error})") from None
    if sha256 and stream.digest.hexdigest() != sha256.lower():
        raise FailedPrecondition(f"{place} has the sha256 {stream.digest.hexdigest()}, not {sha256.lower()}")


def public(url: str) -> str:
    """A URL without what may be secret in it: its user, its password and its query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


class _Download:
    """The body of an answer: tarfile reads it, and its digest is taken on the way."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response
        self._left = response.length  # None: the server does not say how long it is
        self.digest = hashlib.sha256()

    def read(self, size: int = CHUNK) -> bytes:
        data = self._response.read(size)
        self.digest.update(data)
        if self._left is not None:
            self._left -= len(data)
            if not data and self._left and size:
                raise ConnectionError(f"it ended {self._left} bytes too early")
        return data

    def drain(self) -> None:
        while self.read():
            pass


def _unpack(stream: Any, part: Path, patterns: Sequence[str], most: int | None = None) -> None:
    """Unpacks the files whose names match; with `most`, at most this number of them."""
    unpacked = 0
    with tarfile.open(fileobj=stream, mode="r|*") as archive:
        for member in archive:
            if member.isdir() or not any(PurePosixPath(member.name).match(pattern) for pattern in patterns):
                continue
            if not member.isfile():
                raise FailedPrecondition(f"{member.name} is a link in the archive; pack it with tar --dereference")
            free = shutil.disk_usage(part).free
            if member.size > free:
                raise FailedPrecondition(f"{member.name} has {member.size} bytes, and {free} are free")
            target = part / member.name
            if not Path(os.path.normpath(target)).is_relative_to(os.path.normpath(part)):
                raise FailedPrecondition(f"{member.name} in the archive leads out of its folder")
            target.parent.mkdir(parents=True, exist_ok=True)
            content = archive.extractfile(member)
            assert content is not None  # it is a file
            with content, target.open("wb") as to:
                shutil.copyfileobj(content, to)
            unpacked += 1
            if unpacked == most:
                return


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m orca_common.fetch_model", description="Fetches a checkpoint.")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="the folder that it becomes")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--tokenizer-only", action="store_true", help="all but the weights: what an endpoint needs")
    part.add_argument("--config-only", action="store_true", help="config.json: what the check before an upgrade reads")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--hub", metavar="NAME", help="a model of the hub; HF_TOKEN may hold a token")
    source.add_argument("--url", help="a tar archive, plain or .gz, .bz2, .xz; FETCH_HEADER may hold an HTTP header")
    source.add_argument("--folder", type=Path, metavar="FOLDER", help="a folder to copy")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--sha256", metavar="HEX", help="of the archive")
    given = parser.parse_args(words)
    if given.revision and not given.hub:
        parser.error("--revision goes with --hub")
    if given.sha256 and not given.url:
        parser.error("--sha256 goes with --url")
    return given


def main(words: Sequence[str] | None = None) -> None:
    """Raises SystemExit with one sentence when it cannot be done."""
    given = _arguments(words)
    logs.configure("orca-fetch-model", "INFO")
    # Process 1 of a container has no default action for SIGTERM. What is half done is cleared by the next start.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    if given.config_only:
        patterns, part = CONFIG_FILES, {"part": "config.json"}
    else:
        patterns, part = (*TOKENIZER_FILES, *([] if given.tokenizer_only else WEIGHT_FILES)), {}
    if given.hub:
        source = {"hub": given.hub, **({"revision": given.revision} if given.revision else {})}
        fill = partial(fill_from_hub, name=given.hub, revision=given.revision, patterns=patterns)
    elif given.url:
        source = {"url": public(given.url), **({"sha256": given.sha256} if given.sha256 else {})}
        fill = partial(
            fill_from_url,
            url=given.url,
            sha256=given.sha256,
            header=fetch_header(),
            patterns=patterns,
            config_only=given.config_only,
        )
    else:
        source = {"folder": str(given.folder)}
        fill = partial(fill_from_folder, folder=given.folder, patterns=patterns)
    target: Path = given.to.absolute()
    try:
        fetched = fetch(target, source | part, fill, tokenizer_only=given.tokenizer_only or given.config_only)
    except (FailedPrecondition, OSError) as error:
        raise SystemExit(f"orca-fetch-model: {' '.join(str(error).split())}") from None
    log.info(f"{target} is {'fetched' if fetched else 'already there'}: {_size(target) / 1e6:.0f} MB")


if __name__ == "__main__":
    main(sys.argv[1:])
