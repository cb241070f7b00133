"""Write docs/states.md from the table that the daemon runs by. ``python scripts/states.py``"""

from __future__ import annotations

from pathlib import Path

from supervisord_vllm.core.diagram import page

if __name__ == "__main__":
    (Path(__file__).resolve().parent.parent / "docs" / "states.md").write_text(page(), encoding="utf-8")
