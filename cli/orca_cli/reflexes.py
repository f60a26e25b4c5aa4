"""Options of `vllm serve` behind `orca serve`: understood where Orca has them, else answered with the counterpart."""

from collections.abc import Sequence

SAME = {  # their option -> ours
    "--tensor-parallel-size": "--tp",
    "-tp": "--tp",
    "--pipeline-parallel-size": "--pp",
    "-pp": "--pp",
    "--data-parallel-size": "--engines",
    "-dp": "--engines",
    "--max-num-seqs": "--max-batch-size",
}
KEYS = "--api-keys and --api-keys-file have the hashes of keys; `orca key` makes a key and its hash"
TOOLS = "tools need no option: the model's chat template says how it spells calls"
OTHERS = {
    "--max-model-len": "the context is the model's own; --slots bounds the tokens that an engine holds, --chat-tokens"
    " those of an answer",
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
