"""Settings of the documentation site, which ``make docs`` builds.

The source folder is the root of the repository, so that links between documents, notebooks and source files are the
same on GitHub and here. ``make docs`` therefore calls ``sphinx-build -c docs . build/docs``.
"""

from __future__ import annotations

import sys
from pathlib import Path

_DOCS = Path(__file__).parent
sys.path[:0] = [str(_DOCS), str(_DOCS.parent)]

from bridge.core.version import __version__  # noqa: E402

project = "Twinshard"
author = copyright = "The Twinshard developers"
release = version = __version__

extensions = [
    "myst_nb",
    "sphinx_copybutton",
    "extensions.command_line",
    "extensions.python_reference",
    "extensions.source_pages",
    "extensions.front_page",
]
root_doc = "docs/index"
# Documents that a maintainer reads in the repository, such as the maps of packages, are pages where a page names them.
include_patterns = [
    "docs/**.md",
    "notebooks/*.ipynb",
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "torch_impl/README.md",
    "jax_impl/README.md",
    "bridge/README.md",
    "bridge/**/README.md",
    "tests/bench/README.md",
]
exclude_patterns = [
    # READMEs of examples are for the folder that a command writes.
    "bridge/examples/files",
    ".*",
    "build",
    "dist",
    "runs",
    "docs/extensions",
    "**/__pycache__",
    "**/.ipynb_checkpoints",
]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
# Outputs are shown as they are stored: building needs nothing that a notebook imports, and no device.
nb_execution_mode = "off"
nb_merge_streams = True

# Types of other packages are shown and not linked, since the build uses no network.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!(twinshard|bridge|torch_impl|jax_impl)\.).*")]
python_use_unqualified_type_names = True
maximum_signature_line_length = 80
add_module_names = True
toc_object_entries_show_parents = "hide"

# Options begin with two hyphens, also in prose. A block without a language is output or a drawing.
smartquotes = False
highlight_language = "text"

html_theme = "furo"
html_title = "Twinshard"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
