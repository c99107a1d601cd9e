"""What the built pages say of their origin: the version, and the repository with its edit links.

The checkout does not say where its repository is, as it would be wrong in every copy. A build on
GitHub names the repository that builds it; elsewhere `make docs REPOSITORY=https://...` does.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

VERSION = Path(__file__).parents[1] / "cute_attn/_version.py"
BRANCH = "main"


def repository() -> str:
    """The address, or "".

    Raises:
        PluginError: it is no https:// address.
    """
    server, name = (os.environ.get(f"GITHUB_{x}", "") for x in ("SERVER_URL", "REPOSITORY"))
    url = os.environ.get("REPOSITORY") or (f"{server}/{name}" if server and name else "")
    if url and not re.fullmatch(r"https://[^\s@]+[^\s@/]", url):
        raise PluginError(f"REPOSITORY is {url!r}, must be the https:// address of a repository")
    return url


def on_config(config: Any, **_: Any) -> Any:
    """mkdocs calls this with what mkdocs.yml says."""
    found = re.search(r'"(.+)"', VERSION.read_text())
    assert found is not None
    config.site_name = f"{config.site_name} {found[1]}"
    if url := repository():
        config.repo_url = url
        config.repo_name = "/".join(url.split("/")[-2:])
        config.edit_uri = f"edit/{BRANCH}/docs/"
    return config
