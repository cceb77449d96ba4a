"""The README and the pages in docs are true: their Python blocks and commands print what is shown.

The Python blocks of a page are one program; a text block after one is what it prints. A line ``...`` stands for any
lines. Numbers that differ between machines (times, speeds, sizes of the process, rounding errors) are not compared.
``python -m tests.test_readme`` writes the outputs of the Python blocks anew, and of commands that are shown whole.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
MARK = "@@ end of block @@"
#: Lines that are left out.
_GAP = re.compile(r"^\.\.\.\n", re.MULTILINE)
_BLOCK = re.compile(r"```(\w+)\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)
# Commands that take long; the tests of the command line run the same code.
SLOW = ("functitan train", "functitan check", "functitan lower llama3-debug --mesh fsdp=8 --vs")


def blocks(text, language):
    """Pairs of a block's code and the output that is shown for it, or None."""
    return [(m[2], m[3]) for m in _BLOCK.finditer(text) if m[1] == language]


def run(words, folder):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def tour(text, folder):
    """What each Python block prints when all are one file with an empty line between blocks."""
    codes = [code for code, _ in blocks(text, "python")]
    # The empty line holds the mark, so that line numbers are those of the pasted file.
    (folder / "tour.py").write_text(f"print({MARK!r})\n".join(codes))
    return run([sys.executable, "tour.py"], folder).split(MARK + "\n")


def command(code, folder):
    """What a command line of functitan prints."""
    return run([sys.executable, "-m", "functitan.cli", *shlex.split(code)[1:]], folder)


def masked(text):
    """Without what differs between machines."""
    text = re.sub(r"\d+\.\de-\d\d", "#.#e-##", text)
    text = re.sub(r"0\.0e\+00", "#.#e-##", text)
    text = re.sub(r"(allowed [^)]*\)) at .*", r"\1 at #", text)
    text = re.sub(r" *\d+ tokens/s", " # tokens/s", text)
    text = re.sub(r"\d+:\d\d left", "#:## left", text)
    text = re.sub(r"was compiled in .*", "was compiled in #", text)
    return re.sub(r"(peak memory|run folder) +.*", r"\1 #", text)


def assert_shown(shown, printed):
    """Every shown line is printed, in this order; ``...`` stands for any lines."""
    parts = [re.escape(part) for part in _GAP.split(masked(shown))]
    pattern = r"(?:.*\n)*?".join(parts)
    assert re.fullmatch(pattern, masked(printed)), f"shown:\n{shown}\nprinted:\n{printed}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_print_what_is_shown(page, tmp_path):
    text = page.read_text()
    shown = [out for _, out in blocks(text, "python")]
    if not shown:
        pytest.skip("the page has no Python blocks")
    printed = tour(text, tmp_path)
    assert len(printed) == len(shown)
    for expected, found in zip(shown, printed, strict=True):
        assert_shown(expected or "", found)


def commands():
    for code, shown in blocks(README.read_text(), "sh"):
        if shown is not None and code.startswith("functitan"):
            marks = [pytest.mark.slow] if code.startswith(SLOW) else []
            yield pytest.param(code, shown, marks=marks, id=code.strip())


@pytest.mark.parametrize(("code", "shown"), list(commands()))
def test_a_command_prints_what_is_shown(code, shown, tmp_path):
    assert_shown(shown, command(code, tmp_path))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    missing = [link for link in links if not link.startswith("http") and not (page.parent / link).exists()]
    assert not missing


def rewrite(page, folder):
    """The page with the outputs that its code has now."""
    text = page.read_text()
    outputs = iter(tour(text, folder) if blocks(text, "python") else [])

    def written(match):
        language, code, shown = match.groups()
        if language == "python":
            out = next(outputs)
        elif (
            language == "sh" and shown is not None and not _GAP.search(shown) and not code.startswith("functitan train")
        ):
            out = command(code, folder)
        else:
            return match[0]
        return f"```{language}\n{code}```\n" + (f"\n```text\n{out}```\n" if out else "")

    page.write_text(_BLOCK.sub(written, text))


if __name__ == "__main__":
    for page in PAGES:
        with tempfile.TemporaryDirectory() as folder:
            rewrite(page, Path(folder))
