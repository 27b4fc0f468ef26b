"""The README keeps its promises: it names every source file, and what it tells to run exists."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_the_file_tree_names_every_module() -> None:
    tree = README.split("## Files")[1]
    folders = ("dspark_ray", "deployments", "examples", "benchmarks")
    modules = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if not path.name.startswith("__")]
    missing = [str(path.relative_to(ROOT)) for path in modules if path.name not in tree]
    assert not missing
    named = set(re.findall(r"\b[a-z_]+\.py\b", tree))
    assert named <= {path.name for path in modules}


def test_every_make_target_named_in_the_readme_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", README)) <= targets


def test_install_and_run_come_within_the_first_thirty_lines() -> None:
    head = "\n".join(README.splitlines()[:30])
    assert head.index("make demo") < head.index("make test") < head.index("curl ")


def test_every_requirement_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    names = {re.split(r"[\[<>=]", requirement)[0].lower().replace("_", "-") for requirement in wanted}
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in pins if "==" in line}
    assert names - {project["name"]} <= pinned
