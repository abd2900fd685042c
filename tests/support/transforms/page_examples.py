"""The examples of docs/transformations.md."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "transformations.md").read_text("utf-8")


EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
