"""What a release consists of, beside the code: versions that agree, and files that are in the packages."""

import re
import tomllib
from pathlib import Path

import unisono
from compat.__main__ import COMMAND, PAGE
from compat.table import key
from helpers.page_tables import read_table

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def test_package_and_citation_have_the_version_and_the_licence():
    fields = dict(re.findall(r"^([\w-]+): (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    assert fields["version"] == PROJECT["version"] == unisono.__version__
    assert fields["license"] == PROJECT["license"]
    assert fields["abstract"] == PROJECT["description"]


def test_the_description_on_an_index_has_no_relative_link():
    """Pages and pictures of the repository are not there."""
    text = (ROOT / "README.md").read_text()
    assert re.search(r"\]\((?!http)", text)
    for each in PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    assert not re.search(r"\]\((?!http)", text)
    assert "From DDP · Error messages ·" in text


def test_the_changelog_keeps_its_form():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(.+?)\](?: - \d{4}-\d\d-\d\d)?$", text, re.MULTILINE)
    assert versions[0] == "Unreleased"
    assert len(versions) == len(re.findall(r"^## ", text, re.MULTILINE))
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Known limits"}
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= kinds


def test_the_sdist_has_what_lies_beside_the_code():
    included = PYPROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert [path for path in included if not (ROOT / path.removeprefix("/")).exists()] == []
    assert {f"/{name}" for name in ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md")} <= set(included)


def test_pythons_and_torch_are_those_of_the_table():
    """docs/compatibility.md, whose table `make compat` writes."""
    rows = [key(line) for line in read_table(PAGE, COMMAND).splitlines()[2:]]
    named = "Programming Language :: Python :: "
    pythons = [each.removeprefix(named) for each in PROJECT["classifiers"] if re.match(rf"{named}\d\.\d", each)]
    assert pythons == [".".join(map(str, release)) for release in sorted({release for release, _, _ in rows})]
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    oldest = min(torch for _, _, torch in rows)
    assert PROJECT["dependencies"] == [f"torch>={oldest[0]}.{oldest[1]}"]
