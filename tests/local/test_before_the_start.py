"""What `orca serve` can know before it starts a process ends it at once, with the setting's name."""

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import make_gpt2, make_shape
from quantized_files import gptq, make_quantized
from servers import RedisServer, redis_server

from orca_common.checkpoint import resolve_model
from orca_common.errors import FailedPrecondition
from orca_common.settings import without_password
from orca_local.run_folder import RunFolder
from orca_local.settings import ServeSettings
from orca_local.stack import Stack
from orca_pool.reach import check_reachable
from orca_worker.machine import gpus
from orca_worker.models.families import check_type


async def refusal(run_dir: Path, **settings: object) -> str:
    stack = Stack(ServeSettings.load(**({"port": 0, "http_port": 0} | settings)), run_dir, print)
    with pytest.raises(FailedPrecondition) as raised:
        await stack.start()
    assert not stack.began
    await stack.stop()
    return str(raised.value)


@pytest.mark.parametrize(("setting", "host"), [("port", "127.0.0.1"), ("http_port", "::1"), ("ui_port", "127.0.0.1")])
async def test_a_port_in_use(tmp_path: Path, setting: str, host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as taken:
        port = taken.getsockname()[1]
        sentence = await refusal(tmp_path, host=host, **{setting: port})
    assert sentence.startswith(f"{setting}: cannot listen on ")
    assert f":{port} (Address already in use)" in sentence


async def test_two_doors_cannot_have_one_port(tmp_path: Path) -> None:
    """Redis and a supervisor were started before the second door found the port in use."""
    sentence = await refusal(tmp_path, port=50123, http_port=50123)
    what = "port is gRPC's, http_port the OpenAI API's, ui_port the page's"
    assert sentence == f"http_port: is 50123, and port is the same; {what}"
    sentence = await refusal(tmp_path, http_port=50123, ui_port=50123)
    assert sentence == f"ui_port: is 50123, and http_port is the same; {what}"


async def test_an_address_of_another_machine(tmp_path: Path) -> None:
    """It named the port, and advised another one."""
    sentence = await refusal(tmp_path, host="192.0.2.1")
    assert (
        sentence
        == "host: cannot listen on 192.0.2.1 (Cannot assign requested address); give an address of this machine"
    )


async def test_a_folder_in_use(tmp_path: Path) -> None:
    with RunFolder(tmp_path):
        assert "belongs to another" in await refusal(tmp_path)
    assert "is not a checkpoint folder" in await refusal(tmp_path, model=str(tmp_path)), "the folder was given back"


async def test_no_redis(tmp_path: Path) -> None:
    sentence = await refusal(tmp_path, redis_url="redis://:secret@127.0.0.1:1/0")
    assert sentence.startswith("redis_url: redis://***@127.0.0.1:1/0: ")
    assert sentence.endswith(": the request pool is away: no server listens at 127.0.0.1:1")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tls_dir": "/nowhere"}, "tls_dir: /nowhere/endpoint cannot be used (tls.crt: No such file or directory)"),
        ({"api_keys_file": "/nowhere"}, "api_keys_file: "),
        ({"api_keys": "research"}, "api_keys: "),
    ],
)
async def test_certificates_and_keys(tmp_path: Path, settings: dict[str, str], sentence: str) -> None:
    """A process told it, after some seconds."""
    assert (await refusal(tmp_path, **settings)).startswith(sentence)


WAYS = (
    "Orca reads gptq, awq, compressed-tensors, fp8, GGUF, and float32, float16 and bfloat16 in safetensors, of which "
    "quantize makes eight or four bits"
)


@pytest.mark.parametrize(
    ("config", "way"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
        ({"quant_method": "hqq", "bits": 4}, "'hqq' (bits 4)"),
        ({"quant_method": "exl2", "format": "exl"}, "'exl2' (format 'exl')"),
        ({"bits": 4}, "an object (bits 4)"),
    ],
    ids=str,
)
async def test_weights_that_were_quantized_otherwise(tmp_path: Path, config: dict[str, object], way: str) -> None:
    folder = make_gpt2(tmp_path / "model", heads=2, layers=1, hidden=8, vocab=97, positions=32, seed=1)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    sentence = await refusal(tmp_path / "run", model=str(folder))
    assert sentence.startswith(f"model: {file} says that the weights were quantized by {way}")
    assert sentence.endswith(f"; {WAYS}")


async def test_codes_that_are_wrong(tmp_path: Path) -> None:
    """A group that is not there, in the middle of a file of GPTQ."""
    floats = make_shape(tmp_path / "floats", "llama, 2 K/V heads")
    folder = make_quantized(floats, tmp_path / "model", gptq(16))
    file = folder / "model.safetensors"
    raw, index = bytearray(file.read_bytes()), "model.layers.1.mlp.up_proj.g_idx"
    start = 8 + int.from_bytes(raw[:8], "little")
    _, end = json.loads(raw[8:start])[index]["data_offsets"]
    raw[start + end - 4 : start + end] = (7).to_bytes(4, "little")
    file.write_bytes(raw)
    sentence = await refusal(tmp_path / "run", model=str(folder))
    problem = "layers.1.mlp.up_proj.g_idx has the group 7; there are 3"
    assert sentence == f"model: the weights in {folder} cannot be read ({file.name}: {problem})"


