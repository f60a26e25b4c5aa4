"""The version of this release: that of pyproject.toml."""

VERSION = "0.1.0"
