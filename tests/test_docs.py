"""The pages: no long lines, no link that leads nowhere, no name of a file that is gone."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LONGEST_LINE = 120
# Where a path in a page may begin.
BASES = ["", "csrc", "csrc/engine", "csrc/transport", "bench", "docs", "tests"]
# Patterns, and files that are made when something runs.
ELSEWHERE = {"graph/trees.cc", "horovod/__init__.py"}  # NCCL's, and a package that users write
ENDING = "(?:h|cc|cu|cuh|py|md|cmake)"
NO_PATH = re.compile(r"[*{}<>~ ]|^build/|^/")


def long_lines(text: str) -> list[str]:
    """But for tables, whose rows are lines, and links that cannot be broken."""
    return [line for line in text.splitlines() if len(line) > LONGEST_LINE and not line.startswith("|")]


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        known = anchors(target.read_text()) if anchor and target.suffix == ".md" and target.exists() else {anchor}
        if not target.exists() or anchor not in known:
            broken.append(link)
    return broken


def missing_files(text: str, in_pictures: bool = False) -> list[str]:
    """Paths in `code`, and those in pictures where asked for, with a folder and an ending of a source or a page."""
    named = re.findall(rf"`([\w./*{{}}<>~ -]+/[\w.*{{}}<>-]+\.{ENDING})`", prose(text))
    if in_pictures:
        pictures = "".join(re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL))
        named += re.findall(rf"(?<![\w/])(?:\w+/)+\w+\.{ENDING}\b", pictures)
    return [
        path
        for path in named
        if path not in ELSEWHERE
        and not NO_PATH.search(path)
        and not any((ROOT / base / path).exists() for base in BASES)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_can_be_read_and_followed(page: Path) -> None:
    text = page.read_text()
    if page.name != "CHANGELOG.md":  # whose entries are of the time when they were written
        assert long_lines(text) == []
        assert missing_files(text, in_pictures=page.name == "design.md") == []
    assert broken_links(page, text) == []


def test_these_rules_can_fail() -> None:
    page = ROOT / "docs" / "design.md"
    assert long_lines("a" * 121 + "\n|" + "b" * 200 + "\n") == ["a" * 121]
    assert missing_files("`engine/node/pull.h`, `dcoll/gone.py`, `bench/results/*.md`") == ["dcoll/gone.py"]
    picture = "```\n  1  Pull::poll  node/pull.cc   node/gone.cc -> node/staged.cc\n```\n"
    assert missing_files(picture) == []
    assert missing_files(picture, in_pictures=True) == ["node/gone.cc"]
    assert broken_links(page, "# Locks\n[a](#nothing) [b](gone.md) [c](notebook/README.md) [d](https://x.org)") == [
        "#nothing",
        "gone.md",
    ]


def test_every_plot_of_the_pages_is_drawn_by_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "bench")
    import plots

    named = {name for page in PAGES for name in re.findall(r"\(plots/([\w-]+)\.svg\)", page.read_text())}
    assert named == set(plots.PLOTS)
    assert plots.main([str(tmp_path)]) == 0
    assert all("</svg>" in (tmp_path / f"{name}.svg").read_text() for name in named)