async def test_a_file_in_gguf_that_is_none(tmp_path: Path) -> None:
    """Alone, and beside a config.json."""
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "q8_0.gguf"
    file.write_bytes(b"GGUF")
    problem = f"model: {file} cannot be read (the file ends within 'a number')"
    for model in (file, file.parent):
        assert await refusal(tmp_path / "run", model=str(model)) == problem
    folder = make_gpt2(file.parent, heads=2, layers=1, hidden=8, vocab=97, positions=32, seed=1)
    (folder / "model.safetensors").unlink()
    assert await refusal(tmp_path / "run", model=str(folder)) == problem


@pytest.mark.skipif(gpus() > 0, reason="this machine has a GPU")
async def test_no_gpu(tmp_path: Path) -> None:
    """A rank told it, after it had imported torch."""
    sentence = await refusal(tmp_path, device="cuda", tp=2)
    assert sentence == "device: no GPU is visible; --device cpu computes without one"


async def test_another_architecture(tmp_path: Path) -> None:
    """It is refused before anything else: other configurations have other fields."""
    (tmp_path / "config.json").write_text('{"model_type": "bloom"}')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        sentence = await refusal(tmp_path / "run", model=str(tmp_path), port=taken.getsockname()[1], tp=7)
    served = "gpt2, gpt_neox, gptj, llama, mistral, qwen2, qwen3, gemma3_text, t5, marian"
    assert sentence == f"model: {tmp_path.name} is of type bloom; Orca has {served}"


@pytest.mark.parametrize(
    ("file", "content", "part"),
    [
        ("m.gguf", "", "cannot be read .the file ends within 'its first bytes'"),
        ("adapter_config.json", "{}", "is a LoRA adapter and no whole model"),
        (
            "config.json",
            '{"model_type": "mixtral", "num_local_experts": 8}',
            "is of type mixtral, a mixture of experts;",
        ),
        (
            "config.json",
            '{"model_type": "llava", "vision_config": {}}',
            "is of type llava, which reads images or sound;",
        ),
        ("a.txt", "", "is not a checkpoint folder"),
    ],
)
def test_other_models_are_named_for_what_they_are(tmp_path: Path, file: str, content: str, part: str) -> None:
    (tmp_path / file).write_text(content)
    with pytest.raises(FailedPrecondition, match=part):
        resolve_model(str(tmp_path), check_type)


def pointer(file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n")


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (Path.unlink, r"lacks weights in safetensors \(model.safetensors\)"),
        (lambda file: file.rename(file.with_name("pytorch_model.bin")), r"pytorch_model.bin, a pickle"),
        (pointer, r"model.safetensors: it is a pointer of git-lfs: git lfs pull gets the file"),
        (cut_off, r"model.safetensors: it ends after \d+ of \d+ bytes"),
    ],
)
async def test_wrong_weights(tmp_path: Path, harm: Callable[[Path], object], sentence: str) -> None:
    """A rank said it, when the whole stack had started."""
    folder = make_gpt2(tmp_path / "model", heads=1, layers=1, hidden=16, vocab=97, positions=48, seed=2)
    harm(folder / "model.safetensors")
    assert re.search(sentence, await refusal(tmp_path / "run", model=str(folder)))


@pytest.fixture(scope="module")
def redis() -> object:
    with redis_server() as server:
        yield server


WRONG: dict[str, tuple[Callable[[RedisServer], str], str]] = {
    "another scheme": (lambda redis: redis.url.replace("redis:", "http:"), "must specify one of the following schemes"),
    "wrong password": (lambda redis: f"redis://:secret@127.0.0.1:{redis.port}/0", "password"),
    "no number": (lambda redis: "redis://127.0.0.1:port/0", "server 1 of it is no HOST:PORT"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_a_redis_that_refuses(redis: RedisServer, case: str) -> None:
    url, sentence = WRONG[case]
    with pytest.raises(FailedPrecondition, match=rf"^redis_url: .*{sentence}") as raised:
        await check_reachable(url(redis), 0.1)
    assert "secret" not in str(raised.value)


async def test_a_redis_that_answers(redis: RedisServer) -> None:
    await check_reachable(redis.url, 0.1)


def test_less_than_a_block() -> None:
    with pytest.raises(SystemExit, match=r"^--slots: 7 are less than a block, which has 8 \(block_size\)"):
        ServeSettings.load(["--slots", "7", "--block-size", "8"])


@pytest.mark.parametrize("url", ["redis://me:secret@10.0.0.1:6379/0", "redis://10.0.0.1:6379/0?db=1&password=secret"])
@pytest.mark.parametrize("flag", ["--redis-url={}", "--redis-url {}"])
def test_no_password_on_the_command_line(flag: str, url: str) -> None:
    arguments = flag.format(url).split()
    with pytest.raises(SystemExit, match=r"^--redis-url: everybody could read .* use ORCA_REDIS_URL") as raised:
        ServeSettings.load(arguments)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://me:secret@a:1/0", "redis://***@a:1/0"),
        ("redis://a:1/0?password=secret&db=2", "redis://a:1/0?password=***&db=2"),
        ("rediss+sentinel://a,b/main/0?db=2&password=secret", "rediss+sentinel://a,b/main/0?db=2&password=***"),
        ("redis://a:1/0", "redis://a:1/0"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert without_password(url) == shown
