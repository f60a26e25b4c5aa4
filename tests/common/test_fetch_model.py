"""The init step of a pod, against real HTTP servers: an archive's, and one that answers as the hub does."""

import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from orca_common.checkpoint import TOKENIZER_FILES, WEIGHT_FILES
from orca_common.environment import child_environment
from orca_common.errors import FailedPrecondition
from orca_common.fetch_model import fetch, fill_from_folder, fill_from_url, main
from orca_local.stack import DEMO_MODEL

WEIGHTS = {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}
TOKENIZER = WEIGHTS - {"model.safetensors"}
MARK = {".fetched.json"}
COMMIT = "1234567890abcdef1234567890abcdef12345678"


class Handler(BaseHTTPRequestHandler):
    """Answers with a body (None: not found) and headers; `seen` keeps what was asked."""

    protocol_version = "HTTP/1.1"
    answer: Callable[[str], tuple[int, dict[str, str], bytes]]
    seen: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("Authorization")))
        status, headers, body = self.answer(self.path)
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        if int(headers.get("Content-Length", 0)) > len(body):
            self.close_connection = True

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def server(answer: Callable[[str], tuple[int, dict[str, str], bytes]]) -> Iterator[tuple[str, list]]:
    """A server's address, and the requests that it has seen."""
    kind = type("Answers", (Handler,), {"answer": staticmethod(answer), "seen": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}", kind.seen
        finally:
            http.shutdown()
            thread.join()


def run(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "orca_common.fetch_model", *map(str, words)]
    return subprocess.run(
        command, env=child_environment(environment), capture_output=True, text=True, timeout=60, check=False
    )


def refused(*words: str | Path, **environment: str) -> str:
    """The sentence of a fetch that fails: one line, status 1."""
    ended = run(*words, **environment)
    assert ended.returncode == 1, ended.stderr
    [line] = [line for line in ended.stderr.splitlines() if not line.startswith("{")]
    return line.removeprefix("orca-fetch-model: ")


def unpack(
    target: Path, url: str, *, sha256: str | None = None, header: str | None = None, small: bool = False
) -> bool:
    """What the command does for --url, in this process: starting Python takes longer than all the rest."""
    patterns = TOKENIZER_FILES if small else (*TOKENIZER_FILES, *WEIGHT_FILES)
    fill = partial(fill_from_url, url=url, sha256=sha256, header=header, patterns=patterns)
    return fetch(target, {"url": url}, fill, tokenizer_only=small)


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def archive(folder: Path, prefix: str = "", mode: str = "w:gz", extra: tuple[tarfile.TarInfo, ...] = ()) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as tar:  # type: ignore[call-overload]
        for member in extra:
            tar.addfile(member)
        for path in sorted(folder.iterdir()):
            tar.add(path, f"{prefix}{path.name}")
    return packed.getvalue()


@pytest.fixture(scope="module")
def packed() -> bytes:
    return archive(DEMO_MODEL)


def always(body: bytes) -> Callable[[str], tuple[int, dict[str, str], bytes]]:
    return lambda path: (200, {}, body)


def test_an_archive_becomes_the_folder(tmp_path: Path, packed: bytes) -> None:
    sha256 = hashlib.sha256(packed).hexdigest()
    with server(always(packed)) as (address, seen):
        words = ("--to", tmp_path / "demo", "--url", f"{address}/x.tgz?key=1", "--sha256", sha256.upper())
        assert run(*words, FETCH_HEADER="Authorization: Bearer abc").returncode == 0
        again = run(*words)
    assert seen == [("/x.tgz?key=1", "Bearer abc")], "the second run finds it done"
    assert "already there" in again.stderr
    assert names(tmp_path) == {"demo.lock"} | {f"demo/{name}" for name in WEIGHTS | MARK}
    for name in WEIGHTS:
        assert (tmp_path / "demo" / name).read_bytes() == (DEMO_MODEL / name).read_bytes()
    assert "key" not in (tmp_path / "demo/.fetched.json").read_text(), "a query may be a secret"


@pytest.mark.parametrize(("mode", "prefix"), [("w", "./"), ("w:bz2", "some-model/")])
def test_kinds_of_archives(tmp_path: Path, mode: str, prefix: str) -> None:
    with server(always(archive(DEMO_MODEL, prefix, mode))) as (address, _):
        assert unpack(tmp_path / "demo", f"{address}/x")
    assert names(tmp_path) == {"demo.lock"} | {f"demo/{name}" for name in WEIGHTS | MARK}


def test_the_tokenizer_alone(tmp_path: Path, packed: bytes) -> None:
    with server(always(packed)) as (address, _):
        url = f"{address}/m.tgz"
        assert unpack(tmp_path / "a", url, small=True)
        with pytest.raises(FailedPrecondition, match="another source"):
            unpack(tmp_path / "a", url)
        assert unpack(tmp_path / "b", url)
        assert not unpack(tmp_path / "b", url, small=True), "the whole checkpoint is there"
    assert names(tmp_path / "a") == TOKENIZER | MARK


def test_the_configuration_alone(tmp_path: Path) -> None:
    """The archive is read up to it: behind it this one is broken."""
    whole = archive(DEMO_MODEL, "in/a/folder/", "w:")
    cut = whole[: whole.index(b"generation_config.json")]
    with server(lambda path: (200, {"Content-Length": str(len(whole))}, cut)) as (address, _):
        words = ("--to", tmp_path / "config", "--config-only", "--url", f"{address}/x.tar", "--sha256", 64 * "0")
        ended = run(*words)
    assert ended.returncode == 0, ended.stderr
    assert names(tmp_path / "config") == {"config.json"} | MARK
    assert "was fetched from another source" in refused("--to", tmp_path / "config", "--url", f"{address}/x.tar")


def test_a_header_is_not_sent_to_where_a_redirect_leads(tmp_path: Path, packed: bytes) -> None:
    with (
        server(always(packed)) as (store, store_seen),
        server(lambda path: (302, {"Location": f"{store}/signed"}, b"")) as (door, door_seen),
    ):
        assert unpack(tmp_path / "m", f"{door}/m", header="Authorization: Bearer abc")
    assert (door_seen, store_seen) == ([("/m", "Bearer abc")], [("/signed", None)])


def test_what_cannot_be_used(tmp_path: Path, packed: bytes) -> None:
    bare, shards = tmp_path / "bare", tmp_path / "shards"
    for folder in (bare, shards):
        folder.mkdir()
        shutil.copy(DEMO_MODEL / "config.json", folder)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    (shards / "model-1.safetensors").touch()
    link = tarfile.TarInfo("tokenizer.json")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    absolute = tarfile.TarInfo(f"{tmp_path}/other/config.json")
    answers = {
        "/good": (200, {}, packed),
        "/short": (200, {"Content-Length": str(len(packed))}, packed[:-100]),
        "/half": (200, {}, packed[: len(packed) // 2]),
        "/text": (200, {}, b"<html>" * 1000),
        "/nothing": (200, {}, b""),
        "/bare": (200, {}, archive(bare)),
        "/shards": (200, {}, archive(shards)),
        "/link": (200, {}, archive(DEMO_MODEL, mode="w:", extra=(link,))),
        "/outside": (200, {}, archive(DEMO_MODEL, mode="w:", extra=(tarfile.TarInfo("../config.json"),))),
        "/absolute": (200, {}, archive(DEMO_MODEL, mode="w:", extra=(absolute,))),
    }
    target = tmp_path / "made/model"
    with server(lambda path: answers.get(path, (404, {}, b""))) as (address, _):

        def expect(sentence: str, path: str, **given: str) -> None:
            with pytest.raises(FailedPrecondition, match=sentence):
                unpack(target, f"{address}{path}", **given)  # type: ignore[arg-type]

        expect("100 bytes too early", "/short")
        expect("not a tar archive that can be unpacked", "/half")
        expect("not a tar archive that can be unpacked", "/text")
        expect("not a tar archive that can be unpacked", "/nothing")
        expect("there are no weights", "/bare")
        expect("files that are not there: model-2.safetensors", "/shards")
        expect("tokenizer.json is a link in the archive", "/link")
        expect("../config.json in the archive leads out of its folder", "/outside")
        expect("config.json in the archive leads out of its folder", "/absolute")
        expect("/absent answers 404", "/absent?key=1")
        expect("has the sha256", "/good", sha256="0" * 64)
        expect("FETCH_HEADER", "/good", header="abc")
    expect("cannot be read", "/good")  # the server is gone
    with pytest.raises(FailedPrecondition, match="http://"):
        unpack(target, "file:///etc/passwd")
    assert not target.exists()
    assert not [path for path in (tmp_path / "config.json", tmp_path / "made/config.json") if path.exists()]


def test_a_folder_is_copied_without_its_links(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for name in WEIGHTS:
        (snapshot / name).symlink_to(DEMO_MODEL / name)
    (snapshot / "pytorch_model.bin").touch()
    patterns = (*TOKENIZER_FILES, *WEIGHT_FILES)
    fill = partial(fill_from_folder, folder=snapshot, patterns=patterns)
    assert fetch(tmp_path / "model", {"folder": "snapshot"}, fill, tokenizer_only=False)
    assert names(tmp_path / "model") == WEIGHTS | MARK
    assert not any(path.is_symlink() for path in (tmp_path / "model").iterdir())


def test_chat_templates_come_too(tmp_path: Path) -> None:
    """From a folder and from an archive, those in their own folder as well; other folders stay where they are."""
    source = tmp_path / "source"
    wanted = {"tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"}
    for name in (*wanted, "onnx/model.bin", "other/config.txt"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("{}")
    for name in TOKENIZER:
        shutil.copyfile(DEMO_MODEL / name, source / name)
    fill = partial(fill_from_folder, folder=source, patterns=TOKENIZER_FILES)
    assert fetch(tmp_path / "copied", {"folder": "source"}, fill, tokenizer_only=True)
    with server(always(archive(source, "model/"))) as (address, _):
        assert unpack(tmp_path / "unpacked", f"{address}/x", small=True)
    assert names(tmp_path / "copied") == names(tmp_path / "unpacked") == TOKENIZER | wanted | MARK


def test_nothing_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").touch()
    assert "was not fetched by this command" in refused("--to", tmp_path / "mine", "--folder", DEMO_MODEL)


def test_two_at_once_fetch_once(tmp_path: Path, packed: bytes) -> None:
    """Pods that share a volume. The first is killed in the middle; the second, which waits, does all of it."""
    asked, go = threading.Semaphore(0), threading.Event()

    def answer(path: str) -> tuple[int, dict[str, str], bytes]:
        asked.release()
        assert go.wait(60)
        return 200, {}, packed

    command = [sys.executable, "-m", "orca_common.fetch_model", "--to", str(tmp_path / "m"), "--url"]
    with server(answer) as (address, seen):
        first = subprocess.Popen([*command, f"{address}/m"], env=child_environment({}), stderr=subprocess.DEVNULL)
        assert asked.acquire(timeout=60)
        second = subprocess.Popen(
            [*command, f"{address}/m"], env=child_environment({}), stderr=subprocess.PIPE, text=True
        )
        assert second.stderr is not None
        assert "waiting" in second.stderr.readline()
        first.terminate()
        assert first.wait(60) == 143
        assert asked.acquire(timeout=60)
        go.set()
        _, rest = second.communicate(timeout=60)
    assert second.returncode == 0, rest
    assert len(seen) == 2
    assert names(tmp_path / "m") == WEIGHTS | MARK


def hub(files: Path, revision: str = "v1") -> Callable[[str], tuple[int, dict[str, str], bytes]]:
    """What the hub's library asks for: the list of a revision's files, and each file by the commit."""
    listed = [
        {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": "0"} for path in sorted(files.iterdir())
    ]

    def answer(path: str) -> tuple[int, dict[str, str], bytes]:
        path = path.partition("?")[0]
        about = {
            f"/api/models/an-owner/a-model/revision/{revision}": {
                "id": "an-owner/a-model",
                "sha": COMMIT,
                "siblings": [],
            },
            f"/api/models/an-owner/a-model/tree/{COMMIT}": listed,
        }
        if path in about:
            return 200, {"Content-Type": "application/json"}, json.dumps(about[path]).encode()
        name = path.removeprefix(f"/an-owner/a-model/resolve/{COMMIT}/")
        if name != path and (files / name).exists():
            body = (files / name).read_bytes()
            return 200, {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT}, body
        return 404, {}, b""

    return answer


def test_a_model_of_the_hub_has_its_name(tmp_path: Path) -> None:
    """Not that of the cache's folder, which is the commit's hash. The hub's library shows how far it is."""
    program = "from orca_common.checkpoint import *; print(read_checkpoint(resolve_model('an-owner/a-model')).name)"
    with server(hub(DEMO_MODEL, "main")) as (address, _):
        environment = child_environment({"HF_ENDPOINT": address, "HF_HOME": str(tmp_path)})
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "an-owner/a-model\n", done.stderr
    assert "100%" in done.stderr


def test_a_tokenizer_in_gpt2s_old_form_on_the_hub(tmp_path: Path) -> None:
    """It was not downloaded, and so not refused: the endpoint had no tokenizer, and said nothing."""
    files = tmp_path / "on-the-hub"
    shutil.copytree(DEMO_MODEL, files, ignore=shutil.ignore_patterns("tokenizer.json"))
    (files / "vocab.json").write_text("{}")
    (files / "merges.txt").write_text("#version: 0.2")
    program = "from orca_common.checkpoint import *; read_checkpoint(resolve_model('an-owner/a-model'))"
    with server(hub(files, "main")) as (address, _):
        environment = child_environment({"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home")})
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert "has vocab.json and merges.txt, and no tokenizer.json" in done.stderr


def test_a_model_of_the_hub(tmp_path: Path) -> None:
    files = tmp_path / "on-the-hub"
    shutil.copytree(DEMO_MODEL, files)
    (files / "pytorch_model.bin").write_bytes(b"not asked for")
    environment = {"HF_TOKEN": "a-token", "HF_HOME": str(tmp_path / "home")}
    words = ("--hub", "an-owner/a-model", "--revision", "v1")
    with server(hub(files)) as (address, seen):
        environment["HF_ENDPOINT"] = address
        ended = run("--to", tmp_path / "whole", *words, **environment)
        assert ended.returncode == 0, ended.stderr
        assert {token for path, token in seen if "a-model" in path} == {"Bearer a-token"}
        assert run("--to", tmp_path / "part", "--tokenizer-only", *words, **environment).returncode == 0
        assert run("--to", tmp_path / "config", "--config-only", *words, **environment).returncode == 0
        assert "does not provide" in refused("--to", tmp_path / "no", "--hub", "an-owner/another", **environment)
    assert names(tmp_path / "whole") == WEIGHTS | MARK
    assert names(tmp_path / "part") == TOKENIZER | MARK
    assert names(tmp_path / "config") == {"config.json"} | MARK
    said = refused("--to", tmp_path / "no", *words, **environment)
    assert "is not in the hub's cache, and the hub cannot be reached; give a folder with the model" in said


@pytest.mark.parametrize("words", [["--hub", "a/b", "--url", "http://x"], ["--folder", "x", "--sha256", "0"], []])
def test_wrong_flags(tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--to", str(tmp_path / "m"), *words])
    assert ended.value.code == 2
    assert not list(tmp_path.iterdir())
