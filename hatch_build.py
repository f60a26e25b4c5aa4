"""Compiles the CPU's kernels into a released wheel, so that its users need no compiler."""

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CPU = Path("kernels/orca_kernels/cpu")


class Kernels(BuildHookInterface):  # type: ignore[type-arg]
    """Runs where HATCH_BUILD_HOOK_ENABLE_CUSTOM asks for it. Other installs compile on first use instead."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build = runpy.run_path(str(Path(self.root) / CPU / "build.py"))
        try:
            libraries = build["build"](Path(self.root) / CPU)
        except build["CannotBuild"] as error:  # the client needs none, and a worker runs plain torch then
            self.app.display_warning(f"no compiled kernels in this wheel: {error}")
            return
        build_data["force_include"].update({str(one): f"orca_kernels/cpu/{one.name}" for one in libraries})
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        for built in (Path(self.root) / CPU).glob("kernels-*.so"):
            built.unlink()
