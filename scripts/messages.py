"""Write docs/messages.md: every message that is known, what it means and what to change, from the signatures.

python scripts/messages.py [--check]       (--check: exit 1 if the file is not what would be written)
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from supervisord_vllm.engine.reference import page  # noqa: E402 - the tree comes first

TARGET = ROOT / "docs" / "messages.md"


def main() -> None:
    """Write it, or compare."""
    text = page()
    if "--check" in sys.argv[1:]:
        sys.exit(0 if TARGET.read_text("utf-8") == text else f"{TARGET} is not up to date: run `make messages`")
    TARGET.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
