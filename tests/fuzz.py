"""Coverage-guided fuzzing of every reader of files: ``make fuzz``, or ``python -m tests.fuzz plan 60``.

Any ending but an answer or a UserError of one line is a crash, which atheris writes to a file.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

SECONDS = 60
LONGEST = 1 << 16  # bytes


def main(kinds: list[str], seconds: int) -> int:
    """Each reader in a process of its own, for so long; 1 when one crashed."""
    crashed = []
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "tests.fuzz", "--one", kind, folder, str(seconds)]
            if subprocess.run(command, check=False).returncode:
                crashed.append(kind)
    print(f"readers that crashed: {', '.join(crashed) or 'none'} (of {', '.join(kinds)}; {seconds} s each)")
    return int(bool(crashed))


def fuzz(kind: str, folder: Path, seconds: int) -> None:
    """Does not return: atheris ends the process."""
    import atheris

    with atheris.instrument_imports(include=["hzplan.formats", "json"]):
        from tests.unit.test_formats import READERS, SAMPLES

    from hzplan.errors import UserError

    corpus = folder / "corpus"
    corpus.mkdir()
    (corpus / kind).write_bytes(SAMPLES[kind])
    path = folder / "file.json"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        try:
            READERS[kind](path)
        except UserError as error:
            text = str(error)
            assert str(path) in text and "\n" not in text and len(text) < 1000, text

    options = [f"-max_total_time={seconds}", f"-max_len={LONGEST}", "-timeout=20", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *options, f"-artifact_prefix={Path.cwd()}/fuzz-{kind}-", str(corpus)], read)
    atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        fuzz(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    else:
        from tests.unit.test_formats import READERS as ALL

        named = [argument for argument in sys.argv[1:] if not argument.isdigit()]
        limits = [int(argument) for argument in sys.argv[1:] if argument.isdigit()]
        sys.exit(main(named or list(ALL), limits[0] if limits else SECONDS))
