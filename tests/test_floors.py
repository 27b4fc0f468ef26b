"""The import floors of docs/architecture.md, checked on the source: a lower floor never imports a higher one."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*ROOT.glob("dspark_ray/**/*.py"), *ROOT.glob("deployments/**/*.py")])

# Longest prefix wins. A module may import its own floor and lower ones.
FLOORS = {
    "dspark_ray": 0,  # errors, config, request: types every floor uses
    "dspark_ray.algorithm": 1,
    "dspark_ray.models": 2,
    "dspark_ray.engine": 3,
    "dspark_ray.offline": 4,
    "dspark_ray.exactness": 4,
    "dspark_ray.workers": 5,
    "dspark_ray.training": 5,
    "deployments": 6,
    "dspark_ray.cli": 7,
}

FORBIDDEN = {
    0: {"torch", "ray", "transformers", "numpy"},
    1: {"ray", "transformers", "torch.distributed", "httpx", "safetensors", "huggingface_hub"},
    2: {"ray"},
    3: {"ray"},
    4: {"ray"},
}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(module: str) -> int | None:
    while module:
        if module in FLOORS:
            return FLOORS[module]
        module = module.rpartition(".")[0]
    return None


def imports_of(path: Path) -> list[tuple[int, str]]:
    """(line, module) of every import in the file; `from a import b` also yields a.b, which may be a module."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [(node.lineno, node.module)]
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_no_module_imports_a_higher_floor(path: Path) -> None:
    floor = floor_of(module_of(path))
    assert floor is not None
    # The package's own front page re-exports from its floor only, so `dspark_ray` itself counts as floor 0.
    too_high = [(line, name) for line, name in imports_of(path) if (floor_of(name) or 0) > floor]
    assert not too_high, f"{module_of(path)} is on floor {floor}"


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_no_module_imports_what_its_floor_must_not_know(path: Path) -> None:
    forbidden = FORBIDDEN.get(floor_of(module_of(path)) or 0, set())
    known = [
        (line, name)
        for line, name in imports_of(path)
        if any(name == other or name.startswith(f"{other}.") for other in forbidden)
    ]
    assert not known


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_imports_are_absolute_and_at_the_top(path: Path) -> None:
    tree = ast.parse(path.read_text())
    relative = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    assert not relative, "relative imports"
    top = {id(node) for node in tree.body}
    nested = [
        node.lineno for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in top
    ]
    assert not nested, "imports inside functions or under a guard"


def test_the_imports_between_our_modules_have_no_cycle() -> None:
    names = {module_of(path) for path in SOURCES}
    graph = {module_of(path): {name for _, name in imports_of(path)} & names for path in SOURCES}
    done: set[str] = set()
    while len(done) < len(graph):
        ready = {name for name in graph.keys() - done if graph[name] - {name} <= done}
        assert ready, f"cycle among {sorted(graph.keys() - done)}"
        done |= ready


def test_importing_the_package_imports_neither_torch_nor_ray() -> None:
    code = "import sys, dspark_ray; sys.exit(', '.join({'torch', 'ray', 'transformers'} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
