# /// script
# dependencies = ["click==8.3.1", "shell-gpt==1.5.1"]
# ///
"""shell-gpt: a text as it streams, a chat, and one line of the shell."""

import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

program = Path(sys.executable).with_name("sgpt")
with tempfile.TemporaryDirectory() as folder:
    own = {
        "API_BASE_URL": f"{os.environ['ORCA']}/v1",
        "OPENAI_API_KEY": "none",
        "DEFAULT_MODEL": "tiny",
        "HOME": folder,
    }
    own |= {"CHAT_CACHE_PATH": f"{folder}/chats", "CACHE_PATH": f"{folder}/cache", "PRETTIFY_MARKDOWN": "false"}

    def said(*words: str) -> str:
        run = [str(program), *words]
        return subprocess.check_output(run, text=True, env=os.environ | own, stdin=subprocess.DEVNULL).strip()

    for words in (["Bern?"], ["--chat", "a", "Bern?"], ["--chat", "a", "And?"], ["--code", "Bern?"]):
        assert said(*words) == "It is 5 degrees in Bern.", words
print("shell-gpt", version("shell-gpt"))
