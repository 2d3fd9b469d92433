"""What several tests of this folder run their jobs with."""

import re
from pathlib import Path

import pytest

MIGRATION = Path(__file__).parents[2] / "docs" / "migration.md"


@pytest.fixture
def horovod(tmp_path: Path) -> Path:
    """A folder with the package that docs/migration.md shows."""
    block = re.search(r"<!-- horovod/__init__.py -->\n```python\n(.*?)```", MIGRATION.read_text(), re.DOTALL)
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text(block[1])
    return tmp_path
