# /// script
# requires-python = "<3.13"
# dependencies = ["aider-chat==0.86.2"]
# ///
"""aider: an edit of a file, by its whole and by a diff."""

import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

quiet = "--no-git --yes-always --no-check-update --no-analytics --no-show-model-warnings --no-show-release-notes"
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder, "hello.py")
    own = {"OPENAI_API_BASE": f"{os.environ['ORCA']}/v1", "OPENAI_API_KEY": "none", "HOME": folder}

    def edit(form: str, said: str) -> None:
        file.write_text("print(1)\n")
        asked = f"Print 2. SAY:{said}:SAY"
        run = [sys.executable, "-m", "aider", "--model", "openai/tiny", *quiet.split(), "--edit-format", form]
        run += ["--message", asked, "hello.py"]
        subprocess.run(run, env=os.environ | own, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        assert file.read_text() == "print(2)\n"

    edit("whole", "hello.py\n```\nprint(2)\n```")
    edit("diff", "hello.py\n```python\n<<<<<<< SEARCH\nprint(1)\n=======\nprint(2)\n>>>>>>> REPLACE\n```")
print("aider-chat", version("aider-chat"))
