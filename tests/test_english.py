"""tests/english.py: which phrases it finds in the lines that a change adds."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from english import INSTEAD, ROOT, findings

DIFF = """\
diff --git a/services/pool.py b/services/pool.py
--- a/services/pool.py
+++ b/services/pool.py
@@ -7,2 +7,3 @@ def room() -> int:
-    # nobody reads this any more
-    moved = 1  # whoever comes
+    # nobody reads this now
+        moved = 1  # whoever comes
+    `nobody` is a word
@@ -40,0 +42 @@
+    so many tokens, of which there is none
"""


def test_it_names_file_line_phrase_and_advice() -> None:
    first, second, third = findings(DIFF)
    assert first.startswith("services/pool.py:7: 'nobody': name who it is")
    assert second.startswith("services/pool.py:42: 'is none': write")
    assert third.startswith("services/pool.py:42: 'so many': name the number")


@pytest.mark.parametrize(
    "line",
    [
        '"""What a rank holds."""',
        '    """What a row needs: slots."""',
        "It stops. Else it goes on.",
        "# Else, a proxy tries again",
        "The others are none of ours.",
        "After so many seconds",
        "Nobody waits.",
        "whoever holds the lease",
        "A rank of that one is killed.",
        "which tells of a loss",
        "The client hears ACCEPTED.",
        "The master is told",
    ],
)
def test_each_phrase_is_found(line: str) -> None:
    assert len(findings(f"+++ b/a.md\n@@ -0,0 +1 @@\n+{line}\n")) == 1


@pytest.mark.parametrize(
    "line",
    [
        "if x is None:",
        "    else:",
        '"""What is wrong?"""',
        "a shear",
        "He told the truth.",
        "that ones",
        "+ [] or else",
    ],
)
def test_good_lines_pass(line: str) -> None:
    assert findings(f"+++ b/a.md\n@@ -0,0 +1 @@\n+{line}\n") == []


def test_the_advice_follows_its_own_rule() -> None:
    said = [advice for advice in INSTEAD.values() for phrase in INSTEAD if re.search(phrase, advice)]
    assert said == []


@pytest.mark.parametrize("base", [(), ("HEAD",), ("no-such-branch",)])
def test_a_clone_of_one_commit(base: tuple[str, ...], tmp_path: Path) -> None:
    """CI has no commit before HEAD, and a developer perhaps no branch main."""

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    page = tmp_path / "tests/page.md"
    page.parent.mkdir()
    page.write_text("Nobody waits.\n")
    (tmp_path / "tests/english.py").write_text((ROOT / "tests/english.py").read_text())
    run("git", "init", "-q", "-b", "work")
    run("git", "add", ".")
    assert run("git", "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "one").returncode == 0
    checked = run(sys.executable, "tests/english.py", *base)
    assert (checked.returncode, checked.stderr) == (0, "")
    page.write_text("Nobody waits.\nNobody sleeps.\n")
    checked = run(sys.executable, "tests/english.py", "HEAD")
    assert (checked.returncode, checked.stderr.partition(": name")[0]) == (1, "tests/page.md:2: 'Nobody'")
