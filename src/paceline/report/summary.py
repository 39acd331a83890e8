"""stub"""

from pathlib import Path


def write_reports(run_dir: Path) -> None: ...
