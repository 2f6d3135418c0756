"""What a release consists of, beside the code: versions that agree, and files that are in the packages."""

import re
import tomllib
from pathlib import Path

import unisono

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def test_package_and_citation_have_the_version_and_the_licence():
    fields = dict(re.findall(r"^([\w-]+): (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    assert fields["version"] == PROJECT["version"] == unisono.__version__
    assert fields["license"] == PROJECT["license"]
    assert fields["abstract"] == PROJECT["description"]


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
