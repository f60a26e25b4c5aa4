"""Options of vLLM's, TGI's and llama.cpp's servers: Orca's own name of each, or the counterpart in a sentence."""

from collections.abc import Sequence

SAME = {  # their option -> ours
    "--tensor-parallel-size": "--tp",
    "-tp": "--tp",
    "--pipeline-parallel-size": "--pp",
    "-pp": "--pp",
    "--data-parallel-size": "--engines",
    "-dp": "--engines",
    "--max-num-seqs": "--max-batch-size",
    "--model-id": "--model",
    "--num-shard": "--tp",
    "--hostname": "--host",
}
KEYS = "--api-keys and --api-keys-file have the hashes of keys; `orca key` makes a key and its hash"
TOOLS = "tools need no option: the model's chat template says how it spells calls"
CONTEXT = (
    "the context is the model's own; --slots bounds the tokens that an engine holds, --chat-tokens those of an answer"
)
ADAPTERS = "--adapters NAME=FOLDER,.. serves LoRA adapters; a request's model is one's name"
OTHERS = {
    "--max-model-len": CONTEXT,
    "--max-total-tokens": CONTEXT,
    "--ctx-size": CONTEXT,
    "--n-gpu-layers": "a rank computes on one device, which --device names; --tp and --pp share a model among GPUs",
    "--quantization": "a checkpoint's own format is read as it is; --quantize int8 or int4 makes codes",
    "--kv-cache-dtype": "--kv-dtype int8 keeps keys and values in eight bits, on a CPU",
    "--enable-lora": ADAPTERS,
    "--lora-modules": ADAPTERS,
    "--enable-prefix-caching": "a prompt's beginning is reused already; --policy paper does not",
    "--enable-chunked-prefill": "prompts run in parts already; --policy paper runs them whole",
    "--max-num-batched-tokens": "--policy balanced,positions=N bounds the positions of an iteration",
    "--speculative-config": "drafts from the text itself are verified already, where run_ahead is 0",
    "--enforce-eager": "--cuda-graphs, with no- before its name, is off: a GPU then runs the kernels one by one",
    "--gpu-memory-utilization": "keys and values have the memory that is left; --slots bounds them, in tokens",
    "--api-key": KEYS,
    "--enable-auto-tool-choice": TOOLS,
    "--tool-call-parser": TOOLS,
    "--chat-template": "the template is the checkpoint's own; chat_template_kwargs of a request reach it",
    "--trust-remote-code": "Orca runs no code of a checkpoint",
}


def understood(arguments: Sequence[str]) -> list[str]:
    """The arguments in Orca's words. Raises SystemExit with the counterpart of an option that Orca does not have."""
    found = list[str]()
    for n, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in OTHERS:
            raise SystemExit(f"{name}: is no option of orca serve: {OTHERS[name]}")
        if n == 0 and not argument.startswith("-"):  # vllm serve MODEL
            found += ["--model", argument]
        else:
            found.append(SAME.get(name, name) + equals + value)
    return found
