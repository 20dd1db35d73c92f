"""What the documents tell a person to type works."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"<!-- (\w+) -->\n```python\n(.*?)```", README, re.DOTALL))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["keras", "torch", "verbs"])
def test_the_code_in_the_readme_runs_and_prints_what_it_says(name, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:isobatch", "-c", BLOCKS[name]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = re.findall(r"print\(.*\)  # (.+)", BLOCKS[name])
    assert said
    assert done.stdout.split("\n")[: len(said)] == said


def test_every_block_of_code_in_the_readme_is_run():
    assert README.count("```python") == len(BLOCKS) == 3


def test_the_commands_in_the_documents_are_targets():
    targets = set(
        re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    for document in (README, (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")):
        asked = set(re.findall(r"^\s*make ([a-z-]+)", document, re.MULTILINE))
        assert asked
        assert asked <= targets


def test_links_between_the_documents_lead_somewhere():
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target, anchor in re.findall(
            r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", document.read_text(encoding="utf-8")
        ):
            path = (document.parent / target) if target else document
            assert path.exists(), f"{document.name} links to {target}"
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert not anchor or anchor in slugs, f"{document.name} links to {target}#{anchor}"
